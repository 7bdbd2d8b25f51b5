"""`jspec COMMAND`: commands are named here and imported on use."""

import importlib
import sys

COMMANDS = {
    "demo": ("jspec.commands.demo:demo", "Decode built-in prompts, plain and speculative, side by side."),
    "generate": ("jspec.commands.generate:generate", "Decode prompts from the command line or a file."),
    "bench": ("jspec.commands.bench:bench", "Measure drafters against plain decoding in one run."),
}


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; prints the list of commands if none, or an unknown one, is named."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return
    if name not in COMMANDS:
        print(f"jspec: expected one of {', '.join(COMMANDS)}, got {name!r}\n\n{overview()}", file=sys.stderr)
        raise SystemExit(2)
    try:
        import typer
    except ImportError as missing:
        raise SystemExit(f"jspec {name}: needs the command line extra; pip install 'jspec[cli]'") from missing
    module, function = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), function)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(arguments[1:], prog_name=f"jspec {name}", standalone_mode=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError) as problem:
        print(f"jspec {name}: {problem}", file=sys.stderr)
        raise SystemExit(1) from None


def overview() -> str:
    """The list of commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["Usage: jspec COMMAND [OPTIONS]", "", *lines, "", "jspec COMMAND --help tells more."])
