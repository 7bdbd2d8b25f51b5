"""`jspec train`: a drafter from a recipe."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jspec.commands.options import DEFAULT_CACHE, CompilationCache
from jspec.loading import keep_compiled_programs
from jspec_train.loop import Watcher
from jspec_train.plan import plan_table
from jspec_train.recipe import read_recipe
from jspec_train.run import open_run
from jspec_train.training import train_run
from jspec_train.watchers import JsonLog, TensorBoard, Terminal, WeightsAndBiases


def train_command(
    config: Annotated[Path, typer.Option(help="Recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that differ from it."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be done, and stop.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the recipe's output.")
    ] = False,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Trains a drafter; Ctrl-C saves, --resume goes on."""
    console = Console()
    if compilation_cache:
        keep_compiled_programs(compilation_cache)
    recipe = read_recipe(config, overrides or ())
    with console.status("opening") as status:
        run = open_run(recipe, progress=status.update)
        table = plan_table(run) if plan else None
    if table is not None:
        console.print(table)
        return
    with contextlib.ExitStack() as open_watchers:

        def watchers(done: int) -> list[Watcher]:
            folder = Path(recipe.output)
            terminal = Terminal(console, run.total_steps, done)
            open_watchers.callback(terminal.close)
            chosen: list[Watcher] = [terminal, JsonLog(folder)]
            if recipe.tensorboard:
                board = TensorBoard(folder)
                open_watchers.callback(board.close)
                chosen.append(board)
            if recipe.wandb is not None:
                service = WeightsAndBiases(folder, recipe.wandb, recipe.model_dump(mode="json"))
                open_watchers.callback(service.close)
                chosen.append(service)
            return chosen

        outcome = train_run(run, resume=resume, watchers=watchers)
    if outcome.interrupted:
        console.print(
            f"interrupted after update {int(outcome.state.step)}, saved; --resume goes on from there"
        )
        raise typer.Exit(130)
    console.print(f"done; the best drafter is in {Path(recipe.output) / 'best'}")
