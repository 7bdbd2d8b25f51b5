"""`jspec export`: a drafter of a run, in the layout and precision that others read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import jax.numpy as jnp
import typer
from rich.console import Console

from jspec.checkpoints.dflash_save import Layout as DFlashLayout
from jspec.checkpoints.dflash_save import save_dflash
from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.eagle_save import Layout as EagleLayout
from jspec.checkpoints.eagle_save import save_eagle
from jspec.checkpoints.safetensors_files import INDEX
from jspec.drafters.dflash import DFlash

DFLASH_LAYOUTS: tuple[str, ...] = get_args(DFlashLayout)
EAGLE_LAYOUTS: tuple[str, ...] = get_args(EagleLayout)


def export_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of a run (its best drafter is taken), or of a drafter.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="Who reads it. DFlash: sglang (also SpecForge) or speculators (also vLLM). EAGLE: eagle, sglang, "
            "specforge, deepspec, peagle or speculators. Left out: what most programs read of such a drafter."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    target_name: Annotated[
        str | None, typer.Option(help='Hub id of the target, for layout "speculators".')
    ] = None,
) -> None:
    """Writes a drafter's config and weights; nothing of the target is in them."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype!r}; pick one of these")
    folder = source / "best" if (source / "best").is_dir() else source
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"source: expected a run that has finished or a drafter's folder, got {source}; "
            "`jspec train` writes RUN/best at its end"
        )
    loaded = load_drafter(folder, jnp.float32)
    files = texts_beside(folder)
    precision = jnp.dtype(dtype)
    if isinstance(loaded.drafter, DFlash):
        check_layout(layout, DFLASH_LAYOUTS, loaded.drafter.config.identity)
        save_dflash(
            out,
            loaded.drafter.config,
            loaded.params,
            dtype=precision,
            layout=layout or "sglang",  # type: ignore[arg-type]
            target_name=target_name,
            files=files,
        )
    else:
        check_layout(layout, EAGLE_LAYOUTS, loaded.drafter.config.identity)
        save_eagle(
            out,
            loaded.drafter.config,
            loaded.params,
            dtype=precision,
            layout=layout,  # type: ignore[arg-type]
            target_name=target_name,
            files=files,
        )
    Console().print(f"{loaded.drafter.config.identity}, {dtype}, written to {out}")


def texts_beside(folder: Path) -> dict[str, str]:
    """The JSON files of a drafter's folder that say nothing about how its weights are laid out, by name."""
    layout = ("config.json", INDEX)
    return {path.name: path.read_text("utf-8") for path in folder.glob("*.json") if path.name not in layout}


def check_layout(layout: str | None, known: Sequence[str], identity: str) -> None:
    """Refuses a layout of another method.

    Raises:
      ValueError: listing those that there are.
    """
    if layout is not None and layout not in known:
        raise ValueError(
            f"layout: expected one of {', '.join(known)} for ({identity}), got {layout!r}; pick one of these"
        )
