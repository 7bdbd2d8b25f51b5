"""`jspec COMMAND`: commands are named here and imported on use."""

import importlib
import sys

COMMANDS = {
    "demo": ("jspec.commands.demo:demo", "Decode built-in prompts, plain and speculative, side by side."),
    "generate": ("jspec.commands.generate:generate", "Decode prompts from the command line or a file."),
    "prepare": (
        "jspec_train.commands.prepare:prepare_command",
        "Make training samples of text, with the target's chat template.",
    ),
    "regenerate": (
        "jspec_train.commands.regenerate:regenerate_command",
        "Let the target answer prompts, for its drafter to learn from.",
    ),
    "capture": (
        "jspec_train.commands.capture:capture_command",
        "Write the target's hidden states for prepared samples to disk.",
    ),
    "train": ("jspec_train.commands.train:train_command", "Train a drafter for a target, from a recipe."),
    "plan-train": (
        "jspec_train.commands.plan:plan_train_command",
        "Compile a training step for TPUs that are not here: memory, collectives, bounds of time.",
    ),
    "evaluate": (
        "jspec_train.commands.evaluate:evaluate_command",
        "Measure a drafter on held-out samples: loss, acceptance, speed.",
    ),
    "export": ("jspec_train.commands.export:export_command", "Write a trained drafter for others to read."),
    "check": (
        "jspec_train.commands.check:check_command",
        "Find out why a drafter is not accepted, step by step.",
    ),
    "calibrate": (
        "jspec.commands.calibrate:calibrate",
        "Fit a drafter's confidence to what is accepted.",
    ),
    "profile": (
        "jspec.commands.profile:profile_command",
        "Measure seconds per round on this machine, for scheduled verification.",
    ),
    "plan": (
        "jspec.commands.plan:plan",
        "Compile an engine for TPUs that are not here: memory, collectives, bounds of time.",
    ),
    "bench": ("jspec.commands.bench:bench", "Measure drafters against plain decoding in one run."),
    "serve": (
        "jspec_serve.commands.serve:serve_command",
        "Serve a target and a drafter over HTTP, as OpenAI's API.",
    ),
    "batch": (
        "jspec_serve.commands.batch:batch_command",
        "Answer a file of requests in OpenAI's batch format.",
    ),
}

# Ours: that one of them lacks a module is a fault, not something to install.
PACKAGES = ("jspec", "jspec_train", "jspec_serve", "pallas_kernels")


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; prints the list of commands if none, or an unknown one, is named.

    What a user can set right is one line on standard error and exit code 2. `--traceback`, anywhere,
    shows where it was raised instead.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return
    if name not in COMMANDS:
        print(f"jspec: expected one of {', '.join(COMMANDS)}, got {name!r}\n\n{overview()}", file=sys.stderr)
        raise SystemExit(2)
    try:
        run(name, arguments[1:])
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, RuntimeError, TypeError) as problem:
        if traceback:
            raise
        print(f"jspec {name}: {one_line(problem)}", file=sys.stderr)
        raise SystemExit(2) from None


def run(name: str, arguments: list[str]) -> None:
    """Imports and runs a command; typer ends it with SystemExit."""
    module, function = COMMANDS[name][0].split(":")
    try:
        import typer

        command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in PACKAGES:
            raise
        extra = {"jspec_train": "train", "jspec_serve": "serve"}.get(module.partition(".")[0], "cli")
        raise ValueError(
            f"expected the package {missing.name}, got none; pip install 'jspec[{extra}]'"
        ) from missing
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app(arguments, prog_name=f"jspec {name}", standalone_mode=True)


def one_line(problem: Exception) -> str:
    """An error on one line; one that we did not word ourselves also says what it is."""
    text = " ".join(str(problem).split())
    if ": expected " in text or text.startswith("expected "):
        return text
    return f"{type(problem).__name__}: {text} (--traceback shows where)"


def overview() -> str:
    """The list of commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: jspec COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "jspec COMMAND --help tells more; --traceback shows where an error was raised.",
        ]
    )
