"""What drafting costs by the size of the vocabulary: models of random weights that differ in nothing else.

A block drafter with a sequential head makes logits over the whole vocabulary for each draft token, beside a
backbone that runs once; the larger the vocabulary, the more of the round that is.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jspec.decode import Method, Models
from jspec.drafters.dflash_init import dflash_config_for, init_dflash_params
from jspec.drafters.dspark import dspark
from jspec.drafters.dspark_heads import Markov
from jspec.drafters.plain import plain
from jspec.engine import Engine
from jspec.net import Params
from jspec.settings import Settings
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.rope import Rope
from jspec.timings import Timings

VOCABULARIES = (4096, 32768, 131072)
HIDDEN = 256
DRAFT_LENGTH = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyCost:
    """Seconds of a decode round, with a drafter and without."""

    vocabulary: int
    plain_seconds: float
    seconds: float
    draft_share: float  # of the round with the drafter
    break_even: float  # mean commit length from which on the drafter pays

    @property
    def attainable(self) -> bool:
        """Whether a round can commit so many tokens."""
        return self.break_even < DRAFT_LENGTH + 1


def vocabulary_costs(
    vocabularies: Sequence[int] = VOCABULARIES,
    *,
    rounds: int = 16,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[VocabularyCost]:
    """Times rounds of a DSpark drafter of one layer on a target of four, beside plain ones.

    Args:
      vocabularies: sizes.
      rounds: decoded per repeat.
      repeats: interleaved; the best counts.
      progress: told what happens.
    """
    costs = []
    for vocabulary in vocabularies:
        progress(f"a vocabulary of {vocabulary}")
        engines = _engines(vocabulary)
        settings = Settings(max_tokens=rounds, ignore_eos=True)
        best: dict[str, Timings] = {}
        for repeat in range(repeats + 1):
            for name, engine in engines.items():
                timings = Timings()
                engine.generate([[1, 2, 3, 4]], settings, timings=timings)
                if repeat:  # the first one compiles
                    best[name] = min(best.get(name, timings), timings, key=_round_seconds)
        mine, base = (_round_seconds(best[name]) for name in ("dspark", "plain"))
        costs.append(
            VocabularyCost(
                vocabulary=vocabulary,
                plain_seconds=base,
                seconds=mine,
                draft_share=best["dspark"].shares["draft"],
                break_even=mine / base,
            )
        )
    return costs


def _round_seconds(timings: Timings) -> float:
    return timings.total / timings.rounds


def _engines(vocabulary: int) -> dict[str, Engine]:
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=HIDDEN // 4,
        norm_eps=1e-6,
        max_context=128,
        full_rope=Rope(theta=10_000.0),
        layer_kinds=("full",) * 4,
        query_key_norm=True,
        tied_head=True,
        query_scale=(HIDDEN // 4) ** -0.5,
    )
    drafter_config = dflash_config_for(
        config,
        block_size=DRAFT_LENGTH,
        mask_token_id=vocabulary - 1,
        target_layer_ids=(1, 3),
        head=Markov(rank=64, kind="vanilla"),
        anchor_predicts=True,
    )
    drafters = {
        "plain": (plain(), ()),
        "dspark": (
            dspark(drafter_config),
            init_dflash_params(drafter_config, jax.random.key(1), jnp.float32),
        ),
    }
    target = _random_weights(config)
    return {
        name: Engine(
            method=Method(target=DecoderTarget(config), drafter=drafter),
            models=Models(target=target, drafter=params),
            max_slots=1,
            page_size=32,
            chunks=(31,),
            prefix_cache=False,
        )
        for name, (drafter, params) in drafters.items()
    }


def _random_weights(config: DecoderConfig) -> Params:
    leaves = decoder_leaves(config, jnp.dtype(jnp.float32))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tuple(
        0.02 * jax.random.normal(key, leaf.shape, leaf.dtype) + ("norm" in leaf.path)
        for key, leaf in zip(keys, leaves, strict=True)
    )


def vocabulary_verdict(costs: Sequence[VocabularyCost]) -> str:
    """At which sizes a round must bring more than it can."""
    needs = ", ".join(
        f"{cost.vocabulary} from {cost.break_even:.2f} tokens a round on" for cost in costs if cost.attainable
    )
    never = ", ".join(str(cost.vocabulary) for cost in costs if not cost.attainable)
    pays = f"vocabulary: speculation pays at {needs}" if needs else "vocabulary: speculation pays at none"
    return f"{pays}; it does not pay at {never}, whatever is accepted" if never else pays
