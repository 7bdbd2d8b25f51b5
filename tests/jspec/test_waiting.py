"""Who is next: priorities, clients that take turns, and nobody who waits for ever."""

from jspec.request import Request
from jspec.settings import Settings
from jspec.text.output import Output
from jspec.waiting import PATIENCE, Waiting


class Queue:
    def __init__(self):
        self.waiting, self.count = Waiting(), 0

    def add(self, client=None, *, priority=0, limit=10):
        output = Output(tokenizer=None, stop=())
        request = Request(index=self.count, prompt_ids=(1,), settings=Settings(), limit=limit, output=output)
        request.client, request.priority = client, priority
        self.count += 1
        self.waiting.add(request)
        return request

    def take(self, count):
        return [self.waiting.take_first() for _ in range(count)]

    def end(self, request, tokens):
        request.started, request.token_ids = 0.0, [1] * (tokens - 1)
        self.waiting.charge(request)


def test_one_client_is_served_in_the_order_of_its_requests():
    queue = Queue()
    asked = [queue.add(limit=limit) for limit in (100, 1, 50, 2)]
    assert queue.take(2) == asked[:2]
    asked.append(queue.add(limit=1))
    assert queue.take(3) == asked[2:]


def test_many_requests_of_a_client_delay_another_by_one():
    queue = Queue()
    many = [queue.add("many") for _ in range(20)]
    assert queue.take(3) == many[:3]
    few = queue.add("few")
    assert few in queue.take(2)
    for _ in range(3):
        queue.add("few")
    order = [request.client for request in queue.take(6)]
    assert order.count("few") == order.count("many") == 3


def test_turns_are_shared_by_tokens():
    queue = Queue()
    for _ in range(40):
        queue.add("long", limit=40)
        queue.add("short", limit=10)
    taken = queue.take(20)
    tokens = {client: sum(r.limit for r in taken if r.client == client) for client in ("long", "short")}
    assert abs(tokens["long"] - tokens["short"]) <= 40


def test_a_client_that_paused_has_saved_nothing_up_and_owes_nothing():
    queue = Queue()
    for _ in range(10):
        queue.add("busy")
    queue.take(10)
    for _ in range(4):
        queue.add("other")
        queue.add("busy")
    assert [r.client for r in queue.take(4)].count("busy") == 2


def test_clients_that_come_anew_without_end_starve_nobody_and_are_not_remembered():
    queue = Queue()
    queue.add("old")
    queue.end(*queue.take(1), 10)
    queue.add("new")
    waits = queue.add("old")
    behind = 0
    while waits in queue.waiting and behind < 20:
        queue.add(f"new {behind}")
        queue.end(*queue.take(1), 10)
        behind += 1
    assert behind <= 4
    for number in range(100):
        queue.add(f"newer {number}")
        queue.end(*queue.take(1), 10)
    assert len(queue.waiting._following) <= 5


def test_tokens_that_were_not_needed_are_not_charged():
    queue = Queue()
    for _ in range(3):
        queue.add("left early", limit=1000)
        queue.end(*queue.take(1), 3)
    queue.add("other", limit=10)
    queue.add("other", limit=10)
    mine = queue.add("left early", limit=1000)
    assert mine in queue.take(2)


def test_greater_priority_goes_first_but_not_for_ever():
    queue = Queue()
    lesser = queue.add("one", priority=-100)
    greater = [queue.add("two", priority=100)]
    while lesser in queue.waiting and len(greater) <= 2 * PATIENCE:
        greater.append(queue.add("two", priority=100))
        queue.take(1)
    assert len(greater) == PATIENCE + 2 and list(queue.waiting) == greater[-2:]


def test_requests_of_one_priority_overtake_nobody():
    queue = Queue()
    first = queue.add("one")
    queue.take(1)
    waits = queue.add("one", limit=10)
    for _ in range(5):
        queue.add("two", limit=1)
    queue.take(3)
    assert waits.overtaken == 0
    queue.waiting.put_back(first)  # preempted: its old turn
    assert queue.waiting.first is first
    queue.waiting.remove(first)
    assert first not in queue.waiting
