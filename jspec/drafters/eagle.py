"""EAGLE, EAGLE-2, EAGLE-3 and P-EAGLE: a small recurrence over target features drafts a chain or a tree.

The drafter's pages follow the target's page table and hold the keys and values of confirmed pairs
(feature t, token t + 1) at index t; so a page belongs to its tokens and the one after them. What a
draft adds on top lives for that draft only, and the state is a function of the committed text.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.eagle_growth import Growth, best
from jspec.drafters.eagle_net import EagleConfig, Head, eagle_net
from jspec.drafters.eagle_pairs import committed_pairs
from jspec.drafters.head_columns import head_columns
from jspec.drafters.protocol import Committed, Text
from jspec.drafters.tree import Ranked
from jspec.drafters.tree_shape import TreeShape, chain_shape
from jspec.heads import commit_rows
from jspec.net import Params
from jspec.round import Proposal
from jspec.sampling import SamplingTable
from jspec.slots import rows_of, slots_of
from jspec.targets.config import LayerKind
from jspec.targets.layers import paged_layers, project_float32
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.attention.sight import Sight, causal_sight
from pallas_kernels.pytree import pytree

DRAFT_LENGTH = 5  # of a chain where nobody says; SGLang's number of steps for Llama


@pytree
class EagleState:
    """Pages that follow the target's page table; per slot, its last pair's state and first candidates."""

    pages: Pages
    states: Float[Array, "slots hidden"]  # of the pair that holds the anchor, as the step returned it
    ids: Int[Array, "slots candidates"]  # target ids that may follow the anchor, best first; -1 = none
    probs: Float[Array, "slots candidates"]
    head: Float[Array, "hidden draft_vocabulary"] | None  # the target's columns that are drafted; None = all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle:
    """See `eagle`."""

    config: EagleConfig
    shape: TreeShape
    simulated: bool = False

    @property
    def name(self) -> str:
        """Method and shape."""
        method = {"EAGLE": "eagle", "EAGLE-3": "eagle3", "P-EAGLE": "peagle"}[self.config.method]
        return method if self.shape.width == 1 else f"{method}-tree"

    @property
    def draft_length(self) -> int:
        """Draft tokens per proposal, over all branches."""
        return self.shape.draft_length

    @property
    def draft_depth(self) -> int:
        """Draft tokens on the longest path."""
        return self.shape.draft_depth

    @property
    def features(self) -> tuple[str, ...]:
        """The target states that it was trained on."""
        return self.config.features

    def init(self, params: Params, target: TargetView, max_slots: int) -> EagleState:
        """Empty pages, one for each of the target's, and slots without candidates.

        Raises:
          ValueError: naming both sides, if the drafter was made for another target.
        """
        check_target(self.config, target)
        net = eagle_net(self.config, params)
        group, decoder = target.cache.groups[0], self.config.decoder
        pages = allocate(
            num_layers=decoder.num_layers,
            num_pages=group.pages.num_pages,
            page_size=group.pages.page_size,
            num_kv_heads=decoder.stored_kv_heads,
            head_size=decoder.head_size,
            dtype=group.pages.dtype,
            whole=decoder.replicated,
        )
        head = (
            None
            if net.draft_ids is None or self.config.own_head
            else head_columns(target.logits, decoder.hidden_size, net.draft_ids[...])
        )
        width = self.shape.width
        return EagleState(
            pages=pages,
            states=jnp.zeros((max_slots, decoder.hidden_size), net.fc[...].dtype),
            ids=jnp.full((max_slots, width), -1, jnp.int32),
            probs=jnp.zeros((max_slots, width), jnp.float32),
            head=head,
        )

    def absorb(
        self,
        params: Params,
        target: TargetView,
        state: EagleState,
        lanes: Int[Array, "lanes"],
        text: Text,
        committed: Committed,
    ) -> tuple[EagleState, Int[Array, "lanes"]]:
        """Runs the layers over the new pairs, keeps their rows, and prepares the first candidates."""
        net = eagle_net(self.config, params)
        pairs = committed_pairs(committed, lanes, text)
        page_table = target.cache.groups[0].page_table[rows_of(lanes)]
        decoder = self.config.decoder
        sights: dict[LayerKind, Sight] = {
            kind: causal_sight(
                pairs.offsets,
                page_table,
                committed.context_lengths,
                pairs.positions,
                max_queries=pairs.max_pairs,
                window=window,
            )
            for kind, window in decoder.windows.items()
        }
        states, k, v = net.step(
            net.embed(pairs.next_tokens, target.embed),
            net.fuse(pairs.features),
            pairs.positions,
            paged_layers(decoder, state.pages, sights),
            state.pages.dtype,
        )
        pages = commit_rows(state.pages, k, v, pairs.path, page_table, committed.context_lengths)
        last = states[jnp.maximum(pairs.offsets[1:] - 1, 0)]
        ids, probs = best(net, net.logits(last, self._head(target, state)), self.shape.width)
        grown = jnp.where(jnp.diff(pairs.offsets) > 0, lanes, -1)
        slots = slots_of(grown, state.states.shape[0])
        state = EagleState(
            pages=pages,
            states=state.states.at[slots].set(last, mode="drop"),
            ids=state.ids.at[slots].set(ids, mode="drop"),
            probs=state.probs.at[slots].set(probs, mode="drop"),
            head=state.head,
        )
        return state, jnp.where(self._drafting(target, lanes, text), self.draft_length, 0)

    def draft(
        self,
        params: Params,
        target: TargetView,
        state: EagleState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """Grows the shape from the prepared candidates, with depth - 1 passes (P-EAGLE: one)."""
        rows, drafting = rows_of(lanes), self._drafting(target, lanes, text)
        growth = Growth(
            net=eagle_net(self.config, params),
            shape=self.shape,
            head=self._head(target, state),
            target=target,
            pages=state.pages,
            sampling=sampling,
            lanes=lanes,
            drafting=drafting,
            context_lengths=jnp.where(drafting, target.cache.lengths[rows], 0),
        )
        states = state.states[rows]
        prepared = Ranked(ids=state.ids[rows][:, None], probs=state.probs[rows][:, None])
        first = growth.first(states, prepared)
        if self.config.mask_token_id is None:
            proposal = growth.depth_by_depth(states, first)
        else:
            proposal = growth.at_once(first)
        # The first row that is no distribution (-1) ends the proposal: what is before it is still a tree.
        sound = jnp.cumprod((proposal.tokens >= 0).astype(jnp.int32), axis=1)
        return dataclasses.replace(
            proposal,
            tokens=jnp.maximum(proposal.tokens, 0),
            lengths=jnp.where(drafting, jnp.sum(sound, axis=1, dtype=jnp.int32), 0),
        )

    def _head(self, target: TargetView, state: EagleState) -> Head:
        """The target's head over the drafted ids."""

        def head(hidden: Array) -> Array:
            return target.logits(hidden) if state.head is None else project_float32(hidden, state.head)

        return head

    def _drafting(self, target: TargetView, lanes: Int[Array, "lanes"], text: Text) -> Bool[Array, "lanes"]:
        """Lanes whose whole text but the anchor is committed, and whose draft the drafter can place."""
        rows = rows_of(lanes)
        context_lengths = target.cache.lengths[rows]
        ready = text.lengths[rows] == context_lengths + 1
        fits = context_lengths + (self.shape.draft_depth - 1) <= self.config.decoder.max_context
        return (lanes >= 0) & ready & fits


def eagle(config: EagleConfig, *, draft_length: int | None = None, tree: TreeShape | None = None) -> Eagle:
    """An EAGLE, EAGLE-3 or P-EAGLE drafter.

    Args:
      config: from `jspec.checkpoints.eagle.load_eagle`, or of an own drafter.
      draft_length: of a chain; None = 5.
      tree: a shape from `jspec.drafters.tree_shape` instead of a chain: `dynamic_tree` is EAGLE-2's.

    Raises:
      ValueError: both, a length below 1, or a tree wider than the drafted vocabulary.

    Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840); SGLang 0.5.23,
      speculative/eagle_worker_v2.py: like there, the candidates after the anchor are made when its
      features are absorbed.
    """
    if tree is not None and draft_length is not None:
        raise ValueError(f"draft_length: expected None with a tree, which has its own, got {draft_length}")
    shape = chain_shape(DRAFT_LENGTH if draft_length is None else draft_length) if tree is None else tree
    drafted = config.draft_vocab_size or config.decoder.vocab_size
    if shape.width > drafted:
        raise ValueError(
            f"tree: expected at most {drafted} candidates of a node, as so many ids are drafted, got "
            f"{shape.width}; draft a narrower tree"
        )
    return Eagle(config=config, shape=shape)


def check_target(config: EagleConfig, view: TargetView) -> None:
    """Refuses a target that the drafter was not made for.

    Raises:
      ValueError: the first difference, with both identities.
    """
    target = view.target
    wanted = [
        ("layers", config.num_target_layers, target.num_layers),
        ("hidden size of a captured state", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.decoder.vocab_size, target.vocab_size),
    ]
    problems = [f"{what} {own}, not {its}" for what, own, its in wanted if own is not None and own != its]
    layers = [int(name.partition(".")[2]) for name in config.features if name.startswith("layer.")]
    missing = [layer for layer in layers if layer >= target.num_layers]
    if missing:
        problems.append(f"states {missing} of a target that has layers 0 to {target.num_layers - 1}")
    if problems:
        raise ValueError(
            f"drafter: expected a target with {problems[0]}; the drafter is ({config.identity}), the target "
            f"({target.identity}); load the target that it was trained for, or another drafter"
        )
