import dataclasses
import io
import json

import pytest
from contract.engines import shared
from rich.console import Console

from jspec.bench.costs import Cost, best_draft_length
from jspec.bench.measure import measure
from jspec.bench.prompts import asked, chats_by_task
from jspec.bench.table import as_json, cost_table, measurement_table, round_table
from jspec.results import Counters
from jspec.settings import Settings


def engines():
    return {"plain": shared("plain"), "oracle": shared("oracle")}


def test_speed_of_text_stuck_in_a_loop_is_refused():
    with pytest.raises(ValueError, match="copy: expected text, got loops on all 1 prompts"):
        measure(engines(), {"copy": [[1, 2, 3]]}, Settings(max_tokens=60), repeats=1)


def test_measurements_of_all_variants_come_from_one_run():
    plain, oracle = measure(engines(), {"short": [[1, 2], [3]]}, Settings(max_tokens=9), repeats=2)
    assert (plain.variant, plain.ratio, plain.identical) == ("plain", 1.0, None)
    assert oracle.identical is True
    assert oracle.counters.mean_commit_length > plain.counters.mean_commit_length == 1
    assert sum(oracle.shares.values()) == pytest.approx(1)
    assert 0 <= oracle.host_share < oracle.shares["rest"]
    costs = [Cost(draft_length=0, seconds=1.0, relative=1.0, attainable=True)]
    assert measurement_table([plain, oracle]).row_count == round_table([plain, oracle]).row_count == 2
    assert cost_table(costs).row_count == 1
    assert json.loads(json.dumps(as_json([plain, oracle], costs)))["measurements"][1]["variant"] == "oracle"


def test_best_draft_length_weighs_acceptance_against_cost():
    costs = [
        Cost(draft_length=d, seconds=c, relative=c, attainable=c < d + 1)
        for d, c in ((0, 1.0), (1, 1.3), (3, 1.4), (7, 1.7))
    ]
    good = Counters(rounds=10, drafting_rounds=10, accept_histogram=(1, 1, 1, 6, 1, 0, 0, 0))
    assert good.acceptance_by_position() == (0.9, 0.8, 0.7, 0.1, 0.0, 0.0, 0.0)
    assert best_draft_length(costs, good) == (3, pytest.approx(3.4 / 1.4))
    poor = Counters(rounds=20, drafting_rounds=20, accept_histogram=(19, 0, 0, 0, 0, 0, 0, 1))
    assert best_draft_length(costs, poor) == (0, 1.0)


def test_rounds_without_a_draft_count_neither_as_refused_nor_as_dear():
    costs = [Cost(draft_length=d, seconds=c, relative=c, attainable=True) for d, c in ((0, 1.0), (3, 1.5))]
    # 6 rounds proposed nothing; 4 drafted, of which 3 got all and 1 got nothing: 6 + 13 tokens.
    counters = Counters(rounds=10, drafting_rounds=4, accept_histogram=(7, 0, 0, 3))
    assert counters.acceptance_by_position() == (0.75, 0.75, 0.75)
    assert best_draft_length(costs, counters) == (3, pytest.approx(19 / (6 + 4 * 1.5)))
    assert best_draft_length(costs, Counters(rounds=5, accept_histogram=(5,))) == (0, 1.0)


def test_rounds_that_drafted_are_counted():
    # It proposes as many tokens as the text's length is past a multiple of 4: none after the fourth.
    on, off = shared("varying").generate(
        [[1, 2, 1], [2]], [Settings(max_tokens=14), Settings(max_tokens=6, draft_length=0)]
    )
    assert 0 < on.counters.drafting_rounds < on.counters.rounds
    assert (off.counters.drafting_rounds, off.counters.rounds) == (0, 5)
    assert off.counters.acceptance_by_position() == ()


@pytest.mark.parametrize("table", [measurement_table, round_table])
def test_tables_fit_a_narrow_terminal(table):
    _, oracle = measure(engines(), {"rewrite": [[1, 2]]}, Settings(max_tokens=9), repeats=1)
    busy = dataclasses.replace(
        oracle,
        tokens_per_second=123.4,
        spread=0.24,
        counters=Counters(rounds=9, committed=40, drafting_rounds=9, accept_histogram=(0,) * 7 + (9,)),
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([busy]))
    shown = console.export_text()
    assert "…" not in shown
    filled = [line for line in shown.splitlines() if line.strip()]
    assert len(filled) == 4  # title, head, rule and one line: nothing is wrapped
    assert "identical" in shown or "100 100 100 100 100 100 100" in shown


def test_sampled_text_with_a_seed_is_the_same_in_every_run_and_compared():
    warm = Settings(max_tokens=9, temperature=1.0, seed=0)
    plain, oracle = measure(engines(), {"short": [[1, 2]]}, warm, repeats=2)
    assert (plain.identical, oracle.identical) == (None, True)
    unseeded = Settings(max_tokens=9, temperature=1.0)
    assert measure(engines(), {"short": [[1, 2]]}, unseeded, repeats=1)[1].identical is None


def test_prompt_file_is_read_by_task(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]
    lines = [{"prompt": "a", "task": "x"}, {"prompt": "b"}, {"messages": chat, "task": "x"}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert chats_by_task(path) == {"x": (asked("a"), chat), "prompts": (asked("b"),)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one prompt"),
        ('{"text": 1}\n', r":1: expected an object"),
        ('{"prompt": "a"}\n{"prompt": 1}\n', r":2: expected an object"),
        ("nope\n", r":1: expected an object"),
        ('{"messages": []}\n', r":1: expected an object"),
        ('{"messages": ["a"]}\n', r":1: expected an object"),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}\n', r":1: expected an object"),
    ],
)
def test_prompt_file_without_prompts_is_refused(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        chats_by_task(path)


def test_prompt_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"prompts: expected JSON Lines, got .*gone.jsonl' \(No such file"):
        chats_by_task(tmp_path / "gone.jsonl")


def test_prompts_keep_line_breaks_that_only_unicode_knows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "ä"}\n', encoding="utf-8")
    assert chats_by_task(path) == {"prompts": (asked("a\u2028b\u0085c"), asked("ä"))}


def test_one_token_per_prompt_gives_no_decode_speed():
    with pytest.raises(ValueError, match="t: expected a prompt with at least 2 tokens of text"):
        measure({"plain": shared("plain")}, {"t": [[1]]}, Settings(max_tokens=1), repeats=1)
