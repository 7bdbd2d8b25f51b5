"""`jspec bench --scenario` on a table of 8 words."""

import dataclasses
import json

import pytest
from contract.engines import engine, shared
from contract.words import words_tokenizer

from jspec.bench import scenarios
from jspec.bench.scenarios import Outcome, verdict
from jspec.bench.vocabularies import VocabularyCost, vocabulary_costs, vocabulary_verdict
from jspec.cli import main
from jspec.commands import scenarios as command

TEXTS = {name: ("one two", "three four five") for name in ("chat", "rewrite")}


def bench(*arguments) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert not exit_.value.code


def test_answers_are_compared_and_timed(monkeypatch):
    monkeypatch.setattr(scenarios, "ANSWERS", (6,))
    cases = [
        dataclasses.replace(one, prompts=[[1, 2], [3]]) for one in scenarios.short_answers(shared("plain"), 6)
    ]
    plain, oracle = scenarios.run({"plain": shared("plain"), "oracle": shared("oracle")}, cases, repeats=2)
    assert (plain.ratio, plain.decode_ratio, plain.identical) == (1, 1, None)
    assert oracle.identical is True
    assert oracle.mean_commit_length > plain.mean_commit_length == 1
    assert oracle.first_token_seconds > 0


def test_one_token_has_no_decoding_after_the_first(monkeypatch):
    monkeypatch.setattr(scenarios, "ANSWERS", (1,))
    cases = [
        dataclasses.replace(one, prompts=[[1, 2]]) for one in scenarios.short_answers(shared("plain"), 1)
    ]
    (plain,) = scenarios.run({"plain": shared("plain")}, cases, repeats=1)
    assert (plain.ratio, plain.decode_ratio) == (1, None)


def test_context_without_room_for_any_length_is_refused():
    used = shared("plain")
    with pytest.raises(ValueError, match=f"max_tokens: expected at most {used.max_context - 64} behind 64"):
        scenarios.long_context(used, used.max_context)


@pytest.mark.extended
def test_every_scenario_has_plain_beside_it_and_says_where_it_pays(monkeypatch, capsys, tmp_path):
    small = engine("plain", tokenizer=words_tokenizer(), max_slots=2, prefix_cache=False)
    monkeypatch.setattr(command, "load", lambda *_, **__: small)
    monkeypatch.setattr(scenarios, "PROMPTS", TEXTS)
    monkeypatch.setattr(scenarios, "ANSWERS", (2, 6))
    monkeypatch.setattr(scenarios, "CONTEXTS", (5, 20, 2048))
    monkeypatch.setattr(scenarios, "EVERY_SETTING", {"temperature": 0.8, "top_k": 4, "log_probs": 2})
    out = tmp_path / "out.json"
    names = [word for name in scenarios.SCENARIOS for word in ("--scenario", name)]
    bench(*names, "--max-tokens", "6", "--repeats", "1", "--json", str(out))
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    for name in scenarios.SCENARIOS:
        assert f"{name}: speculation" in shown
        rows = [row for row in found["outcomes"] if row["scenario"] == name]
        assert [row["variant"] for row in rows] == ["plain", "ngram"] * (len(rows) // 2)
        assert all(row["identical"] for row in rows if row["variant"] == "ngram")
        assert all(row["ratio"] == 1 for row in rows if row["variant"] == "plain")
    cases = [row["case"] for row in found["outcomes"] if row["variant"] == "plain"]
    rising = ["2 tokens", "6 tokens", "1 together", "2 together", "5 tokens before", "20 tokens before"]
    assert cases == [*rising, "greedy", "temperature 1", "every setting"]


def test_what_does_not_pay_is_said():
    common = dict(scenario="short", tokens_per_second=1.0, first_token_seconds=0.1, mean_commit_length=2.0)
    rows = [
        Outcome(case="4 tokens", variant="plain", ratio=1.0, decode_ratio=1.0, identical=None, **common),
        Outcome(case="4 tokens", variant="ngram", ratio=0.8, decode_ratio=1.1, identical=True, **common),
        Outcome(case="64 tokens", variant="plain", ratio=1.0, decode_ratio=1.0, identical=None, **common),
        Outcome(case="64 tokens", variant="ngram", ratio=1.5, decode_ratio=1.6, identical=True, **common),
    ]
    said = "short: speculation does not pay at 4 tokens (0.80x of plain); it pays at 64 tokens (1.50x)"
    assert verdict(rows) == said
    assert verdict(rows[2:]) == "short: speculation pays at 64 tokens (1.50x)"


@pytest.mark.extended
def test_vocabularies_cost_what_they_cost():
    (cost,) = vocabulary_costs((64,), rounds=4, repeats=1)
    assert cost.break_even == cost.seconds / cost.plain_seconds
    assert 0 < cost.draft_share < 1


def test_vocabularies_at_which_it_cannot_pay_are_said():
    dear = VocabularyCost(vocabulary=9, plain_seconds=1.0, seconds=9.0, draft_share=0.8, break_even=9.0)
    cheap = VocabularyCost(vocabulary=8, plain_seconds=1.0, seconds=2.0, draft_share=0.2, break_even=2.0)
    said = "vocabulary: speculation pays at 8 from 2.00 tokens a round on; it does not pay at 9, whatever is accepted"
    assert vocabulary_verdict([cheap, dear]) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--scenario", "tall"],
            "scenario: expected some of short, load, context, sampling, vocabulary, all",
        ),
        (["--scenario", "short", "--task", "chat"], "task: expected none with --scenario"),
        (["--simulate", "--scenario", "short"], "scenario: expected none with --simulate"),
    ],
)
def test_options_that_do_not_go_together(capsys, arguments, said):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code
    shown = capsys.readouterr()
    assert said in " ".join((shown.out + shown.err).split())
