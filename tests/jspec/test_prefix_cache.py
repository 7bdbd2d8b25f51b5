"""The tree of shared pages: who gets what, what is evicted, and that every page is somewhere."""

import random

import pytest

from jspec.cache import GroupLayout
from jspec.pages import PagePool
from jspec.prefix_cache import Lease, PrefixCache, SharedPage

FULL = GroupLayout(num_layers=1, num_kv_heads=1, head_size=4)
WINDOW = GroupLayout(num_layers=1, num_kv_heads=1, head_size=4, window=6)
PAGE = 4


def cache(pages: int = 12, slots: int = 3, layouts=(FULL,), **options) -> PrefixCache:
    pool = PagePool(
        layouts,
        page_size=PAGE,
        max_context=40,
        max_commit=8,
        max_slots=slots,
        total_tokens=pages * PAGE,
        rings=False,
    )
    return PrefixCache(pool, **{"enabled": True, **options})


def run(prefixes: PrefixCache, text: list[int], *, limit: int | None = None) -> Lease:
    """A request that executes its whole text but the last token, and goes."""
    lease = prefixes.reserve(text, limit or len(text))
    assert lease is not None
    prefixes.publish(lease, len(text) - 1, text)
    prefixes.release(lease)
    return lease


def shared(prefixes: PrefixCache) -> list[SharedPage]:
    found = [prefixes._root]
    for page in found:
        found.extend(page.children.values())
    return found[1:]


def check(prefixes: PrefixCache, leases: list[Lease]) -> None:
    """Every page is at one place, and every count is right."""
    tree = shared(prefixes)
    for group in range(len(prefixes.pool.num_pages)):
        own = [p for lease in leases for p in _own(lease, group)]
        everywhere = [*prefixes.pool._free[group], *(page.pages[group] for page in tree), *own]
        assert sorted(everywhere) == list(range(prefixes.pool.num_pages[group]))
    held: dict[SharedPage, int] = {}
    for lease in leases:
        page, depth = lease.last, 0
        while page.parent is not None:
            held[page] = held.get(page, 0) + 1
            page, depth = page.parent, depth + 1
        assert depth == lease.depth
    for page in tree:
        assert page.num_leases == held.get(page, 0)
        assert (page in prefixes._idle) == (page.num_leases == 0)


def _own(lease: Lease, group: int) -> list[int]:
    return [p for column, p in enumerate(lease.reservation.pages[group]) if column not in lease.lent]


@pytest.mark.parametrize("length", range(1, 18))
def test_a_repeated_text_shares_every_page_that_ends_before_its_last_token(length):
    prefixes, text = cache(), list(range(length))
    first = run(prefixes, text)
    again = prefixes.reserve(text, length)
    assert again.start == (length - 1) // PAGE * PAGE
    pages = again.start // PAGE
    assert again.reservation.pages[0][:pages] == first.reservation.pages[0][:pages]
    assert len(again.reservation.pages[0]) == -(-length // PAGE)


@pytest.mark.parametrize("common", range(0, 14))
def test_texts_share_the_pages_whose_next_token_they_share(common):
    prefixes = cache()
    run(prefixes, list(range(13)))
    lease = prefixes.reserve([*range(common), *[99] * (14 - common)], 14)
    assert lease.start == max(common - 1, 0) // PAGE * PAGE


def test_nothing_past_a_cut_is_published():
    prefixes, text = cache(), list(range(12))
    lease = prefixes.reserve(text[:5], 30)
    # The device has committed 11 tokens, but a stop string cut the text to 8.
    prefixes.publish(lease, 11, text[:8])
    assert lease.depth == 1
    prefixes.publish(lease, 11, text[:9])
    assert lease.depth == 2


def test_what_is_not_committed_is_not_published():
    prefixes, text = cache(), list(range(12))
    lease = prefixes.reserve(text, 30)
    prefixes.publish(lease, 7, text)
    assert (lease.depth, prefixes.num_shared) == (1, 1)


def test_no_page_of_the_tree_is_written_by_the_request_that_took_it():
    prefixes = cache()
    run(prefixes, list(range(9)))
    lease = prefixes.reserve(list(range(9)), 20)
    written = lease.reservation.pages[0][lease.start // PAGE :]
    assert not {page.pages[0] for page in shared(prefixes)} & set(written)


def test_the_same_page_by_two_requests_stays_with_both_and_what_follows_is_found():
    prefixes, text = cache(), list(range(14))
    first, second = (prefixes.reserve(text[:9], 20) for _ in range(2))
    prefixes.publish(first, 8, text[:9])
    prefixes.publish(second, 13, text)  # pages 0 and 1 are there, 2 is new
    check(prefixes, [first, second])
    assert prefixes.num_shared == 3 and len(_own(second, 0)) == 4
    for lease in (first, second):
        prefixes.release(lease)
    check(prefixes, [])
    assert prefixes.reserve(text, 14).start == 12
    assert prefixes.free_pages == (12 - 4,)


def test_the_least_recently_used_end_is_evicted_first():
    prefixes = cache(pages=6)
    old, new = [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 9, 9, 9, 9]
    run(prefixes, old)
    run(prefixes, new)  # shares page 0
    run(prefixes, old)
    assert prefixes.num_shared == 3
    lease = prefixes.reserve([7] * 3, 4 * PAGE)  # 3 free pages, and one more
    check(prefixes, [lease])
    assert prefixes.num_shared == 2
    prefixes.release(lease)
    assert prefixes.reserve(old, 9).start == 2 * PAGE


def test_held_pages_are_not_evicted_and_a_refusal_changes_nothing():
    prefixes = cache(pages=4)
    text = list(range(9))
    run(prefixes, text)
    lease = prefixes.reserve(text, 12)  # 2 pages of the tree, 1 of its own
    assert prefixes.free_pages == (1,)
    before = shared(prefixes)
    assert prefixes.reserve([5] * 3, 2 * PAGE) is None
    check(prefixes, [lease])
    assert shared(prefixes) == before
    assert not prefixes.has_room([5] * 3, 2 * PAGE)
    assert prefixes.has_room([5] * 3, 2 * PAGE, [lease])
    # Of a text that shares them, the same pages are no room.
    assert not prefixes.has_room([*text, 1], 4 * PAGE + 1, [lease])
    assert prefixes.has_room([*text, 1], 4 * PAGE, [lease])


def test_forgotten_pages_are_freed_when_nobody_holds_them():
    prefixes, text = cache(), list(range(9))
    run(prefixes, text)
    lease = prefixes.reserve(text, 20)
    prefixes.clear()
    assert prefixes.reserve(text, 9).start == 0
    prefixes.publish(lease, 12, list(range(13)))
    assert prefixes.num_shared == 0
    prefixes.release(lease)
    assert prefixes.free_pages == (12 - 3,)


def test_what_a_broken_request_shares_with_others_is_forgotten():
    prefixes, text, other = cache(), list(range(9)), [9] * 9
    for one in (text, other):
        run(prefixes, one)
    broken, beside = prefixes.reserve(text, 9), prefixes.reserve([*text[:5], 9], 9)
    prefixes.forget(broken)
    assert prefixes.reserve(text, 9).start == 0
    prefixes.publish(beside, 8, [*text[:5], *[9] * 4])
    prefixes.forget(beside)  # it, too, broke: nothing is left to forget
    assert prefixes.num_shared == 2  # of the other text
    prefixes.release(broken)
    prefixes.release(beside)
    assert prefixes.free_pages == (12 - 3,)
    assert prefixes.reserve(other, 9).start == 8


def test_all_groups_share_and_evict_together():
    prefixes = cache(layouts=(FULL, WINDOW))
    assert prefixes.pool.keeps_whole_context
    first = run(prefixes, list(range(9)))
    lease = prefixes.reserve(list(range(9)), 9)
    for group in range(2):
        assert lease.reservation.pages[group][:2] == first.reservation.pages[group][:2]
    check(prefixes, [lease])


def test_rings_are_never_shared():
    pool = PagePool((FULL, WINDOW), page_size=PAGE, max_context=40, max_commit=8, max_slots=3)
    assert not pool.keeps_whole_context
    with pytest.raises(AssertionError):
        PrefixCache(pool, enabled=True)
    prefixes, text = PrefixCache(pool, enabled=False), list(range(9))
    run(prefixes, text)
    assert (prefixes.reserve(text, 9).start, prefixes.num_shared) == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_every_page_is_somewhere_after_any_history(seed):
    rng, leases, lease_texts = random.Random(seed), [], {}
    prefixes = cache(pages=20, slots=6, layouts=(FULL, WINDOW))
    for step in range(600):
        action = rng.random()
        if action < 0.45:
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            limit = len(text) + rng.randrange(1, 16)
            had_room = prefixes.has_room(text, limit)
            lease = prefixes.reserve(text, limit)
            assert (lease is not None) == had_room
            if lease is not None:
                leases.append(lease)
                lease_texts[lease] = (text, limit)
        elif action < 0.8 and leases:
            lease = rng.choice(leases)
            text, limit = lease_texts[lease]
            text += [rng.randrange(2) for _ in range(rng.randrange(min(5, limit - len(text) + 1)))]
            prefixes.publish(lease, rng.randrange(len(text)), text)
        elif action < 0.98 and leases:
            prefixes.release(leases.pop(rng.randrange(len(leases))))
        elif action >= 0.99:
            for lease in leases:
                prefixes.release(lease)
            leases.clear()
            prefixes.clear()
        if step % 10 == 0:
            check(prefixes, leases)
    for lease in leases:
        prefixes.release(lease)
    check(prefixes, [])
    assert prefixes.free_pages == prefixes.pool.num_pages
