"""What requests share, seen from outside: prefixes executed once, slots for whoever matters more."""

import pytest
from served import BODY, Background, line, serving, until

from jspec.settings import Settings


def test_usage_tells_what_the_prefix_cache_had(served):
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]  # two whole pages of 4, and a rest

    def ask(path: str, **body):
        return served.post(path, temperature=0, **body).json()["usage"]

    served.service.engine.forget_prefixes()
    first = ask("/v1/completions", prompt=prompt, max_tokens=2)
    again = ask("/v1/completions", prompt=prompt, max_tokens=2, n=2)
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"] == {"cached_tokens": 8}
    text = "six five four three two one zero one two"
    for cached in (0, 8):
        usage = ask("/v1/responses", input=text, max_output_tokens=2)
        assert usage["input_tokens_details"] == {"cached_tokens": cached}


def test_greater_priority_interrupts_and_changes_no_answer(served, braked):
    thread = served.service.thread
    braked.engage()
    lesser = [Background(served, prompt=[n]) for n in range(3)]
    until(lambda: thread.unfinished == 3)
    braked.step(4)
    urgent = Background(served, prompt=[5], priority=1, max_tokens=3)
    until(lambda: thread.unfinished == 4)
    braked.release()
    assert urgent.result().json()["choices"][0]["text"] == line(5, 3)
    replies = [one.result().json()["choices"][0] for one in lesser]
    assert [reply["text"] for reply in replies] == [line(n, BODY["max_tokens"]) for n in range(3)]
    assert sum(reply["spec"]["preemptions"] for reply in replies) == 1


@pytest.mark.parametrize(("user", "client"), [("somebody", "somebody"), (None, "127.0.0.1")])
def test_turns_are_taken_by_users_or_addresses(served, monkeypatch, user, client):
    submit, seen = served.service.thread.submit, []

    def noted(requests, **options):
        seen.append(options["client"])
        return submit(requests, **options)

    monkeypatch.setattr(served.service.thread, "submit", noted)
    assert served.post("/v1/completions", prompt="two", max_tokens=2, user=user).status_code == 200
    assert seen == [client]


def test_a_user_with_many_requests_delays_another_by_no_more_than_its_turn(served, braked):
    thread = served.service.thread
    braked.engage()
    many = []
    for count in range(1, 7):
        many.append(Background(served, user="many"))
        until(lambda count=count: thread.unfinished == count)
    few = Background(served, user="few", max_tokens=2)
    until(lambda: thread.unfinished == 7)
    braked.release()
    few.result()
    assert thread.unfinished > 0
    assert {one.result().json()["choices"][0]["text"] for one in many} == {line(2, BODY["max_tokens"])}


def test_server_that_launches_ahead_gives_the_same_answers_and_counts_inert_lanes(engines, monkeypatch):
    used = engines["oracle"]
    monkeypatch.setattr(used, "overlap", True)
    with serving(used) as one:
        asked = [Background(one, prompt=[n], stop_token_ids=[6], max_tokens=30) for n in range(6)]
        answers = [each.result().json()["choices"][0] for each in asked]
        until(lambda: one.service.thread.unfinished == 0)
        inert = one.service.metrics.registry.get_sample_value("jspec_inert_lane_rounds_total")
    assert inert == sum(answer["spec"]["inert"] for answer in answers) > 0
    assert len(used._runner.free_slots) == used.max_slots and used.free_pages == used._pool.num_pages
    monkeypatch.undo()
    own = used.generate([[n] for n in range(6)], Settings(max_tokens=30, stop_token_ids=(6,)))
    assert [answer["text"] for answer in answers] == [result.text for result in own]
