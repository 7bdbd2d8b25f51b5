import json

import pytest
from contract.engines import shared

from jspec.bench.costs import Cost, best_draft_length
from jspec.bench.measure import measure
from jspec.bench.prompts import read_prompts
from jspec.bench.table import as_json, cost_table, measurement_table
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
    assert measurement_table([plain, oracle]).row_count == 2
    assert cost_table(costs).row_count == 1
    assert json.loads(json.dumps(as_json([plain, oracle], costs)))["measurements"][1]["variant"] == "oracle"


def test_best_draft_length_weighs_acceptance_against_cost():
    costs = [
        Cost(draft_length=d, seconds=c, relative=c, attainable=c < d + 1)
        for d, c in ((0, 1.0), (1, 1.3), (3, 1.4), (7, 1.7))
    ]
    assert best_draft_length(costs, (0.9, 0.8, 0.7, 0.1, 0.0, 0.0, 0.0)) == (3, pytest.approx(3.4 / 1.4))
    assert best_draft_length(costs, (0.1,) * 7) == (0, 1.0)


def test_prompt_file_is_read_by_task(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "task": "x"}\n\n{"prompt": "b"}\n')
    assert read_prompts(path) == {"x": ("a",), "prompts": ("b",)}


@pytest.mark.parametrize(
    ("text", "message"), [("", "at least one prompt"), ('{"text": 1}\n', r":1: expected an object")]
)
def test_prompt_file_without_prompts_is_refused(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_prompts_keep_line_breaks_that_only_unicode_knows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "ä"}\n', encoding="utf-8")
    assert read_prompts(path) == {"prompts": ("a\u2028b\u0085c", "ä")}


def test_one_token_per_prompt_gives_no_decode_speed():
    with pytest.raises(ValueError, match="t: expected a prompt with at least 2 tokens of text"):
        measure({"plain": shared("plain")}, {"t": [[1]]}, Settings(max_tokens=1), repeats=1)
