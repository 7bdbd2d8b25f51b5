import pytest
from contract.engines import engine

from jspec.drafters.ngram import ngram
from jspec.loading import resolve_drafter, with_drafter


def test_second_engine_has_the_sizes_of_the_first():
    first = engine(
        "plain", max_slots=3, max_context=30, page_size=5, cache_tokens=40, chunks=(3, 6), max_stop_ids=2
    )
    second = with_drafter(first, "ngram", draft_length=2)
    assert second.free_pages == first.free_pages == (8,)
    assert (second.page_size, second.cache_tokens, second.ladder.chunks) == (5, 40, (3, 6))
    assert (second.max_slots, second.max_context, second.max_stop_ids) == (3, 30, 2)
    assert second.method.drafter.draft_length == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plain", (), 3), 'draft_length: expected None with drafter "plain", got 3'),
        ((ngram(), (), 3), "draft_length: expected None with a Drafter object"),
        (("ngram", (1.0,), None), "drafter_params: expected none with drafter 'ngram', got tuple"),
    ],
)
def test_arguments_that_a_drafter_has_no_use_for_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_drafter(*arguments, "float32", None)
