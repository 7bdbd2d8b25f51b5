"""How much is drafted for one request, and what it is told if that is nothing."""

import dataclasses
import re

import numpy as np
import pytest
from contract.engines import shared
from contract.test_use import line

from jspec.schedule.scheduler import Scheduler
from jspec.settings import Settings

PROMPT = [1, 2]
# Of a drafter's token by its id: `contract.engines` makes the confidence rise with it.
CONFIDENCE = np.linspace(0.05, 0.95, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steep:
    """Costs of which drafting never pays with two requests, and always does with one."""

    def round_seconds(self, requests: int, bucket, context: int) -> float:
        return 1.0 if requests == 1 or not bucket.budget else 100.0


def steep():
    used = shared("confident", costs=Steep(), max_slots=2)
    used._scheduler = Scheduler(costs=used.costs, ladder=used.ladder, max_slots=2)
    return used


def only(used, settings, prompt=PROMPT):
    return used.generate([prompt], settings)[0]


@pytest.mark.parametrize("scheduled", [False, True])
def test_draft_tokens_below_the_least_confidence_are_not_verified(scheduled):
    used = steep() if scheduled else shared("confident")
    settings = Settings(max_tokens=20, seed=3)  # the drafter draws by it, though the text is greedy
    whole = only(used, settings)
    verified = [whole.counters.verified]
    for least in (0.2, 0.5, 1.0):
        result = only(used, dataclasses.replace(settings, min_confidence=least))
        assert result.token_ids == whole.token_ids == line(2, 20)
        verified.append(result.counters.verified)
        assert (result.why_off is None) == (result.counters.verified > 0)
    assert verified == sorted(verified, reverse=True)
    assert verified[0] > verified[1] > verified[-1] == 0
    if not scheduled:
        assert whole.counters.verified == whole.counters.proposed
        assert "no draft token reached the confidence that the request asks for, 1" in result.why_off


def test_least_confidence_of_one_request_is_not_its_neighbours():
    used = shared("confident")
    strict, free = used.generate(
        [PROMPT, PROMPT], [Settings(max_tokens=20, min_confidence=1.0), Settings(max_tokens=20)]
    )
    assert strict.counters.verified == 0
    assert free.counters.verified == free.counters.proposed > 0
    again = only(used, Settings(max_tokens=20))  # nor that of the next one on its slot
    assert again.counters.verified == again.counters.proposed > 0


def test_seeded_text_does_not_depend_on_the_least_confidence():
    settings = Settings(max_tokens=20, temperature=1.1, seed=4)
    expected = only(shared("plain"), settings).token_ids
    for least in (0.0, 0.3, 0.7):
        result = only(shared("confident"), dataclasses.replace(settings, min_confidence=least))
        assert result.token_ids == expected


def test_least_confidence_needs_a_drafter_that_gives_confidence():
    settings = Settings(max_tokens=3, min_confidence=0.5)
    with pytest.raises(ValueError, match="min_confidence: expected 0, as the drafter gives no confidence"):
        shared("ngram").generate([PROMPT], settings)
    assert only(shared("ngram"), dataclasses.replace(settings, draft_length=0)).token_ids == line(2, 3)
    assert only(shared("plain"), settings).token_ids == line(2, 3)


@pytest.mark.parametrize(
    ("drafter", "settings", "why"),
    [
        ("oracle", Settings(max_tokens=9), None),
        ("oracle", Settings(max_tokens=9, draft_length=0), "the request turned it off"),
        ("plain", Settings(max_tokens=9), "there is no drafter"),
        ("oracle", Settings(max_tokens=2), "the answer is too short"),
        ("ngram", Settings(max_tokens=3), "the drafter had nothing to propose"),
    ],
)
def test_a_result_says_why_nothing_was_drafted(drafter, settings, why):
    result = only(shared(drafter), settings, prompt=[2])
    assert (result.why_off is None) == bool(result.counters.verified) == (why is None)
    assert why is None or why in result.why_off


@pytest.mark.parametrize("overlap", [False, True])
def test_above_the_load_at_which_drafting_pays_it_stops_and_says_so(overlap):
    used = steep()
    alone = only(used, Settings(max_tokens=12))
    assert alone.counters.verified and alone.why_off is None and alone.counters.declined_rounds == 0
    with used.session(overlap=overlap) as session:
        session.add([PROMPT, PROMPT], [Settings(max_tokens=12), Settings(max_tokens=40)])
        while session.busy:
            session.step()
        short, long = session.result(0), session.result(1)
    assert short.token_ids == line(2, 12) and long.token_ids == line(2, 40)
    assert short.counters.verified == 0
    assert 0 < short.counters.declined_rounds <= short.counters.rounds
    assert re.fullmatch(
        f"in {short.counters.declined_rounds} of {short.counters.rounds} rounds it would have cost more than it "
        r"brought: at this load, 2 requests, \d draft tokens make a round take 100\.00 times as long, for an "
        r"expected [1-4]\.\d\d times as many tokens",
        short.why_off,
    )
    # The other one is alone from then on, and drafts.
    assert long.counters.verified > 0 and 0 < long.counters.declined_rounds < long.counters.rounds
    assert f"in {long.counters.declined_rounds} of {long.counters.rounds} rounds" in long.why_off
