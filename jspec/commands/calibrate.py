"""`jspec calibrate`: confidence that means what it says."""

import importlib.util
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jspec.bench.confidences import Recorded, record
from jspec.bench.prompts import chats_by_task
from jspec.bench.table import NARROW
from jspec.bench.traces import recorded_traces, save_traces
from jspec.commands.options import (
    DEFAULT_CACHE,
    CompilationCache,
    DraftLength,
    Dtype,
    Model,
    check_output,
)
from jspec.loading import load
from jspec.schedule.calibration import (
    Fitted,
    fit_grid,
    fit_likelihood,
    prefix_outcomes,
    reliability,
    sigmoid,
)
from jspec.schedule.calibration_file import Calibration, save_calibration
from jspec.settings import Settings

FITS = {"grid": fit_grid, "likelihood": fit_likelihood}


def calibrate(
    drafter: Annotated[str, typer.Option(help="Folder or hub id of a drafter that gives confidence.")],
    output: Annotated[Path, typer.Option(help="The calibration, a JSON file.")],
    model: Model = None,
    draft_length: DraftLength = None,
    dtype: Dtype = "float32",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON Lines with "prompt" or "messages", held out from training. Left out: built-in ones.'
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    fit: Annotated[
        str,
        typer.Option(help="grid = temperatures of least calibration error; likelihood = scale and shift."),
    ] = "grid",
    max_slots: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    plot: Annotated[Path | None, typer.Option(help="Also draw a reliability plot, a PNG.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Also write traces for jspec bench --simulate.")] = None,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Decodes prompts, compares confidence with what was accepted, and fits a calibration."""
    if fit not in FITS:
        raise ValueError(f"fit: expected one of {', '.join(FITS)}, got {fit!r}; pick one of these")
    for name, path in (("output", output), ("plot", plot), ("traces", traces)):
        check_output(name, path)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: expected the package matplotlib, got none; pip install 'jspec[plots]'")
    console = Console()
    chats = [chat for group in chats_by_task(prompts).values() for chat in group]
    with console.status("loading the model") as status:
        engine = load(
            model,
            drafter=drafter,
            draft_length=draft_length,
            dtype=dtype,
            max_slots=max_slots,
            compilation_cache=compilation_cache,
        )
        settings = Settings(max_tokens=max_tokens, temperature=temperature)
        recorded = record(engine, chats, settings, progress=status.update)
    outcomes = prefix_outcomes(recorded.accept_lengths, recorded.logits.shape[1])
    fitted = FITS[fit](recorded.logits, outcomes)
    save_calibration(
        Calibration(
            temperatures=fitted.temperatures,
            offsets=fitted.offsets,
            survival=tuple(map(float, outcomes.mean(axis=0))),
            target=engine.method.target.identity,
            drafter=engine.method.drafter.name,
            dataset="built-in prompts" if prompts is None else prompts.name,
            num_samples=len(outcomes),
            ece_before=fitted.ece_before,
            ece_after=fitted.ece_after,
            fit=fit,
        ),
        output,
    )
    console.print(calibration_table(fitted, outcomes))
    console.print(
        f"{len(outcomes)} rounds of {len(chats)} prompts"
        + (f"; {recorded.unusable} more had confidence outside [0, 1]" if recorded.unusable else "")
    )
    console.print(f"written to {output}")
    if plot is not None:
        reliability_plot(recorded, outcomes, fitted, plot)
        console.print(f"plot written to {plot}")
    if traces is not None:
        made = recorded_traces(
            fitted.confidence(recorded.logits), recorded.accept_lengths, recorded.requests, recorded.positions
        )
        save_traces(made, traces)
        console.print(f"{len(made)} traces written to {traces}")


def calibration_table(fitted: Fitted, outcomes: np.ndarray) -> Table:
    """One row per draft token."""
    table = Table(**NARROW, title="calibration error of the survival, by draft token")
    for heading in ("draft token", "accepted so far", "temperature", "offset", "before", "after"):
        table.add_column(heading, justify="right")
    for j, share in enumerate(outcomes.mean(axis=0)):
        table.add_row(
            str(j + 1),
            f"{share:.1%}",
            f"{fitted.temperatures[j]:.3f}",
            f"{fitted.offsets[j]:+.3f}",
            f"{fitted.ece_before[j]:.4f}",
            f"{fitted.ece_after[j]:.4f}",
        )
    mean = [float(np.mean(values)) for values in (fitted.ece_before, fitted.ece_after)]
    table.add_row("mean", "", "", "", f"{mean[0]:.4f}", f"{mean[1]:.4f}")
    return table


def reliability_plot(recorded: Recorded, outcomes: np.ndarray, fitted: Fitted, path: Path) -> None:
    """Survival against the fraction accepted, before and after; a point per bin, as large as it is full."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    before, after = sigmoid(recorded.logits), fitted.confidence(recorded.logits)
    for axes, title, probs in zip(
        figure.subplots(1, 2, sharex=True, sharey=True), ("before", "after"), (before, after), strict=True
    ):
        axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
        for j in range(probs.shape[1]):
            points = reliability(np.prod(probs[:, : j + 1], axis=1), outcomes[:, j])
            sizes = [4 + 60 * count / len(outcomes) for _, _, count in points]
            means, shares = [p for p, _, _ in points], [f for _, f, _ in points]
            axes.scatter(means, shares, s=sizes, label=f"draft token {j + 1}")
        axes.set(title=f"{title} calibration", xlabel="survival", ylabel="fraction accepted")
    figure.axes[-1].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
