"""Servers on a table of 8 words: one that tests of a module share, and engines for others."""

from collections.abc import Iterator

import pytest
from contract.engines import engine
from contract.words import words_tokenizer
from served import Brake, Served, serving, until

from jspec_serve.commands.serve import warm_up


@pytest.fixture(scope="session")
def engines():
    """Engines whose programs are compiled; a server that has ended leaves its engine to the next."""
    return {"oracle": engine("oracle", tokenizer=words_tokenizer(), eos_ids=(), max_slots=3)}


@pytest.fixture(scope="module")
def served(engines) -> Iterator[Served]:
    """A server that tests of a module share."""
    warm_up(engines["oracle"])
    with serving(engines["oracle"]) as one:
        yield one


@pytest.fixture
def braked(served) -> Iterator[Brake]:
    """The shared server's brake. Nothing runs at first: what another test left would count as this one's."""
    until(lambda: served.service.thread.unfinished == 0)
    yield served.brake
    served.brake.release()
