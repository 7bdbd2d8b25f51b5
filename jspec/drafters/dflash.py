"""DFlash: one pass over [anchor, mask, mask, ...] drafts a whole block.

The drafter's keys and values of the context are projected straight from confirmed target features,
so its state is a function of the committed tokens and nothing is ever recomputed or rolled back.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.coins import coupled_noise
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet, draft_logits, paged_blocks
from jspec.drafters.head_columns import head_columns
from jspec.drafters.protocol import Committed, Text
from jspec.features import layer_outputs
from jspec.heads import commit_rows
from jspec.net import Leaf, Params, net_of
from jspec.round import OneHot, Proposal
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.targets.layers import project_float32
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.pytree import pytree
from pallas_kernels.vocabulary_row.choices import argmax


def dflash_leaves(config: DFlashConfig, dtype: jnp.dtype) -> tuple[Leaf, ...]:
    """The arrays that a `DFlash` drafter's params hold, in their order; norms stay float32."""
    return net_of(DFlashNet, config, dtype).leaves


def dflash_net(config: DFlashConfig, params: Params) -> DFlashNet:
    """The module around a drafter's params.

    Raises:
      ValueError: if they are not as many as the config needs.
    """
    return net_of(DFlashNet, config, jnp.dtype(jnp.float32)).module(params)


@pytree
class DFlashState:
    """Pages that follow the target's page table, and the part of the target's head that is drafted with."""

    pages: Pages
    head: Float[Array, "hidden draft_vocabulary"] | None  # None = all of it, where the target has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash:
    """See `dflash`."""

    config: DFlashConfig
    draft_length: int
    name: str = "dflash"
    simulated: bool = False

    @property
    def draft_depth(self) -> int:
        """It drafts chains."""
        return self.draft_length

    @property
    def features(self) -> tuple[str, ...]:
        """The target states that it was trained on."""
        return layer_outputs(self.config.target_layer_ids)

    def init(self, params: Params, target: TargetView, max_slots: int) -> DFlashState:
        """Empty pages, one for each of the target's.

        Raises:
          ValueError: naming both sides, if the drafter was made for another target.
        """
        check_target(self.config, target)
        net = dflash_net(self.config, params)
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
            if net.draft_ids is None
            else head_columns(target.logits, decoder.hidden_size, net.draft_ids[...])
        )
        return DFlashState(pages=pages, head=head)

    def draft(
        self,
        params: Params,
        target: TargetView,
        state: DFlashState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """The best token of every masked place, or the coupled draw of a request with a seed."""
        drafting = self._drafting(target, lanes, text)
        net = dflash_net(self.config, params)
        _, logits = self.draft_rows(params, target, state, lanes, text)
        logits = logits.reshape(-1, logits.shape[2])
        ids = None if net.draft_ids is None else net.draft_ids[...]
        columns = choose(
            logits, sampling, lanes, text.lengths[rows_of(lanes)], ids, self.config.decoder.vocab_size
        )
        tokens = net.target_ids(columns)
        # A row that is no distribution (-1) ends the proposal instead of reaching the target.
        sound = jnp.cumprod((tokens >= 0).astype(jnp.int32), axis=1)
        return Proposal(
            tokens=jnp.maximum(tokens, 0),
            lengths=jnp.where(drafting, jnp.sum(sound, axis=1, dtype=jnp.int32), 0),
            q=OneHot(),
        )

    def draft_rows(
        self, params: Params, target: TargetView, state: DFlashState, lanes: Int[Array, "lanes"], text: Text
    ) -> tuple[Float[Array, "lanes drafts hidden"], Float[Array, "lanes drafts vocabulary"]]:
        """Hidden states and unary logits of the rows that draft token 0, 1, ... come from.

        With a reduced vocabulary the columns are its own; `DFlashNet.target_ids` says which ids they are.
        """
        first = 0 if self.config.anchor_predicts else 1
        hidden = self.block_hidden(params, target, state, lanes, text)[:, first : first + self.draft_depth]
        flat = hidden.reshape(-1, hidden.shape[2])
        scores = target.logits(flat) if state.head is None else project_float32(flat, state.head)
        logits = draft_logits(self.config, scores)
        return hidden, logits.reshape(*hidden.shape[:2], -1)

    def block_hidden(
        self, params: Params, target: TargetView, state: DFlashState, lanes: Int[Array, "lanes"], text: Text
    ) -> Float[Array, "lanes block hidden"]:
        """Hidden states of the whole block, after the final norm. Lanes that do not draft see no context."""
        net = dflash_net(self.config, params)
        rows, block_size = rows_of(lanes), self.config.block_size
        drafting = self._drafting(target, lanes, text)
        context_lengths = jnp.where(drafting, target.cache.lengths[rows], 0)
        anchors = jnp.where(drafting, text.tokens[rows, context_lengths], self.config.mask_token_id)
        within = jax.lax.broadcasted_iota(jnp.int32, (lanes.shape[0], block_size), 1)
        ids = jnp.where(within == 0, anchors[:, None], self.config.mask_token_id).reshape(-1)
        page_table = target.cache.groups[0].page_table[rows]
        positions = (context_lengths[:, None] + within).reshape(-1)
        see = paged_blocks(self.config, positions, state.pages, page_table, context_lengths)
        hidden = net.block(embedder(net, target)(ids), positions, see, state.pages.dtype)
        return hidden.reshape(lanes.shape[0], block_size, -1)

    def absorb(
        self,
        params: Params,
        target: TargetView,
        state: DFlashState,
        lanes: Int[Array, "lanes"],
        text: Text,
        committed: Committed,
    ) -> tuple[DFlashState, Int[Array, "lanes"]]:
        """Adds the rows of the committed tokens behind each slot's context."""
        net = dflash_net(self.config, params)
        k, v = net.context_rows(committed.features, committed.positions)
        page_table = target.cache.groups[0].page_table[rows_of(lanes)]
        pages = commit_rows(
            state.pages,
            k.astype(state.pages.dtype),
            v.astype(state.pages.dtype),
            committed.path,
            page_table,
            committed.context_lengths,
        )
        state = DFlashState(pages=pages, head=state.head)
        return state, jnp.where(self._drafting(target, lanes, text), self.draft_length, 0)

    def _drafting(self, target: TargetView, lanes: Int[Array, "lanes"], text: Text) -> Bool[Array, "lanes"]:
        """Lanes whose whole text but the anchor is committed, and whose block the drafter can place."""
        rows = rows_of(lanes)
        context_lengths = target.cache.lengths[rows]
        ready = text.lengths[rows] == context_lengths + 1
        fits = context_lengths + self.config.block_size <= self.config.decoder.max_context
        return (lanes >= 0) & ready & fits


def dflash(config: DFlashConfig, *, draft_length: int | None = None) -> DFlash:
    """A DFlash drafter.

    The block keeps the size that it was trained with whatever the draft length, so a shorter one
    drafts the same first tokens and only spares head rows and verification.

    Args:
      config: from `jspec.checkpoints.dflash.load_dflash`, or of an own drafter.
      draft_length: draft tokens per proposal, 1 .. block_size - 1; None = all.

    Raises:
      ValueError: draft_length out of range, or a config with a selector or heads.

    Source: DFlash (z-lab/dflash); SGLang 0.5.23, models/dflash.py.
    """
    if config.selector is not None or config.head is not None or config.confidence is not None:
        raise ValueError(
            f"config: expected a drafter without a candidate selector or heads, got ({config.identity}); "
            "use dflash2(), dspark() or domino()"
        )
    return DFlash(config=config, draft_length=checked_draft_length(config, draft_length))


def embedder(net: DFlashNet, target: TargetView) -> Callable[[Array], Array]:
    """What the network reads of token ids: the target's embeddings, or its own."""
    own = net.embedding
    return target.embed if own is None else lambda ids: jnp.take(own[...], ids, axis=0, mode="fill")


def checked_draft_length(config: DFlashConfig, draft_length: int | None) -> int:
    """The draft length asked for, or the longest.

    Raises:
      ValueError: the block has fewer rows that predict.
    """
    longest = config.longest_draft
    if draft_length is None:
        return longest
    if not 1 <= draft_length <= longest:
        without = "" if config.anchor_predicts else " without the anchor"
        raise ValueError(
            f"draft_length: expected 1 to {longest} (block_size {config.block_size}{without}), "
            f"got {draft_length}; choose one of these, or plain() to propose nothing"
        )
    return draft_length


def check_target(config: DFlashConfig, view: TargetView) -> None:
    """Refuses a target that the drafter was not made for.

    Raises:
      ValueError: the first difference, with both identities.
    """
    target = view.target
    wanted = [
        ("layers", config.num_target_layers, target.num_layers),
        ("hidden size of a captured state", config.target_hidden_size, target.hidden_size),
        ("hidden size", config.decoder.hidden_size, target.hidden_size),
        ("vocabulary", config.decoder.vocab_size, target.vocab_size),
    ]
    problems = [f"{what} {own}, not {its}" for what, own, its in wanted if own is not None and own != its]
    missing = [i for i in config.target_layer_ids if i >= target.num_layers]
    if missing:
        problems.append(f"states {missing} of a target that has layers 0 to {target.num_layers - 1}")
    if problems:
        raise ValueError(
            f"drafter: expected a target with {problems[0]}; the drafter is ({config.identity}), the target "
            f"({target.identity}); load the target that it was trained for, or another drafter"
        )


def choose(
    logits: Float[Array, "rows vocabulary"],
    sampling: SamplingTable,
    lanes: Int[Array, "lanes"],
    text_lengths: Int[Array, "lanes"],
    ids: Int[Array, "vocabulary"] | None,
    vocab_size: int,
) -> Int[Array, "lanes drafts"]:
    """The best column of every row; for sampled requests with a seed, the one that the seed would draw.

    The coupled verifier adds the same noise to the target's scores, so it agrees more often.

    Args:
      logits: of draft token 0, 1, ... of the first lane, then of the next one.
      sampling: settings of the slots.
      lanes: slot of each lane, -1 for padding.
      text_lengths: tokens known per lane: draft token 0 would be at this position.
      ids: target ids of the columns; None = the columns are ids.
      vocab_size: of the target.
    """
    coupled = coupled_lanes(sampling, lanes)

    def drawn() -> Array:
        scores = coupled_scores(logits, sampling, lanes, coupled, text_lengths, ids, vocab_size)
        return argmax(scores).reshape(lanes.shape[0], -1)

    return jax.lax.cond(jnp.any(coupled), drawn, lambda: argmax(logits).reshape(lanes.shape[0], -1))


def coupled_lanes(sampling: SamplingTable, lanes: Int[Array, "lanes"]) -> Bool[Array, "lanes"]:
    """Lanes of sampled requests with a seed."""
    slots = rows_of(lanes)
    return (lanes >= 0) & sampling.seeded[slots] & (sampling.temperature[slots] > 0)


def coupled_scores(
    logits: Float[Array, "rows vocabulary"],
    sampling: SamplingTable,
    lanes: Int[Array, "lanes"],
    coupled: Bool[Array, "lanes"],
    text_lengths: Int[Array, "lanes"],
    ids: Int[Array, "vocabulary"] | None,
    vocab_size: int,
) -> Float[Array, "rows vocabulary"]:
    """Logits over temperature with the seed's noise on coupled lanes, as they are on others; see `choose`."""
    drafts = logits.shape[0] // lanes.shape[0]
    slots = rows_of(lanes)
    within = jax.lax.broadcasted_iota(jnp.int32, (lanes.shape[0], drafts), 1)
    positions = (text_lengths[:, None] + within).reshape(-1)
    noise = coupled_noise(jnp.repeat(sampling.seeds[slots], drafts), positions, vocab_size)
    noise = noise if ids is None else noise[:, ids]
    temperature = jnp.repeat(jnp.where(coupled, sampling.temperature[slots], 1), drafts)
    # From the best down, as the target's: a small temperature then overflows to -inf, not inf.
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    return jnp.where(jnp.repeat(coupled, drafts)[:, None], shifted / temperature[:, None] + noise, logits)
