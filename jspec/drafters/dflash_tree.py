"""DFlash with a tree: every masked place gives several candidates, and a tree combines them.

A place's candidates do not depend on what was drafted before it, so the tree costs no further pass.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.ancestry import leading
from jspec.drafters.dflash import DFlash, DFlashState, coupled_lanes, coupled_scores, dflash_net
from jspec.drafters.dflash2_lattice import top_candidates
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Text
from jspec.drafters.tree import Frontier, Ranked, grow
from jspec.drafters.tree_shape import TreeShape
from jspec.net import Params
from jspec.round import Proposal
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.targets.view import TargetView


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashTree(DFlash):
    """See `dflash_tree`. Its state is DFlash's."""

    shape: TreeShape
    name: str = "dflash-tree"

    @property
    def draft_depth(self) -> int:
        """Draft tokens on the longest path."""
        return self.shape.draft_depth

    def draft(
        self,
        params: Params,
        target: TargetView,
        state: DFlashState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """A tree over the best tokens of every masked place; for a request with a seed, with its noise."""
        net, vocab_size = dflash_net(self.config, params), self.config.decoder.vocab_size
        _, logits = self.draft_rows(params, target, state, lanes, text)
        coupled = coupled_lanes(sampling, lanes)
        ids = None if net.draft_ids is None else net.draft_ids[...]
        scores = jax.lax.cond(
            jnp.any(coupled),
            lambda: coupled_scores(
                logits.reshape(-1, logits.shape[2]),
                sampling,
                lanes,
                coupled,
                text.lengths[rows_of(lanes)],
                ids,
                vocab_size,
            ).reshape(logits.shape),
            lambda: logits,
        )
        places = _ranked(net.target_ids, scores, self.shape.width)

        def extend(_: None, frontier: Frontier) -> tuple[None, Ranked]:
            return None, _at(places, frontier.depth, frontier.tokens.shape[1])

        proposal, _ = grow(self.shape, _at(places, 0, 1), extend, None)
        # What hangs on a place that is no distribution (NaN) is not proposed.
        sound = jnp.cumprod(~jnp.any(jnp.isnan(logits), axis=2), axis=1, dtype=jnp.int32)
        usable = jnp.where(self._drafting(target, lanes, text), jnp.sum(sound, axis=1, dtype=jnp.int32), 0)
        lengths = usable if proposal.parents is None else leading(proposal.parents, usable)
        return dataclasses.replace(proposal, lengths=lengths)


def _ranked(
    target_ids: Callable[[Array], Array], scores: Float[Array, "lanes rows vocabulary"], width: int
) -> Ranked:
    """The best of every place, as one row per place."""
    best = top_candidates(scores, width)
    probs = jnp.exp(best.unary - jax.nn.logsumexp(scores, axis=2, keepdims=True))
    return Ranked(ids=target_ids(best.ids), probs=probs)


def _at(places: Ranked, place: int, rows: int) -> Ranked:
    """The candidates of one place, for each of some nodes."""
    lanes, _, width = places.ids.shape
    ids, probs = (
        jnp.broadcast_to(array[:, place, None], (lanes, rows, width)) for array in (places.ids, places.probs)
    )
    return Ranked(ids=ids, probs=probs)


def dflash_tree(config: DFlashConfig, shape: TreeShape) -> DFlashTree:
    """A DFlash drafter that proposes trees.

    Args:
      config: as for `dflash`.
      shape: at most as deep as the block has rows that predict. A dynamic shape with beam = draft_length
        keeps exactly the most probable tokens; beams cost nothing here.

    Raises:
      ValueError: a deeper or wider shape than the block allows, or a config with a selector.
    """
    if config.selector is not None or config.head is not None:
        raise ValueError(
            f"config: expected a drafter without selector or head, got ({config.identity}), whose candidates "
            "depend on the token before; draft a chain with it"
        )
    if shape.depth > config.longest_draft:
        raise ValueError(
            f"tree: expected a depth of at most {config.longest_draft} (block_size {config.block_size}), got "
            f"{shape.depth}; draft a shallower tree"
        )
    candidates = config.draft_vocab_size or config.decoder.vocab_size
    if shape.width > candidates:
        raise ValueError(
            f"tree: expected a width of at most {candidates} (the draft vocabulary), got {shape.width}; "
            "draft a narrower tree"
        )
    return DFlashTree(config=config, draft_length=shape.draft_length, shape=shape)
