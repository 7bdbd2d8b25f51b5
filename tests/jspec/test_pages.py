import numpy as np

from jspec.cache import GroupLayout
from jspec.pages import PagePool

FULL = GroupLayout(num_layers=1, num_kv_heads=1, head_size=4)
WINDOW = GroupLayout(num_layers=1, num_kv_heads=1, head_size=4, window=6)


def pool(**changes):
    options = dict(page_size=4, max_context=40, max_commit=8, max_slots=3)
    return PagePool((FULL, WINDOW), **{**options, **changes})


def test_request_gets_pages_for_its_whole_life():
    reservation = pool().reserve(17)
    assert [len(pages) for pages in reservation.pages] == [5, 2]


def test_window_group_repeats_a_ring_that_holds_window_and_commit():
    p = pool()
    rows = p.table_rows(p.reserve(40))
    ring = len(set(rows[1].tolist()))
    assert ring * 4 >= max(6, 8)
    np.testing.assert_array_equal(rows[1], np.resize(rows[1][:ring], 10))


def test_pages_are_never_shared_and_all_come_back():
    p = pool()
    taken = [p.reserve(40) for _ in range(3)]
    assert p.reserve(1) is None
    for group in range(2):
        pages = [page for r in taken for page in r.pages[group]]
        assert len(pages) == len(set(pages))
    for r in taken:
        p.release(r)
    assert p.free_pages == p.num_pages


def test_refused_reservation_takes_nothing():
    p = pool(total_tokens=16)
    assert not p.can_ever_hold(17)
    first = p.reserve(12)
    free = p.free_pages
    assert p.reserve(8) is None
    assert p.free_pages == free
    p.release(first)
