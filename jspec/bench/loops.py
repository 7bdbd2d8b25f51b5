"""Text that is stuck: it repeats itself for ever, and any drafter looks fast on it."""

from collections.abc import Sequence


def loop_period(
    token_ids: Sequence[int], *, repeats: int = 4, longest: int = 24, least: int = 24
) -> int | None:
    """Period of the loop at the end of a text, or None if it does not end in one.

    A text is stuck if its tail is the same 1 to `longest` tokens at least `repeats` times over and
    at least `least` tokens in all. Text that copies its prompt is not: it does not repeat itself.
    """
    count = len(token_ids)
    for period in range(1, longest + 1):
        tail = max(repeats * period, least)
        if tail <= count and all(
            token_ids[i] == token_ids[i - period] for i in range(count - tail + period, count)
        ):
            return period
    return None
