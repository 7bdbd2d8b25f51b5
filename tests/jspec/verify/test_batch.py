"""Mixed batches: every lane by its own rule, none by its neighbours'; the law under every setting."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law import V, assert_follows, count_blocks

from jspec.coins import coupled_noise, draw_coins
from jspec.round import Dense, OneHot, Proposal
from jspec.sampling import History, SamplingTable, settings_row
from jspec.settings import Settings
from jspec.target_rows import target_rows
from jspec.verify.batch import verify

SLOTS = 16
STOPS = (7,)
TABLE = np.random.default_rng(11).normal(size=(V, V)).astype(np.float32) * 1.5  # logits by last token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    settings: Settings
    prompt: Sequence[int]
    output: Sequence[int] = (1,)
    drafts: Sequence[int] = (2, 3)
    length: int = 2
    verify_length: int = 2
    seed: int = 0

    @property
    def anchor(self) -> int:
        return [*self.prompt, *self.output][-1]


@functools.partial(jax.jit, static_argnames=("block_verification", "drafts"))
def judge(
    logits,
    table,
    history,
    lanes,
    starts,
    proposal,
    verify_lengths,
    emitted,
    known,
    drafts,
    block_verification,
):
    rows = target_rows(logits, table, history, lanes, starts, proposal, emitted)
    seeds = table.seeds[jnp.maximum(lanes, 0)]
    coins = draw_coins(seeds, known - 1, drafts)
    return verify(
        proposal, rows, verify_lengths, coins, table, lanes, known, block_verification=block_verification
    )


def state_of(requests: Sequence[Request]) -> tuple[SamplingTable, History]:
    """Table and history of SLOTS slots, with request i in slot i."""
    unused = Request(settings=Settings(), prompt=(0,), output=())
    slots = [*requests, *[unused] * (SLOTS - len(requests))]
    rows = [
        settings_row(
            slot.settings, STOPS, slot.seed if slot.settings.seed is None else slot.settings.seed, V, 2
        )
        for slot in slots
    ]
    names = [field.name for field in dataclasses.fields(SamplingTable)]
    table = SamplingTable(
        **{name: jnp.asarray(np.stack([getattr(row, name) for row in rows])) for name in names}
    )
    counts = np.stack([np.bincount(np.asarray(slot.output, int), minlength=V) for slot in slots])
    seen = np.stack([np.isin(np.arange(V), slot.prompt) for slot in slots])
    return table, History(output_counts=jnp.asarray(counts, jnp.int32), prompt_seen=jnp.asarray(seen))


def verdicts(
    requests: Sequence[Request],
    lanes: Sequence[int],
    block_verification: bool = False,
    broken: Sequence[int] = (),
    width: int = 8,
) -> list[tuple[int, int]]:
    """accept_length and bonus of each lane; a lane's rows are packed, as many as it verifies, plus one.

    Rows that belong to no lane, and those of the lanes in `broken`, are NaN. Padding fills up to `width`
    lanes.
    """
    table, history = state_of(requests)
    lanes = [*lanes, *[-1] * (width - len(lanes))]
    idle = Request(settings=Settings(), prompt=(0,), length=0, verify_length=0)
    batch = [requests[slot] if slot >= 0 else idle for slot in lanes]
    drafts = len(idle.drafts)
    logits, starts = [], []
    for lane, (slot, request) in enumerate(zip(lanes, batch, strict=True)):
        starts.append(len(logits))
        if slot >= 0:
            nodes = [request.anchor, *request.drafts[: request.verify_length]]
            logits += [
                np.full(V, np.nan) if lane in broken else TABLE[np.clip(node, 0, V - 1)] for node in nodes
            ]
    logits += [np.full(V, np.nan)] * (width * (drafts + 1) - len(logits))

    def column(values: Sequence) -> jax.Array:
        return jnp.asarray(np.asarray(values, np.int32))

    proposal = Proposal(
        tokens=column([request.drafts for request in batch]),
        lengths=column([request.length for request in batch]),
        q=OneHot(),
    )
    verdict = judge(
        jnp.asarray(np.stack(logits).astype(np.float32)),
        table,
        history,
        column(lanes),
        column(starts),
        proposal,
        column([request.verify_length for request in batch]),
        column([len(request.output) for request in batch]),
        column([len(request.prompt) + len(request.output) for request in batch]),
        drafts=drafts,
        block_verification=block_verification,
    )
    return list(
        zip(np.asarray(verdict.accept_length).tolist(), np.asarray(verdict.bonus).tolist(), strict=True)
    )


REQUESTS = [
    Request(settings=Settings(), prompt=(0, 4), drafts=(3, 2)),
    Request(settings=Settings(temperature=1.0), prompt=(0,), seed=3),
    Request(settings=Settings(temperature=0.9, seed=5, top_p=0.9), prompt=(6, 0, 1), verify_length=1),
    Request(
        settings=Settings(repetition_penalty=1.4, min_tokens=4),
        prompt=(2,),
        output=(1, 5),
        length=0,
        verify_length=0,
    ),
    Request(
        settings=Settings(temperature=1.5, top_k=4, frequency_penalty=0.4), prompt=(2, 2), seed=9, length=1
    ),
    Request(settings=Settings(temperature=0.7, seed=5, logit_bias={3: -np.inf}), prompt=(5,), drafts=(3, 3)),
]


@pytest.mark.parametrize("block_verification", [False, True])
def test_lane_is_judged_as_if_it_were_alone(block_verification):
    width = 8 if block_verification else 1  # rejection: alone in another program, too
    alone = [verdicts(REQUESTS, [slot], block_verification, width=width)[0] for slot in range(6)]
    for lanes in ([0, 1, 2, 3, 4, 5], [5, 3, -1, 1, 0, 4, 2, -1], [-1, 4, 0], [2, 5], [3, 0]):
        together = verdicts(REQUESTS, lanes, block_verification)
        for lane, slot in enumerate(lanes):
            if slot >= 0:
                assert together[lane] == alone[slot], (lanes, slot)


def test_broken_lane_says_so_and_disturbs_nobody():
    lanes = [5, 3, -1, 1, 0, 4, 2]
    clean = verdicts(REQUESTS, lanes)
    for lane, slot in enumerate(lanes):
        if slot < 0:
            continue
        got = verdicts(REQUESTS, lanes, broken=[lane])
        assert got[lane] == (0, -1)
        others = [other for other in range(len(lanes)) if other != lane and lanes[other] >= 0]
        assert [got[other] for other in others] == [clean[other] for other in others]


def test_greedy_lane_beside_sampled_ones_emits_its_best_ids():
    best = np.argmax(TABLE, axis=1)
    first = int(best[1])
    drafts = (first, int(best[first]))
    greedy = Request(settings=Settings(), prompt=(0,), drafts=drafts)
    hot = Request(settings=Settings(temperature=2.0), prompt=(0,), drafts=drafts)
    for seed in range(20):
        requests = [dataclasses.replace(hot, seed=seed), greedy, dataclasses.replace(hot, seed=100 + seed)]
        assert verdicts(requests, [0, 1, 2])[1] == (2, int(best[drafts[1]]))


def test_seeded_request_draws_the_same_under_any_drafts_and_cut():
    def emitted(request: Request) -> list[int]:
        accept_length, bonus = verdicts([request], [0])[0]
        return [*request.drafts[:accept_length], bonus]

    for seed in range(8):
        request = Request(
            settings=Settings(temperature=1.2, top_p=0.95, seed=seed, presence_penalty=0.3), prompt=(0,)
        )
        plain: list[int] = []
        for _ in range(3):
            step = dataclasses.replace(request, output=(1, *plain), length=0, verify_length=0)
            plain += emitted(step)
        for drafts in [tuple(plain[:2]), (plain[0], (plain[1] + 1) % V), ((plain[0] + 1) % V, plain[1])]:
            for verify_length in (0, 1, 2):
                got = emitted(dataclasses.replace(request, drafts=drafts, verify_length=verify_length))
                assert got == plain[: len(got)]
        assert len(emitted(dataclasses.replace(request, drafts=tuple(plain[:2])))) == 3


def test_seeded_request_is_sampled_with_the_noise_of_its_position():
    settings = [Settings(temperature=2.0, seed=seed) for seed in range(8)]
    requests = [
        Request(settings=one, prompt=(0, 3, 6), length=0, verify_length=0, seed=99) for one in settings
    ]
    noise = coupled_noise(jnp.arange(8, dtype=jnp.uint32), jnp.full((8,), 4), V)
    expected = np.argmax(TABLE[1] / 2.0 + np.asarray(noise), axis=1)
    assert [bonus for _, bonus in verdicts(requests, range(8))] == expected.tolist()
    assert len(set(expected.tolist())) > 2


def test_unseeded_requests_do_not_share_a_stream():
    request = Request(settings=Settings(temperature=3.0), prompt=(0,), length=0, verify_length=0)
    requests = [dataclasses.replace(request, seed=seed) for seed in range(16)]
    bonuses = {bonus for lanes in (range(8), range(8, 16)) for _, bonus in verdicts(requests, lanes)}
    assert len(bonuses) > 3


def test_banned_token_is_emitted_from_no_row():
    for settings in (Settings(logit_bias={3: -np.inf}), Settings(temperature=1.0, logit_bias={3: -np.inf})):
        for seed in range(12):
            request = Request(settings=settings, prompt=(0,), drafts=(3, 3), seed=seed)
            assert verdicts([request], [0])[0][0] == 0
            accepted = Request(settings=settings, prompt=(0,), output=(5,), drafts=(6, 3), seed=seed)
            for verify_length in (0, 1, 2):
                assert verdicts([dataclasses.replace(accepted, verify_length=verify_length)], [0])[0][1] != 3


# -- the law, from settings to tokens -----------------------------------------------------------

LAWS = [
    Settings(temperature=1.0),
    Settings(temperature=0.6),
    Settings(temperature=1.4, top_k=3),
    Settings(temperature=1.0, top_p=0.8),
    Settings(temperature=1.0, min_p=0.15),
    Settings(temperature=1.0, repetition_penalty=1.8),
    Settings(temperature=1.0, presence_penalty=0.8),
    Settings(temperature=1.0, frequency_penalty=0.8),
    Settings(temperature=1.0, logit_bias={0: 1.0, 5: -np.inf}),
    Settings(temperature=1.0, allowed_token_ids=(0, 2, 3, 7)),
    Settings(temperature=1.0, min_tokens=3),
    Settings(temperature=1.2, top_k=6, top_p=0.9, min_p=0.02, frequency_penalty=0.5, logit_bias={1: 0.5}),
]
PROMPT, OUTPUT = (4, 1), (1, 2)


def next_probs(settings: Settings, path: Sequence[int]) -> np.ndarray:
    """The definition of the target's next-token law after PROMPT, OUTPUT and `path`, in float64."""
    output = [*OUTPUT, *path]
    logits = TABLE[output[-1]].astype(np.float64)
    counts = np.bincount(output, minlength=V)
    seen = (counts > 0) | np.isin(np.arange(V), PROMPT)
    repeated = np.where(
        logits > 0, logits / settings.repetition_penalty, logits * settings.repetition_penalty
    )
    logits = np.where(seen, repeated, logits) - settings.frequency_penalty * counts
    logits -= settings.presence_penalty * (counts > 0)
    for id_, bias in settings.logit_bias.items():
        logits[id_] += bias
    if settings.allowed_token_ids is not None:
        logits[~np.isin(np.arange(V), settings.allowed_token_ids)] = -np.inf
    if len(output) < settings.min_tokens:
        logits[list(STOPS)] = -np.inf
    probs = np.exp((logits - logits.max()) / settings.temperature)
    order = np.argsort(-probs, kind="stable")
    probs[order[settings.top_k or V :]] = 0
    above = np.cumsum(probs[order]) - probs[order]
    probs[order[above >= settings.top_p * probs.sum()]] = 0
    probs[probs < settings.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("block_verification", [False, True], ids=["rejection", "block"])
@pytest.mark.parametrize("settings", LAWS, ids=range(len(LAWS)))
def test_law_is_the_targets_under_every_setting(settings, block_verification):
    # Two draft tokens each from its own q; half of the lanes verify both, half only the first.
    lanes, paths = 20_000, np.stack(np.meshgrid(range(V), range(V), indexing="ij"), axis=-1).reshape(-1, 2)
    q = np.random.default_rng(5).dirichlet(np.ones(V), size=2)
    rng = np.random.default_rng(6)
    drafts = np.stack([rng.choice(V, size=lanes, p=row) for row in q], axis=1)
    verify_lengths = 2 - np.arange(lanes) % 2
    request = Request(settings=settings, prompt=PROMPT, output=OUTPUT)
    table, history = state_of([request])
    # The rows of every path, once; lanes of the same path share them.
    logits = np.stack([TABLE[[OUTPUT[-1], *path]] for path in paths]).reshape(-1, V)
    of_paths = Proposal(
        tokens=jnp.asarray(paths, jnp.int32),
        lengths=jnp.full((len(paths),), 2),
        q=OneHot(),
    )
    shared = rows_of_paths(
        jnp.asarray(logits),
        table,
        history,
        jnp.zeros((len(paths),), jnp.int32),
        jnp.arange(len(paths), dtype=jnp.int32) * 3,
        of_paths,
        jnp.full((len(paths),), len(OUTPUT)),
    )
    rows = dataclasses.replace(shared, starts=jnp.asarray((drafts[:, 0] * V + drafts[:, 1]) * 3, jnp.int32))
    proposal = Proposal(
        tokens=jnp.asarray(drafts, jnp.int32),
        lengths=jnp.full((lanes,), 2),
        q=Dense(probs=jnp.broadcast_to(jnp.asarray(q, jnp.float32), (lanes, 2, V)), ids=None),
    )
    coins = draw_coins(jnp.arange(lanes, dtype=jnp.uint32), jnp.full((lanes,), 3, jnp.int32), 2)
    verdict = verify_lanes(
        proposal,
        rows,
        jnp.asarray(verify_lengths, jnp.int32),
        coins,
        table,
        jnp.zeros((lanes,), jnp.int32),
        jnp.full((lanes,), 4, jnp.int32),
        block_verification=block_verification,
    )

    @functools.cache
    def after(path: tuple[int, ...]) -> np.ndarray:
        return next_probs(settings, path)

    counts = count_blocks(
        drafts,
        np.asarray(verdict.accept_length),
        np.asarray(verdict.bonus),
        lambda block: np.stack([after(tuple(map(int, path))) for path in block]),
    )
    law = np.zeros((V, V, V))
    for first, second in paths:
        law[first, second] = after(())[first] * after((first,))[second] * after((first, second))
    assert_follows(counts, law)


rows_of_paths = jax.jit(target_rows)
verify_lanes = jax.jit(verify, static_argnames="block_verification")
