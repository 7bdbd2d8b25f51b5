"""A draft of an EAGLE drafter: passes that grow a chain or tree from the candidates after the anchor."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.dflash import choose
from jspec.drafters.dflash2_lattice import top_candidates
from jspec.drafters.eagle_net import EagleNet, Head
from jspec.drafters.eagle_rollout import Rollout
from jspec.drafters.tree import Frontier, Ranked, frontier_sight, grow
from jspec.drafters.tree_shape import TreeShape
from jspec.round import Proposal
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.targets.config import LayerKind
from jspec.targets.layers import paged_layers
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight, causal_sight
from pallas_kernels.vocabulary_row.choices import argmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """What the passes of one draft share. Lanes that do not draft take part with an empty context."""

    net: EagleNet
    shape: TreeShape
    head: Head
    target: TargetView
    pages: Pages
    sampling: SamplingTable
    lanes: Int[Array, "lanes"]
    drafting: Bool[Array, "lanes"]
    context_lengths: Int[Array, "lanes"]  # pairs in the pages; 0 for lanes that do not draft

    def first(self, states: Float[Array, "lanes hidden"], prepared: Ranked) -> Ranked:
        """Candidates after the anchor: the prepared ones, unless a seed's noise has a say.

        Args:
          states: of the lanes' last pairs.
          prepared: the best candidates of these states.
        """
        if self.shape.width > 1:
            return prepared
        rows = rows_of(self.lanes)
        coupled = self.drafting & self.sampling.seeded[rows] & (self.sampling.temperature[rows] > 0)
        drawn = lambda: self.ranked(self.net.logits(states, self.head), depth=1)  # noqa: E731
        return jax.lax.cond(jnp.any(coupled), drawn, lambda: prepared)

    def ranked(self, logits: Float[Array, "rows draft_vocabulary"], depth: int) -> Ranked:
        """Candidates of rows that lie lane after lane; a lane's first row drafts the token at `depth`.

        In a chain, a request with a seed is drafted by its noise, as the coupled verifier draws. What
        hangs on a tree's node is always the best.
        """
        net, num_lanes = self.net, self.lanes.shape[0]
        if self.shape.width == 1:
            ids = None if net.draft_ids is None else net.draft_ids[...]
            positions = self.context_lengths + depth
            vocab_size = net.config.decoder.vocab_size
            columns = choose(logits, self.sampling, self.lanes, positions, ids, vocab_size).reshape(-1, 1)
        else:
            columns = top_candidates(logits, self.shape.width).ids
        ids, probs = probable(net, logits, columns)
        shape = (num_lanes, -1, ids.shape[1])
        return Ranked(ids=ids.reshape(shape), probs=probs.reshape(shape))

    def depth_by_depth(self, states: Float[Array, "lanes hidden"], first: Ranked) -> Proposal:
        """A pass for every depth but the last; each is fed with what the one before returned."""
        net, decoder = self.net, self.net.config.decoder

        def extend(rollout: Rollout, frontier: Frontier) -> tuple[Rollout, Ranked]:
            sights: dict[LayerKind, Sight] = {
                kind: frontier_sight(frontier, self._page_table, self.context_lengths, window=window)
                for kind, window in decoder.windows.items()
            }
            fed = jnp.take_along_axis(rollout.states, frontier.sources[:, :, None], axis=1)
            positions = self.context_lengths + (frontier.depth - 1)
            states, k, v = net.step(
                net.embed(frontier.tokens.reshape(-1), self.target.embed),
                net.fed_back(fed.reshape(-1, fed.shape[2])),
                jnp.repeat(positions, frontier.tokens.shape[1]),
                lambda layer: rollout.see(decoder, self.pages, layer, sights[decoder.layer_kinds[layer]]),
                self.pages.dtype,
            )
            ranked = self.ranked(net.logits(states, self.head), depth=frontier.depth + 1)
            return rollout.extended(states, k, v), ranked

        start = Rollout.start(states, decoder, self.pages.dtype)
        return grow(self.shape, first, extend, start)[0]

    def at_once(self, first: Ranked) -> Proposal:
        """P-EAGLE: one pass over masked rows, one per further depth, whose candidates all nodes there share."""
        later = self._masked() if self.shape.draft_depth > 1 else None

        def extend(state: None, frontier: Frontier) -> tuple[None, Ranked]:
            assert later is not None
            shape = (*frontier.tokens.shape, self.shape.width)
            row = frontier.depth - 1
            ids, probs = (jnp.broadcast_to(array[:, row, None], shape) for array in (later.ids, later.probs))
            return None, Ranked(ids=ids, probs=probs)

        return grow(self.shape, first, extend, None)[0]

    def _masked(self) -> Ranked:
        """A masked row sees the context and the masked rows before it."""
        net, num_lanes, depths = self.net, self.lanes.shape[0], self.shape.draft_depth - 1
        mask, token = net.mask_hidden, net.config.mask_token_id
        assert mask is not None and token is not None
        within = jax.lax.broadcasted_iota(jnp.int32, (num_lanes, depths), 1)
        positions = (self.context_lengths[:, None] + within).reshape(-1)
        decoder = net.config.decoder
        sights: dict[LayerKind, Sight] = {
            kind: causal_sight(
                depths * jnp.arange(num_lanes + 1, dtype=jnp.int32),
                self._page_table,
                self.context_lengths,
                positions,
                max_queries=depths,
                window=window,
            )
            for kind, window in decoder.windows.items()
        }
        embedding = net.embed(jnp.array([token], jnp.int32), self.target.embed)
        state = net.fuse(mask[...][None])
        states, _, _ = net.step(
            jnp.broadcast_to(embedding, (num_lanes * depths, embedding.shape[1])),
            jnp.broadcast_to(state, (num_lanes * depths, state.shape[1])),
            positions,
            paged_layers(decoder, self.pages, sights),
            self.pages.dtype,
        )
        return self.ranked(net.logits(states, self.head), depth=2)

    @property
    def _page_table(self) -> Int[Array, "lanes columns"]:
        return self.target.cache.groups[0].page_table[rows_of(self.lanes)]


def best(
    net: EagleNet, logits: Float[Array, "rows draft_vocabulary"], width: int
) -> tuple[Int[Array, "rows candidates"], Float[Array, "rows candidates"]]:
    """The `width` best target ids of each row and their probabilities; see `probable`."""
    columns = argmax(logits)[:, None] if width == 1 else top_candidates(logits, width).ids
    return probable(net, logits, columns)


def probable(
    net: EagleNet, logits: Float[Array, "rows draft_vocabulary"], columns: Int[Array, "rows candidates"]
) -> tuple[Int[Array, "rows candidates"], Float[Array, "rows candidates"]]:
    """Target ids of columns, and their probabilities; -1 and NaN where the row is no distribution."""
    scores = jnp.take_along_axis(logits, jnp.maximum(columns, 0), axis=1)
    probs = jnp.exp(scores - jax.nn.logsumexp(logits, axis=1, keepdims=True))
    return net.target_ids(jnp.where(jnp.isfinite(probs), columns, -1)), probs
