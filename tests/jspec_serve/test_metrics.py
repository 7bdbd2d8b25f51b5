"""What a server counts, held against runs whose counts are known."""

import collections
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Background, until

from jspec.buckets import Bucket
from jspec_serve.metrics import Metrics
from jspec_serve.page import FOLDER

# Nine tokens behind one: the prompt's round emits the first, two rounds of three draft tokens each emit four.
BODY = {"prompt": "two", "max_tokens": 9, "temperature": 0}


class Counted:
    """What /metrics says, less what it said at the start."""

    def __init__(self, served):
        self._served, self._before = served, collections.Counter[str]()
        self._before = self.read()

    def read(self) -> collections.Counter[str]:
        with self._served.client() as client:
            text = client.get("/metrics").text
        values: collections.Counter[str] = collections.Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return values

    def __getitem__(self, name: str) -> float:
        return self.read()[f"jspec_{name}"] - self._before[f"jspec_{name}"]


@pytest.fixture
def counted(served):
    until(lambda: served.service.thread.unfinished == 0)
    return Counted(served)


def test_rounds_tokens_and_lengths(served, counted):
    spec = served.post("/v1/completions", **BODY).json()["choices"][0]["spec"]
    assert counted["rounds_total{kind=prefill}"] == 1
    assert counted["rounds_total{kind=draft}"] == 2
    assert counted["rounds_total{kind=plain}"] == 0
    assert counted["round_seconds_count{kind=draft}"] == 2
    assert counted["generated_tokens_total"] == 9
    assert counted["prompt_tokens_total"] == 1
    assert counted["lane_rounds_total"] == counted["drafting_lane_rounds_total"] == 2
    assert counted["committed_nodes_total"] == 8
    stages = [
        counted[f"draft_tokens_total{{stage={stage}}}"] for stage in ("proposed", "verified", "accepted")
    ]
    assert stages == [6, 6, 6]
    assert [counted[f"accepted_at_position_total{{position={n}}}"] for n in (1, 2, 3, 4)] == [2, 2, 2, 0]
    assert (counted["batch_lanes_count"], counted["batch_lanes_sum"]) == (2, 2)
    assert (counted["round_budget_count"], counted["round_budget_sum"]) == (2, 6)
    assert (counted["verify_length_count"], counted["verify_length_sum"]) == (2, 6)
    assert counted["requests_total{reason=length}"] == 1
    assert counted["responses_total{path=/v1/completions,status=200}"] == 1
    assert counted.read()["jspec_mean_commit_length"] > 1
    known = {"proposed": 6, "verified": 6, "accepted": 6, "committed": 8, "emitted": 9, "rounds": 2}
    assert {name: spec[name] for name in known} == known
    assert spec["accept_histogram"] == [0, 0, 0, 2]
    assert (spec["mean_commit_length"], spec["acceptance_rate"], spec["drafting_rounds"]) == (4, 1, 2)
    assert (spec["drafter"], spec["off"], spec["scheduled"], spec["simulated"]) == ("cut", None, False, False)


def test_rounds_without_speculation(served, counted):
    spec = served.post("/v1/completions", **BODY, speculation="off").json()["choices"][0]["spec"]
    assert counted["rounds_total{kind=plain}"] == counted["lane_rounds_total"] == 8
    assert counted["drafting_lane_rounds_total"] == counted["draft_tokens_total{stage=verified}"] == 0
    assert counted["round_budget_sum"] == counted["verify_length_sum"] == 0
    assert (spec["off"], spec["accept_histogram"], spec["acceptance_rate"]) == (
        "the request turned it off",
        [8],
        None,
    )


def test_mixed_rounds_are_a_kind_of_their_own():
    """One lane executes the prompt; the others decode, and have the nodes that no lane has as its anchor."""
    metrics = Metrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"jspec_{name}", labels)

    metrics.round(Bucket(lanes=4, nodes=16, chunk=31), lanes=3, seconds=0.5)
    metrics.round(Bucket(lanes=4, nodes=4, chunk=31), lanes=4, seconds=0.25)
    assert (value("rounds_total", kind="mixed"), value("round_seconds_sum", kind="mixed")) == (2, 0.75)
    assert (value("batch_lanes_count"), value("batch_lanes_sum")) == (2, 2 + 3)
    assert (value("round_budget_count"), value("round_budget_sum")) == (2, 13 + 0)
    metrics.round(Bucket(lanes=1, nodes=1, chunk=127), lanes=1, seconds=0.5)
    assert (value("rounds_total", kind="prefill"), value("rounds_total", kind="mixed")) == (1, 2)
    assert value("batch_lanes_count") == value("round_budget_count") == 2


def test_times_of_a_request_fit_together(served, counted):
    served.post("/v1/completions", **BODY)
    names = ("queue", "time_to_first_token", "request", "time_per_output_token")
    assert [counted[f"{name}_seconds_count"] for name in names] == [1, 1, 1, 1]
    queue, first, whole, each = (counted[f"{name}_seconds_sum"] for name in names)
    assert 0 <= queue < first < whole
    assert each == pytest.approx((whole - first) / 8)
    rounds = sum(counted[f"round_seconds_sum{{kind={kind}}}"] for kind in ("prefill", "draft", "plain"))
    assert 0 < rounds <= whole


def test_one_token_has_no_time_per_later_token(served, counted):
    served.post("/v1/completions", prompt="two", max_tokens=1)
    assert counted["time_to_first_token_seconds_count"] == 1
    assert counted["time_per_output_token_seconds_count"] == 0


def test_prompt_tokens_that_the_prefix_cache_had(served, counted):
    served.service.engine.forget_prefixes()
    body = {"prompt": [1, 2, 3, 4, 5, 6, 7, 0, 1, 1], "max_tokens": 2}
    cached = [
        served.post("/v1/completions", **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 8]  # two pages of four
    assert counted["reused_prompt_tokens_total"] == 8
    assert counted["prompt_tokens_total"] == 20


def test_gauges_while_requests_run_and_wait(served, braked, counted):
    engine = served.service.engine
    free = engine.free_pages[0]
    braked.engage()
    asked = [Background(served) for _ in range(5)]
    until(lambda: served.service.thread.unfinished == 5)
    braked.step(3)  # one prompt a round
    now = counted.read()
    assert (now["jspec_running"], now["jspec_waiting"], now["jspec_slots"]) == (3, 2, 3)
    assert now["jspec_pages{group=0}"] == engine._pool.num_pages[0]
    assert now["jspec_free_pages{group=0}"] == engine.free_pages[0] < free
    assert now["jspec_compiled_programs"] == sum(engine.programs.traces.values())
    braked.release()
    for one in asked:
        assert one.result().status_code == 200
    assert counted["preemptions_total"] == 0
    assert counted["batch_lanes_bucket{le=3.0}"] - counted["batch_lanes_bucket{le=2.0}"] > 0


def test_preemptions_and_refusals(served, braked, counted):
    braked.engage()
    asked = [Background(served, priority=-1) for _ in range(3)]
    until(lambda: served.service.thread.unfinished == 3)
    braked.step(3)
    asked.append(Background(served, priority=1))
    until(lambda: served.service.thread.unfinished == 4)
    braked.release()
    preempted = [one.result().json()["choices"][0]["spec"]["preemptions"] for one in asked]
    assert counted["preemptions_total"] == sum(preempted) == 1
    assert served.post("/v1/completions", prompt="two", colour=1).status_code == 400
    assert served.post("/v1/nothing").status_code == 404
    assert counted["responses_total{path=/v1/completions,status=400}"] == 1
    assert counted["responses_total{path=unknown,status=404}"] == 1


def test_the_page_reads_metrics_that_there_are(served):
    """A name that is not counted would read as 0 for ever."""
    served.post("/v1/completions", **BODY)
    with served.client() as client:
        text = client.get("/metrics").text
    names = set(re.findall(r"jspec_[a-z_]+[a-z]", (FOLDER / "metrics.js").read_text()))
    assert len(names) >= 10
    assert {name for name in names if f"\n{name}" not in text} == set()
