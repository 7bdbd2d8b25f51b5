"""Scheduled decoding has the target's law, and the test of it finds the faults that would break it.

Many small engines side by side (vmap): each has two sampled requests, a greedy and a seeded one, and budgets
of its own, chosen from what it knew two rounds before. The joint law of three tokens is compared by
chi-square with what the tables say.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.drafters import Drawn

import jspec.decode
from jspec.buckets import Bucket
from jspec.coins import Coins, Purpose, coupled_noise, uniforms
from jspec.decode import Method, Models, execute, propose, settle
from jspec.engine import Engine
from jspec.schedule.survival import survival_of
from jspec.settings import Settings
from jspec.targets.table import TableTarget
from jspec.targets.view import TargetView

VOCABULARY, M, GROUPS, START = 4, 4, 51_200, 1
LANES = ("sampled", "sampled", "greedy", "seeded")
TEMPERATURE = 1.0
BUCKET = Bucket(lanes=len(LANES), nodes=len(LANES) * (M + 1), chunk=0)
RNG = np.random.default_rng(3)
TABLE = RNG.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
DRAFT_TABLE = (TABLE + 0.8 * RNG.normal(size=TABLE.shape)).astype(np.float32)
# Far from the truth, and very different from token to token: losslessness must not need calibration.
CONFIDENCE = np.array([0.97, 0.05, 0.9, 0.1], np.float32)
TOKENS = 6
SEEDS = np.random.default_rng(5).integers(2**32, size=(GROUPS, len(LANES)), dtype=np.uint32)


def engine_of(drafter: Drawn) -> Engine:
    return Engine(
        method=Method(target=TableTarget(vocab_size=VOCABULARY, max_context=16), drafter=drafter),
        models=Models(
            target=(jnp.asarray(TABLE),), drafter=(jnp.asarray(DRAFT_TABLE), jnp.asarray(CONFIDENCE))
        ),
        max_slots=len(LANES),
        page_size=16,
        chunks=(1,),
    )


class Groups:
    """The state of all groups, and rounds over all of them."""

    def __init__(self, drafter: Drawn):
        engine = engine_of(drafter)
        settings = {
            "sampled": Settings(max_tokens=12, temperature=TEMPERATURE),
            "greedy": Settings(max_tokens=12),
            "seeded": Settings(max_tokens=12, temperature=TEMPERATURE, seed=11),
        }
        requests = engine._intake.requests([[START]] * len(LANES), [settings[kind] for kind in LANES])
        assert all(engine._runner.admit(request) for request in requests)
        self.method = dataclasses.replace(engine.method, scheduled=True)
        self.models = engine.models
        one = engine._runner.state

        def seeded(seeds):
            table = dataclasses.replace(one.slots.table, seeds=seeds)
            return dataclasses.replace(one, slots=dataclasses.replace(one.slots, table=table))

        self._start = jax.vmap(seeded)
        self.lanes = jnp.arange(len(LANES), dtype=jnp.int32)
        self._round = jax.jit(jax.vmap(self._one_round))
        self._survival = jax.jit(jax.vmap(self._one_survival))
        self.reset()

    def reset(self) -> None:
        self.state = self._start(jnp.asarray(SEEDS))

    def _one_round(self, state, budget, drafting):
        ones = jnp.ones((len(LANES),), jnp.int32)
        # A plain round drafts nothing.
        capped = dataclasses.replace(state.slots, draft_caps=jnp.where(drafting, M * ones, 0))
        state = dataclasses.replace(state, slots=capped)
        round_ = propose(self.method, BUCKET, self.models, state, self.lanes, ones, budget)
        executed = execute(self.method, BUCKET, self.models, round_.nodes, state.cache, self.lanes)
        state, report = settle(self.method, BUCKET, self.models, round_, executed, state, self.lanes, None)
        return state, round_.survival, report.verified

    def _one_survival(self, state):
        view = TargetView(params=self.models.target, cache=state.cache, target=self.method.target)
        slots = state.slots
        drafted = self.method.drafter.draft(
            self.models.drafter, view, (), self.lanes, slots.text, slots.table
        )
        return survival_of(drafted)

    def step(self, budgets: np.ndarray, drafting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.state, survival, verified = self._round(self.state, jnp.asarray(budgets), jnp.asarray(drafting))
        return np.asarray(survival), np.asarray(verified)

    def survival_now(self) -> np.ndarray:
        return np.asarray(self._survival(self.state))

    def texts(self) -> np.ndarray:
        return np.asarray(self.state.slots.text.tokens)[:, :, 1 : 1 + TOKENS]


def best(survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Budgets of all groups, as `best_budget` chooses them, at costs that make the choice swing."""
    flat = -np.sort(-survival.reshape(GROUPS, -1), axis=1)
    tokens = len(LANES) + np.concatenate([np.zeros((GROUPS, 1)), np.cumsum(flat, axis=1)], axis=1)
    speeds = tokens / (1.25 + 0.1 * np.arange(tokens.shape[1]))
    return np.argmax(speeds, axis=1).astype(np.int32), speeds.max(axis=1) > len(LANES) / 1.0


def adversary(survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drafts where the first request's last confidence was high, and verifies where the second's was.

    That confidence hangs on a draft token which, two rounds later, may be the next to be decided.
    """
    last = survival[:, :, M - 1] / survival[:, :, M - 2]
    return (last[:, 1] > 0.5).astype(np.int32), last[:, 0] > 0.5


def decode(groups: Groups, policy, *, lag: int = 2) -> list[int]:
    """Runs all groups until each request has its tokens; returns the budgets that were used, -1 = plain."""
    history: list[np.ndarray] = []
    seen: set[int] = set()
    for round_ in range(TOKENS):
        if lag == 0:
            budgets, drafting = policy(groups.survival_now())
        elif round_ >= lag:
            budgets, drafting = policy(history[round_ - lag])
        else:
            budgets, drafting = np.zeros((GROUPS,), np.int32), np.ones((GROUPS,), bool)
        survival, verified = groups.step(budgets, drafting)
        history.append(survival)
        assert (verified.sum(axis=1) <= np.where(drafting, budgets, 0)).all()
        seen.update(np.where(drafting, budgets, -1).tolist())
    return sorted(seen)


def probabilities() -> np.ndarray:
    logits = TABLE.astype(np.float64) / TEMPERATURE
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True)


def z_scores(texts: np.ndarray) -> list[float]:
    """Chi-square of tokens 1 to 3 and 4 to 6 as z-scores; texts of one kind of request [n, tokens]."""
    probs = probabilities()
    before = np.eye(VOCABULARY)[START]
    scores = []
    for first in range(0, TOKENS, 3):
        law = np.einsum("a,ab,bc,cd->bcd", before, probs, probs, probs).reshape(-1)
        index = np.ravel_multi_index(tuple(texts[:, first : first + 3].T), (VOCABULARY,) * 3)
        counts, expected = np.bincount(index, minlength=law.size), law * len(texts)
        statistic = np.sum((counts - expected) ** 2 / expected)
        scores.append(float((statistic - (law.size - 1)) / np.sqrt(2 * (law.size - 1))))
        before = before @ np.linalg.matrix_power(probs, 3)
    return scores


DRAFTER = Drawn(draft_length=M, sparse=False)


POLICIES = {"best": best, "adversary": adversary}


@functools.cache
def right_groups() -> Groups:
    return Groups(DRAFTER)


@functools.cache
def scheduled_texts(policy: str) -> tuple[np.ndarray, list[int]]:
    groups = right_groups()
    groups.reset()
    seen = decode(groups, POLICIES[policy])
    return groups.texts(), seen


def sampled(texts: np.ndarray) -> np.ndarray:
    lanes = [i for i, kind in enumerate(LANES) if kind == "sampled"]
    return texts[:, lanes].reshape(-1, TOKENS)


@pytest.mark.parametrize("policy", POLICIES)
def test_scheduled_sampling_has_the_targets_law(policy):
    texts, seen = scheduled_texts(policy)
    assert len(sampled(texts)) >= 100_000
    assert len(seen) >= 3 and -1 in seen, "the schedule has to choose, plain rounds included"
    scores = z_scores(sampled(texts))
    assert max(map(abs, scores)) < 4, scores


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_neighbours_of_sampled_requests_keep_their_line(policy):
    texts, _ = scheduled_texts(policy)
    line = [START]
    for _ in range(TOKENS):
        line.append(int(TABLE[line[-1]].argmax()))
    assert (texts[:, LANES.index("greedy")] == line[1:]).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_seeded_requests_depend_on_their_seed_alone(policy):
    texts, _ = scheduled_texts(policy)
    lane = LANES.index("seeded")
    tokens = np.full((GROUPS,), START)
    for position in range(1, 1 + TOKENS):
        at = jnp.full((GROUPS,), position, jnp.int32)
        noise = np.asarray(coupled_noise(jnp.asarray(SEEDS[:, lane]), at, VOCABULARY))
        tokens = (TABLE[tokens] / np.float32(TEMPERATURE) + noise).argmax(axis=1)
        np.testing.assert_array_equal(texts[:, lane, position - 1], tokens)


def test_a_budget_of_this_rounds_confidence_is_found_out():
    groups = right_groups()
    groups.reset()
    decode(groups, best, lag=0)
    scores = z_scores(sampled(groups.texts()))
    assert max(scores) > 8, scores


def test_coins_keyed_by_position_are_found_out(monkeypatch):
    def by_position(seeds, committed_lengths, drafts):
        at = [uniforms(seeds, committed_lengths + 1 + j, 1, Purpose.ACCEPT) for j in range(drafts)]
        return Coins(
            accept=jnp.concatenate(at, axis=1),
            bonus=uniforms(seeds, committed_lengths + 1, 1, Purpose.BONUS)[:, 0],
        )

    monkeypatch.setattr(jspec.decode, "draw_coins", by_position)
    groups = Groups(dataclasses.replace(DRAFTER, keyed_by_position=True))
    decode(groups, adversary)
    scores = z_scores(sampled(groups.texts()))
    assert max(scores) > 8, scores
