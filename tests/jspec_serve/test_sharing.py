"""What requests share, seen from outside: prefixes that are executed once, and slots that go to whoever matters more."""

from served import BODY, Background, line, until


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
