"""The one place where the target's logits become the distribution that is sampled.

Verifiers accept only `TargetRows`, so no path can skip a setting: penalties along the node's own path,
bias and allowed tokens, grammar mask, minimum length, temperature, top-k, top-p, min-p, in this order.
There is never an array of probabilities of all rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.ancestry import ancestors
from jspec.round import Proposal
from jspec.sampling import History, SamplingTable
from jspec.slots import rows_of
from jspec.tempering import temper
from jspec.vocabulary import largest
from pallas_kernels.pytree import pytree
from pallas_kernels.vocabulary_row.choices import argmax


@pytree
class LogProbs:
    """Log-probabilities of emitted tokens under the model itself: log-softmax of its raw logits.

    No setting acts here, so the values do not depend on how the request samples, and an emitted
    token may well not be among the best.
    """

    chosen: Float[Array, "lanes block"]
    top_ids: Int[Array, "lanes block top"]  # best first, the lowest id first on ties
    top: Float[Array, "lanes block top"]


@pytree
class TargetRows:
    """The target's distribution after every node whose logits were computed.

    A sampled row's token has probability exp(logit - log_normaliser) if its logit is at least the
    floor, else 0. A greedy row has no distribution, only an `argmax`; its log_normaliser is 0 and its
    floor -inf. Rows that belong to no lane hold anything, and so do rows that come from NaN logits;
    neither changes another row.
    """

    logits: Float[Array, "rows vocabulary"]  # all settings applied; divided by temperature on sampled rows
    log_normaliser: Float[Array, "rows"]  # log of the summed exponentials of the kept logits
    floor: Float[Array, "rows"]  # a token is kept iff its logit is at least this
    starts: Int[Array, "lanes"]  # row of each lane's node 0; node j's row is starts + j

    def log_prob(
        self, nodes: Int[Array, "lanes items"], ids: Int[Array, "lanes items"]
    ) -> Float[Array, "lanes items"]:
        """Log-probability of each id after each node; -inf if not kept or outside the vocabulary."""
        rows = self._rows(nodes)
        vocabulary = self.logits.shape[1]
        logits = self.logits[rows, jnp.clip(ids, 0, vocabulary - 1)]
        kept = (logits >= self.floor[rows]) & (ids >= 0) & (ids < vocabulary)
        return jnp.where(kept, logits - self.log_normaliser[rows], -jnp.inf)

    def row(self, nodes: Int[Array, "lanes"]) -> Float[Array, "lanes vocabulary"]:
        """Log-probabilities of the whole vocabulary after one node per lane; -inf where not kept."""
        rows = self._rows(nodes[:, None])[:, 0]
        return self.kept(nodes) - self.log_normaliser[rows][:, None]

    def kept(self, nodes: Int[Array, "lanes"]) -> Float[Array, "lanes vocabulary"]:
        """Logits of the whole vocabulary after one node per lane; -inf where not kept."""
        rows = self._rows(nodes[:, None])[:, 0]
        logits = self.logits[rows]
        return jnp.where(logits < self.floor[rows][:, None], -jnp.inf, logits)

    def argmax(self, nodes: Int[Array, "lanes items"]) -> Int[Array, "lanes items"]:
        """The target's best id after each node, the lowest on ties; -1 where the row has none."""
        return argmax(self.logits)[self._rows(nodes)]

    def _rows(self, nodes: Int[Array, "lanes items"]) -> Int[Array, "lanes items"]:
        return jnp.clip(self.starts[:, None] + nodes, 0, self.logits.shape[0] - 1)


def target_rows(
    logits: Float[Array, "rows vocabulary"],
    table: SamplingTable,
    history: History,
    lanes: Int[Array, "lanes"],
    starts: Int[Array, "lanes"],
    proposal: Proposal,
    emitted_lengths: Int[Array, "lanes"],
    mask_bits: Int[Array, "rows words"] | None = None,
) -> TargetRows:
    """Applies each lane's settings to the rows of its nodes.

    What no lane of the batch asks for is skipped: a greedy batch costs nothing here.

    Args:
      logits: the target's, float32. A lane's rows follow each other in node order.
      table: settings per slot.
      history: tokens per slot, the anchor counted and the draft tokens not.
      lanes: slot of each lane, -1 for padding.
      starts: row of each lane's node 0, non-decreasing; a lane without rows has the start of the next one.
      proposal: whose draft tokens are the nodes 1, 2, ... of the lane. Its tokens count as output for the
        penalties of the nodes below them; nothing else of it is read.
      emitted_lengths: tokens that the lane's request has emitted so far.
      mask_bits: bit id % 32 of word id // 32 is set where the id is allowed after that row's node; None =
        all are.
    """
    num_rows = logits.shape[0]
    slots = rows_of(lanes)
    live = lanes >= 0

    def asked(setting: Bool[Array, "slots"]) -> Bool[Array, ""]:
        return jnp.any(live & setting[slots])

    sampled = asked(table.temperature > 0)
    penalised = asked((table.repetition != 1) | (table.presence != 0) | (table.frequency != 0))
    biased = asked(table.biased)
    delayed = jnp.any(live & (emitted_lengths < table.min_lengths[slots]))
    masked = jnp.asarray(False) if mask_bits is None else jnp.any(mask_bits != -1)

    row_lanes = lanes_of(starts, num_rows)
    row_nodes = jnp.clip(
        jnp.arange(num_rows, dtype=jnp.int32) - starts[row_lanes], 0, proposal.tokens.shape[1]
    )
    row_slots = slots[row_lanes]

    def plain() -> TargetRows:
        zeros = jnp.zeros((num_rows,), jnp.float32)
        return TargetRows(logits=logits, log_normaliser=zeros, floor=zeros - jnp.inf, starts=starts)

    def processed() -> TargetRows:
        if proposal.parents is None:
            index = jax.lax.broadcasted_iota(jnp.int32, (num_rows, proposal.tokens.shape[1]), 1)
            on_path = index < row_nodes[:, None]
        else:
            on_path = ancestors(proposal.parents)[row_lanes, row_nodes]
        adjusted = jax.lax.cond(
            penalised,
            lambda: penalise(logits, table, history, row_slots, proposal.tokens[row_lanes], on_path),
            lambda: logits,
        )
        adjusted = jax.lax.cond(biased, lambda: adjusted + table.bias[row_slots], lambda: adjusted)
        if mask_bits is not None:
            bits = mask_bits
            adjusted = jax.lax.cond(
                masked,
                lambda: jnp.where(unpack_bits(bits, logits.shape[1]), adjusted, -jnp.inf),
                lambda: adjusted,
            )
        next_length = emitted_lengths[row_lanes] + jnp.sum(on_path, axis=1, dtype=jnp.int32)
        adjusted = jax.lax.cond(
            delayed, lambda: suppress_stops(adjusted, table, row_slots, next_length), lambda: adjusted
        )
        scaled, log_normaliser, floor = jax.lax.cond(
            sampled,
            lambda: tempered(adjusted, table, row_slots),
            lambda: (
                adjusted,
                jnp.zeros((num_rows,), jnp.float32),
                jnp.full((num_rows,), -jnp.inf, jnp.float32),
            ),
        )
        return TargetRows(logits=scaled, log_normaliser=log_normaliser, floor=floor, starts=starts)

    return jax.lax.cond(sampled | penalised | biased | delayed | masked, processed, plain)


def lanes_of(starts: Int[Array, "lanes"], num_rows: int) -> Int[Array, "rows"]:
    """The lane that each row belongs to: the last one that starts at or before it."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.maximum(jnp.sum(rows[:, None] >= starts[None, :], axis=1, dtype=jnp.int32) - 1, 0)


def penalise(
    logits: Float[Array, "rows vocabulary"],
    table: SamplingTable,
    history: History,
    slots: Int[Array, "rows"],
    draft_ids: Int[Array, "rows drafts"],
    on_path: Bool[Array, "rows drafts"],
) -> Float[Array, "rows vocabulary"]:
    """Repetition, then frequency and presence penalties, over the history and the node's own path.

    Repetition divides a positive logit and multiplies a negative one (Keskar et al., arXiv 1909.05858, 4.1,
    as transformers applies it); it sees prompt and output, the other two only output.
    """
    vocabulary = logits.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, draft_ids.shape, 0)
    ids = jnp.where(on_path & (draft_ids >= 0), draft_ids, vocabulary)
    counts = history.output_counts[slots].at[row, ids].add(1, mode="drop")
    seen = history.prompt_seen[slots] | (counts > 0)
    repetition, frequency, presence = (
        setting[slots][:, None] for setting in (table.repetition, table.frequency, table.presence)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = jnp.where(seen, repeated, logits)
    return penalised - frequency * counts - jnp.where(counts > 0, presence, 0)


def unpack_bits(words: Int[Array, "rows words"], vocab_size: int) -> Bool[Array, "rows vocabulary"]:
    """One bool per id: bit id % 32 of word id // 32."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def suppress_stops(
    logits: Float[Array, "rows vocabulary"],
    table: SamplingTable,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
) -> Float[Array, "rows vocabulary"]:
    """Forbids stop ids on rows whose token would come before the minimum length.

    Args:
      logits: of every row.
      table: settings per slot.
      slots: slot of each row.
      lengths: tokens emitted before the one that the row decides.
    """
    vocabulary = logits.shape[1]
    stops = table.stop_ids[slots]
    early = (lengths < table.min_lengths[slots])[:, None]
    row = jax.lax.broadcasted_iota(jnp.int32, stops.shape, 0)
    ids = jnp.where(early & (stops >= 0), stops, vocabulary)
    return logits.at[row, ids].set(-jnp.inf, mode="drop")


def tempered(
    logits: Float[Array, "rows vocabulary"], table: SamplingTable, slots: Int[Array, "rows"]
) -> tuple[Float[Array, "rows vocabulary"], Float[Array, "rows"], Float[Array, "rows"]]:
    """Temperature, then top-k, top-p and min-p, on sampled rows; greedy rows pass unchanged.

    Returns:
      logits, log_normaliser, floor: see `pallas_kernels.vocabulary_row.tempered.Tempered`.
    """
    made = temper(
        logits, table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots]
    )
    return made.logits, made.log_normaliser, made.floor


def token_log_probs(
    logits: Float[Array, "rows vocabulary"],
    rows: Int[Array, "lanes block"],
    ids: Int[Array, "lanes block"],
    wanted: Bool[Array, ""],
    *,
    top: int,
) -> LogProbs:
    """Log-probabilities of emitted tokens, from the rows that decided them.

    Args:
      logits: the target's, before any setting.
      rows: row of each emitted token; where nothing was emitted, anything.
      ids: the emitted tokens; likewise.
      wanted: False skips the work, and every entry is 0.
      top: static; best tokens to return besides, 0 for none.
    """
    num_rows, vocabulary = logits.shape
    shape = (*rows.shape, top)

    def skipped() -> LogProbs:
        return LogProbs(
            chosen=jnp.zeros(rows.shape, jnp.float32),
            top_ids=jnp.zeros(shape, jnp.int32),
            top=jnp.zeros(shape, jnp.float32),
        )

    def computed() -> LogProbs:
        row = jnp.clip(rows, 0, num_rows - 1)
        log_normaliser = jax.nn.logsumexp(logits, axis=1)[row]
        values, top_ids = largest(logits, top)
        chosen = logits[row, jnp.clip(ids, 0, vocabulary - 1)] - log_normaliser
        return LogProbs(chosen=chosen, top_ids=top_ids[row], top=values[row] - log_normaliser[:, :, None])

    return jax.lax.cond(wanted, computed, skipped)
