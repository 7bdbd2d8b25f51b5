"""A round is three programs: propose, execute, settle.

propose  the drafter's tokens, how many of them are verified, the packed nodes   donates nothing
execute  the target's forward pass and head over the nodes                       donates nothing
settle   the target's distribution, verify, cut, commit, absorb                  donates cache and state

The one-position offset that everything here rests on: a round executes [anchor, accepted drafts]
and emits [accepted drafts, bonus]; the bonus has no keys, values or feature until the next round,
where it is the anchor. A prompt chunk is the same thing with more certain tokens in front.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.buckets import Bucket
from jspec.cache import Cache, Pending, commit
from jspec.coins import Coins, draw_coins
from jspec.cut import Finish, cut
from jspec.drafters.protocol import Committed, Drafter, Text
from jspec.drafters.simulated import Simulated
from jspec.grammar.masks import Masks
from jspec.packing import commit_path, limit, no_proposal, pack, row_nodes, row_offsets
from jspec.placement import place_state, whole
from jspec.prompt_log_probs import prompt_log_probs
from jspec.round import Nodes, Proposal, Verdict
from jspec.sampling import count_emitted
from jspec.schedule.allotment import allot
from jspec.schedule.survival import Curve, survival_of, usable
from jspec.sharding import first_decides
from jspec.slots import Slots, rows_of, slots_of
from jspec.target_rows import LogProbs, target_rows, token_log_probs
from jspec.targets.target import Target
from jspec.targets.view import TargetView
from jspec.verify.batch import verify
from pallas_kernels.pytree import pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The static choices of an engine: which model, which drafter, which rules."""

    target: Target
    drafter: Drafter
    block_verification: bool = False  # for sampled requests without a seed
    scheduled: bool = False  # the drafter's confidence decides which draft tokens are verified
    confidence_curve: Curve | None = None  # its calibration
    max_log_probs: int = 0  # most alternatives that a request may ask for; 0 leaves log-probabilities out


@pytree
class Models:
    """The parameters that the programs read."""

    target: Any
    drafter: Any


@pytree
class State:
    """Everything that a round changes. Fixed rows per slot; donated by settle."""

    cache: Cache
    drafter: Any
    slots: Slots


@pytree
class Round:
    """What propose hands to the other two programs."""

    proposal: Proposal
    # Of all tokens that were drafted, those behind the proposal's included; all ones without confidence.
    survival: Float[Array, "lanes drafted"]
    verify_lengths: Int[Array, "lanes"]
    nodes: Nodes


@pytree
class Executed:
    """What the target made of the nodes. The cache is untouched."""

    logits: Float[Array, "rows vocabulary"]  # per lane: its last certain node, then its draft tokens
    features: Float[Array, "nodes features"]
    pending: tuple[Pending, ...]
    # Of a chunk: log-probabilities of its tokens are read off it. None = the round has none.
    hidden: Float[Array, "nodes hidden"] | None


@pytree
class Report:
    """A round's outcome for the host. Never donated, so it may be read late."""

    tokens: Int[Array, "lanes block"]
    emitted: Int[Array, "lanes"]  # how many of `tokens`
    finish: Int[Array, "lanes"]  # a Finish code
    proposed: Int[Array, "lanes"]
    verified: Int[Array, "lanes"]
    accepted: Int[Array, "lanes"]  # draft tokens among the emitted ones
    committed: Int[Array, "lanes"]
    unusable: Int[Array, "lanes"]  # confidences that are no probability, and so were read as 1
    ready: Int[Array, "lanes"]  # draft tokens that the next propose will have at most
    log_probs: LogProbs | None
    prompt_log_probs: LogProbs | None  # of the tokens behind a chunk's nodes


def propose(
    method: Method,
    bucket: Bucket,
    models: Models,
    state: State,
    lanes: Int[Array, "lanes"],
    certain_lengths: Int[Array, "lanes"],
    budget: Int[Array, ""],
) -> Round:
    """Drafts, decides how much of it is verified, and packs the nodes.

    In a scheduled method the budget must have been chosen without a look at anything that this round draws,
    see `jspec.schedule.relay`.

    Args:
      method: static.
      bucket: static.
      models: parameters of target and drafter.
      state: read, not donated.
      lanes: slot of each lane, -1 for padding.
      certain_lengths: known tokens that each lane executes: a prompt chunk, or 1 for the anchor.
      budget: draft tokens that may be verified over all lanes; with the anchors at most bucket.nodes.
    """
    slots, cache = state.slots, state.cache
    drafts = min(bucket.budget, method.drafter.draft_length)
    if drafts:
        view = TargetView(params=models.target, cache=cache, target=method.target)
        drafted = method.drafter.draft(models.drafter, view, state.drafter, lanes, slots.text, slots.table)
        proposal = limit(drafted, slots, lanes, drafts)
    else:
        drafted = proposal = no_proposal(bucket.lanes)
    survival = survival_of(drafted, method.confidence_curve)
    worth = survival if method.scheduled else jnp.ones_like(survival)
    worth = jnp.where(survival >= slots.min_confidences[rows_of(lanes)][:, None], worth, 0)
    verify_lengths = allot(worth[:, :drafts], proposal.lengths, lanes, budget)
    if drafts:
        tokens, lengths, parents, survival, verify_lengths = first_decides(
            (proposal.tokens, proposal.lengths, proposal.parents, survival, verify_lengths)
        )
        proposal = dataclasses.replace(proposal, tokens=tokens, lengths=lengths, parents=parents)
    nodes = pack(bucket, slots.text, cache.lengths, lanes, certain_lengths, proposal, verify_lengths)
    return Round(proposal=proposal, survival=survival, verify_lengths=verify_lengths, nodes=nodes)


def execute(
    method: Method, bucket: Bucket, models: Models, nodes: Nodes, cache: Cache, lanes: Int[Array, "lanes"]
) -> Executed:
    """The target's forward pass over the nodes, and its head over those whose logits are needed."""
    out = method.target.forward(
        models.target,
        nodes,
        cache,
        lanes,
        method.drafter.features,
        max_queries=bucket.width(method.drafter.draft_length),
    )
    hidden = out.hidden[row_nodes(bucket, nodes)] if bucket.chunk else out.hidden
    return Executed(
        logits=method.target.logits(models.target, hidden),
        features=out.features,
        pending=out.pending,
        hidden=out.hidden if bucket.chunk and method.max_log_probs else None,
    )


def settle(
    method: Method,
    bucket: Bucket,
    models: Models,
    round_: Round,
    executed: Executed,
    state: State,
    lanes: Int[Array, "lanes"],
    masks: Masks | None,
) -> tuple[State, Report]:
    """Decides which tokens the round emits, and moves every state by exactly those.

    Args:
      method: static.
      bucket: static.
      models: parameters of target and drafter.
      round_: from propose.
      executed: from execute.
      state: donated by the caller.
      lanes: slot of each lane, -1 for padding.
      masks: what grammars allow, and where they end; None = no request of this engine has one.
    """
    slots, cache, nodes = state.slots, state.cache, round_.nodes
    rows = rows_of(lanes)
    text_lengths, context_lengths = slots.text.lengths[rows], cache.lengths[rows]
    live = (lanes >= 0) & slots.live[rows]
    emits = live & (context_lengths + nodes.certain_lengths == text_lengths)

    mask_bits = None if masks is None else jnp.asarray(masks.allowed)
    verdict = first_decides(judge(method, round_, executed, state, lanes, mask_bits))
    ending = None if masks is None else ending_tokens(masks, nodes, verdict)
    broken = emits & (verdict.bonus < 0)
    if ending is not None:
        broken = broken & ~jnp.any(ending, axis=1)
    block = emitted_block(round_.proposal, verdict)
    block_lengths = jnp.where(emits & ~broken, verdict.accept_length + 1, 0)
    emitted, finish = cut(
        block,
        block_lengths,
        slots.table.stop_ids[rows],
        slots.limits[rows] - text_lengths,
        ending,
    )
    finish = jnp.where(broken, Finish.BROKEN, finish)

    commits = nodes.certain_lengths + jnp.where(emits, emitted - 1, 0)
    commits = jnp.where(live & ~broken, commits, 0)
    path = commit_path(nodes, verdict.path, commits, bucket.chunk + verdict.path.shape[1])
    cache = commit(cache, executed.pending, path, lanes)
    text = append(slots.text, lanes, block, emitted)
    committed = Committed(
        features=executed.features,
        positions=nodes.positions,
        path=path,
        context_lengths=context_lengths,
        is_first=text_lengths == slots.known_lengths[rows],
    )
    view = TargetView(params=models.target, cache=cache, target=method.target)
    drafter, ready = method.drafter.absorb(models.drafter, view, state.drafter, lanes, text, committed)
    running = live & (finish == Finish.RUNNING)
    slots = dataclasses.replace(
        slots,
        text=text,
        live=slots.live.at[slots_of(lanes, slots.live.shape[0])].set(running, mode="drop"),
        history=count_emitted(slots.history, lanes, block, emitted),
    )
    report = Report(
        tokens=block,
        emitted=emitted,
        finish=finish,
        proposed=round_.proposal.lengths,
        verified=round_.verify_lengths,
        accepted=jnp.where(emits, jnp.minimum(verdict.accept_length, emitted), 0),
        committed=commits,
        unusable=unusable_confidences(method, round_.proposal),
        ready=jnp.where(running, jnp.minimum(ready, slots.draft_caps[rows]), 0),
        log_probs=log_probs_of(
            method, executed, nodes, verdict, block, live & (slots.table.log_probs[rows] >= 0)
        ),
        prompt_log_probs=None
        if executed.hidden is None
        else prompt_log_probs(
            method.target,
            models.target,
            executed.hidden,
            nodes,
            text,
            lanes,
            jnp.any(live & slots.table.prompt_log_probs[rows]),
            top=method.max_log_probs,
        ),
    )
    return place_state(State(cache=cache, drafter=drafter, slots=slots)), whole(report)


def judge(
    method: Method,
    round_: Round,
    executed: Executed,
    state: State,
    lanes: Int[Array, "lanes"],
    mask_bits: Int[Array, "rows words"] | None,
) -> Verdict:
    """Makes the target's distribution of every row, and verifies the proposal against it."""
    slots, proposal = state.slots, round_.proposal
    rows = rows_of(lanes)
    emitted_before = slots.text.lengths[rows] - slots.prompt_lengths[rows]
    target_side = target_rows(
        executed.logits,
        slots.table,
        slots.history,
        lanes,
        row_offsets(round_.nodes)[:-1],
        proposal,
        emitted_before,
        mask_bits,
    )
    if isinstance(method.drafter, Simulated):
        return method.drafter.verdict(state.drafter, lanes, proposal, target_side, round_.verify_lengths)
    num_drafts = proposal.tokens.shape[1]
    coins = jax.lax.cond(
        jnp.any((lanes >= 0) & (slots.table.temperature[rows] > 0)),
        lambda: draw_coins(slots.table.seeds[rows], state.cache.lengths[rows], num_drafts),
        lambda: Coins(
            accept=jnp.zeros(proposal.tokens.shape, jnp.float32), bonus=jnp.zeros(lanes.shape, jnp.float32)
        ),
    )
    return verify(
        proposal,
        target_side,
        round_.verify_lengths,
        coins,
        slots.table,
        lanes,
        slots.text.lengths[rows],
        block_verification=method.block_verification,
    )


def unusable_confidences(method: Method, proposal: Proposal) -> Int[Array, "lanes"]:
    """How many of each lane's confidences are no probability; 0 where nobody asks for them."""
    if not method.scheduled or proposal.confidence is None:
        return jnp.zeros(proposal.lengths.shape, jnp.int32)
    index = jax.lax.broadcasted_iota(jnp.int32, proposal.tokens.shape, 1)
    proposed = index < proposal.lengths[:, None]
    return jnp.sum(proposed & ~usable(proposal.confidence), axis=1, dtype=jnp.int32)


def emitted_block(proposal: Proposal, verdict: Verdict) -> Int[Array, "lanes block"]:
    """The accepted draft tokens followed by the bonus; -1 behind it."""
    index = jax.lax.broadcasted_iota(jnp.int32, verdict.path.shape, 1)
    accept_length = verdict.accept_length[:, None]
    block = jnp.where(index == accept_length, verdict.bonus[:, None], -1)
    drafts = proposal.tokens.shape[1]
    if drafts == 0:
        return block
    following = jnp.concatenate([verdict.path[:, 1:], jnp.full_like(verdict.path[:, :1], -1)], axis=1)
    accepted = jnp.take_along_axis(proposal.tokens, jnp.clip(following - 1, 0, drafts - 1), axis=1)
    return jnp.where(index < accept_length, accepted, block)


def ending_tokens(masks: Masks, nodes: Nodes, verdict: Verdict) -> Bool[Array, "lanes block"]:
    """Whether each emitted token ends its request's grammar. Of the bonus, which is no node, the host knows."""
    following = jnp.concatenate([verdict.path[:, 1:], jnp.full_like(verdict.path[:, :1], -1)], axis=1)
    rows = row_offsets(nodes)[:-1, None] + jnp.maximum(following, 0)
    ends = jnp.asarray(masks.ends)
    return ends[jnp.minimum(rows, ends.shape[0] - 1)] & (following >= 0)


def append(
    text: Text, lanes: Int[Array, "lanes"], block: Int[Array, "lanes block"], emitted: Int[Array, "lanes"]
) -> Text:
    """The slots' texts with the emitted tokens behind them."""
    max_slots, capacity = text.tokens.shape
    slots = slots_of(lanes, max_slots)
    start = text.lengths[rows_of(lanes)]
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
    columns = jnp.where(index < emitted[:, None], start[:, None] + index, capacity)
    return Text(
        tokens=text.tokens.at[slots[:, None], columns].set(block, mode="drop"),
        lengths=text.lengths.at[slots].add(emitted, mode="drop"),
    )


def log_probs_of(
    method: Method,
    executed: Executed,
    nodes: Nodes,
    verdict: Verdict,
    block: Int[Array, "lanes block"],
    wanted: Bool[Array, "lanes"],
) -> LogProbs | None:
    """Log-probabilities of the emitted tokens, each from the row that judged it."""
    if not method.max_log_probs:
        return None
    rows = row_offsets(nodes)[:-1, None] + jnp.maximum(verdict.path, 0)
    return token_log_probs(executed.logits, rows, block, jnp.any(wanted), top=method.max_log_probs)
