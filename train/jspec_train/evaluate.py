"""What a drafter is worth on held-out samples: teacher-forced figures, and real decoding beside plain."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.bench.measure import Measurement, measure
from jspec.capture import Capture
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.checkpoints.target import LoadedTarget
from jspec.decode import Method, Models
from jspec.drafters.dflash import DFlash, dflash_net
from jspec.drafters.eagle import Eagle
from jspec.drafters.eagle_net import eagle_net
from jspec.drafters.plain import plain
from jspec.engine import Engine
from jspec.objectives.batch import TrainBatch, on_devices
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.domino import DominoObjective
from jspec.objectives.dspark import DSparkObjective
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.frozen import FrozenTarget, Tables, draft_tables
from jspec.objectives.peagle import PEagleObjective
from jspec.objectives.terms import add
from jspec.settings import Settings
from jspec.text.tokenizer import Tokenizer
from jspec_train.data.batches import batches
from jspec_train.decoding import HeldOutPrompt
from jspec_train.loop import scalars
from jspec_train.samples import SampleSource

BlockObjective = DFlashObjective | DSparkObjective | DominoObjective
AnyObjective = BlockObjective | EagleObjective | Eagle3Objective | PEagleObjective
_SEED = 0  # of the anchors: the same ones for every drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and a drafter for it."""

    target: LoadedTarget
    tokenizer: Tokenizer
    drafter: LoadedDrafter[DFlash] | LoadedDrafter[Eagle]
    dtype: Any


def objective_of(drafter: DFlash | Eagle, num_anchors: int) -> AnyObjective:
    """The loss that says how well a drafter predicts held-out text: as deep as it drafts, all rows alike.

    Args:
      drafter: of any method that is trained here.
      num_anchors: of a block drafter, per row.
    """
    if isinstance(drafter, DFlash):
        of_method = {"DSpark": DSparkObjective, "Domino": DominoObjective}
        kind = of_method.get(drafter.config.method, DFlashObjective)
        return kind(config=drafter.config, num_anchors=num_anchors)
    config = drafter.config
    if config.kind == "eagle":
        return EagleObjective(config=config)
    depths = drafter.shape.depth
    if config.mask_token_id is not None:
        return PEagleObjective(config=config, depths=depths, ratio=1.0, least=1.0)
    return Eagle3Objective(config=config, depths=depths, decay=1.0)


def teacher_forced(
    pair: Pair, source: SampleSource, *, batch_size: int = 4, num_batches: int = 16, num_anchors: int = 64
) -> dict[str, float]:
    """Loss (all rows weighed alike) and metrics with the true text before every token.

    Raises:
      ValueError: the features in `source` are not this drafter's, or there are no samples.
    """
    drafter, target = pair.drafter.drafter, pair.target.target
    objective = objective_of(drafter, num_anchors)
    names = objective.captured
    capture = Capture(target=target, names=names, dtype=_feature_dtype(pair.dtype))
    if source.header.features is not None:
        source.header.features.check(target)
        if not set(names) <= set(source.header.features.names):
            raise ValueError(
                f"samples: expected features {list(names)}, got {list(source.header.features.names)}; "
                "use the samples without features, or capture them for this drafter"
            )
        source = source.select(names)
    frozen = FrozenTarget(params=pair.target.params, target=target)
    net = (
        dflash_net(drafter.config, pair.drafter.params)
        if isinstance(drafter, DFlash)
        else eagle_net(drafter.config, pair.drafter.params)
    )
    tables: Tables = frozen
    if net.draft_ids is not None:
        tables = draft_tables(frozen, target.hidden_size, net.draft_ids[...], target.vocab_size)

    @jax.jit
    def terms(params: Any, tables: Tables, target_params: Any, batch: TrainBatch, key: Any) -> Any:
        if not batch.features.shape[2]:
            batch = capture.batch(target_params, batch)
        return objective(params, tables, batch, key)

    found = batches(
        source,
        batch_size=min(batch_size, len(source)),
        max_length=source.counts.longest,
        seed=_SEED,
        epochs=1,
        bucket=64,
        shuffle=False,
        drop_last=False,
        prefetch=0,
    )
    pieces = []
    for index, host in enumerate(itertools.islice(found, num_batches)):
        key = jax.random.fold_in(jax.random.key(_SEED), index)
        pieces.append(terms(pair.drafter.params, tables, pair.target.params, on_devices(host), key))
    return scalars(functools.reduce(add, pieces))


def decoded(
    pair: Pair,
    prompts: Sequence[HeldOutPrompt],
    *,
    max_tokens: int,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Greedy decoding, plain and with the drafter, interleaved, per task.

    Raises:
      ValueError: see `jspec.bench.measure.measure`.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
    max_context = min(-(-longest // 128) * 128, pair.target.target.max_context)

    def engine(drafter: Any, params: Any) -> Engine:
        return Engine(
            method=Method(target=pair.target.target, drafter=drafter),
            models=Models(target=pair.target.params, drafter=params),
            tokenizer=pair.tokenizer,
            eos_ids=pair.target.eos_ids or pair.tokenizer.eos_ids,
            max_slots=1,
            max_context=max_context,
            cache_dtype=pair.dtype,
        )

    engines = {
        "plain": engine(plain(), ()),
        pair.drafter.drafter.name: engine(pair.drafter.drafter, pair.drafter.params),
    }
    tasks: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task or "untitled", []).append(list(prompt.ids))
    return measure(engines, tasks, Settings(max_tokens=max_tokens), repeats=repeats, progress=progress)


def _feature_dtype(dtype: Any) -> str:
    return "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"
