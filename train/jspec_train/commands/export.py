"""`jspec export`: a drafter of a run, in the layout and precision that others read."""

from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import typer
from rich.console import Console

from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.dflash_save import save_dflash


def export_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of a run (its best drafter is taken), or of a drafter.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    layout: Annotated[
        str, typer.Option(help='"sglang" (also SpecForge) or "speculators" (also vLLM).')
    ] = "sglang",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    target_name: Annotated[
        str | None, typer.Option(help='Hub id of the target, for layout "speculators".')
    ] = None,
) -> None:
    """Writes a drafter's config and weights; nothing of the target is in them."""
    if layout not in ("sglang", "speculators"):
        raise ValueError(f'layout: expected "sglang" or "speculators", got {layout!r}; pick one of these')
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype!r}; pick one of these")
    folder = source / "best" if (source / "best").is_dir() else source
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"source: expected a run that has finished or a drafter's folder, got {source}; "
            "`jspec train` writes RUN/best at its end"
        )
    loaded = load_dflash(folder, jnp.float32)
    files = {
        path.name: path.read_text("utf-8") for path in folder.glob("*.json") if path.name != "config.json"
    }
    save_dflash(
        out,
        loaded.drafter.config,
        loaded.params,
        dtype=jnp.dtype(dtype),
        layout=layout,  # type: ignore[arg-type]
        target_name=target_name,
        files=files,
    )
    Console().print(f"{loaded.drafter.config.identity}, {dtype}, written to {out}")
