"""Pages of committed tokens that later texts with the same beginning read instead of executing it again.

A tree over token ids, one page below the other: the path from the root spells a text. A page's key is its
tokens and the one after them, because an EAGLE drafter keeps the pair (feature t, token t + 1) at index t. So
texts that agree in their first c tokens share (c - 1) // page_size pages, whatever the drafter: a page is lost
only where they part exactly at its end.

Only whole pages are shared, and a request executes at least its last known token. So it writes to pages of its
own alone; the state that drafters keep in pages comes with the target's, since they follow its page table.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jspec.pages import PagePool, Reservation


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class SharedPage:
    """One page of a text, in every layer group."""

    key: tuple[int, ...]  # its tokens and the next one
    pages: tuple[int, ...]  # one of each group
    parent: "SharedPage | None"  # None = it is the root, which stands for the empty text
    children: dict[tuple[int, ...], "SharedPage"] = dataclasses.field(default_factory=dict)
    num_leases: int = 0  # requests that hold it; they hold those above it, too
    forgotten: bool = False  # not in the tree any more: freed when nobody holds it


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Lease:
    """What a running request holds."""

    reservation: Reservation  # its pages in the order of its text, those of others first
    start: int  # tokens that were in the tree when it came
    last: SharedPage  # of its text in the tree; it holds all those above, too
    depth: int  # how many that are
    lent: set[int]  # columns whose pages are the tree's, not its own


class PrefixCache:
    """The pages of a pool: free, a request's own, or in the tree.

    A page in the tree that nobody holds counts as free. It is evicted when a request needs it, the least
    recently used first and the end of a text before its beginning.
    """

    def __init__(self, pool: PagePool, *, enabled: bool):
        """Starts with an empty tree.

        Args:
          pool: no one else takes pages from it.
          enabled: False = nothing is ever shared. True needs a pool without rings.
        """
        assert pool.keeps_whole_context or not enabled
        self.pool, self.enabled = pool, enabled
        self._root = SharedPage(key=(), pages=(), parent=None)
        # Those that nobody holds, a text's end before its beginning: the first one is always a leaf.
        self._idle: collections.OrderedDict[SharedPage, None] = collections.OrderedDict()

    def reserve(self, text: Sequence[int], tokens: int, *, reuse: bool = True) -> Lease | None:
        """Takes all the pages that a request can ever need, those of its beginning from the tree.

        Args:
          text: known tokens; at least the last of them is not taken from the tree.
          tokens: that the text will never exceed.
          reuse: False = take none from the tree: the request needs what their execution tells.

        Returns:
          None if there are too few pages now; nothing has changed then.
        """
        path = self._match(text) if reuse else []
        if not self._has_room(path, tokens, ()):
            return None
        for shared in path:
            self._hold(shared)
        counts = tuple(need - len(path) for need in self.pool.needed(tokens))
        while (own := self.pool.take(counts)) is None:
            self._evict()
        groups = tuple((*(shared.pages[group] for shared in path), *fresh) for group, fresh in enumerate(own))
        return Lease(
            reservation=Reservation(pages=groups),
            start=len(path) * self.pool.page_size,
            last=path[-1] if path else self._root,
            depth=len(path),
            lent=set(range(len(path))),
        )

    def has_room(
        self, text: Sequence[int], tokens: int, without: Sequence[Lease] = (), *, reuse: bool = True
    ) -> bool:
        """Whether `reserve` would succeed, had the leases `without` been released."""
        return self._has_room(self._match(text) if reuse else [], tokens, without)

    def unpublished(self, lease: Lease, committed: int, known: int) -> int:
        """Pages of a request that can be published: whole ones whose next token is known.

        Args:
          lease: the request's.
          committed: tokens in the cache.
          known: tokens of the text, which a stop may have cut to fewer.
        """
        if not self.enabled or lease.last.forgotten:
            return 0
        return max(min(committed, known - 1) // self.pool.page_size - lease.depth, 0)

    def publish(self, lease: Lease, committed: int, text: Sequence[int]) -> None:
        """Puts the pages that a request has filled into the tree. Those that are there already stay its own.

        Args:
          lease: the request's.
          committed: tokens in the cache, of rounds that the device has been given.
          text: the request's, without what a stop cut off.
        """
        for _ in range(self.unpublished(lease, committed, len(text))):
            key, above = self._key(text, lease.depth), lease.last
            shared = above.children.get(key)
            if shared is None:
                pages = tuple(group[lease.depth] for group in lease.reservation.pages)
                shared = above.children[key] = SharedPage(key=key, pages=pages, parent=above, num_leases=1)
                lease.lent.add(lease.depth)
            else:
                self._hold(shared)
            lease.last, lease.depth = shared, lease.depth + 1

    def release(self, lease: Lease) -> None:
        """Ends a lease: frees the request's own pages, and what it held of the tree if no other does."""
        self.pool.give_back(_own(lease))
        for shared in _up(lease.last):
            shared.num_leases -= 1
            assert shared.num_leases >= 0
            if shared.num_leases == 0:
                if shared.forgotten:
                    self._free(shared)
                else:
                    self._idle[shared] = None

    def forget(self, lease: Lease) -> None:
        """Takes all texts that begin as a request's out of the tree: what it computed cannot be trusted.

        What requests hold is freed when they end.
        """
        for shared in _up(lease.last):
            if shared.parent is self._root and not shared.forgotten:
                self._forget(shared)

    def clear(self) -> None:
        """Takes all texts out of the tree: the weights have changed."""
        for shared in tuple(self._root.children.values()):
            self._forget(shared)
        # So that running requests, whose pages the old weights filled, publish nothing more.
        self._root.forgotten = True
        self._root = SharedPage(key=(), pages=(), parent=None)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages per group that a request could get now."""
        return tuple(free + len(self._idle) for free in self.pool.free_pages)

    @property
    def num_shared(self) -> int:
        """Pages per group in the tree, held or not."""
        return sum(1 for _ in _with_those_below(self._root.children.values()))

    def _key(self, text: Sequence[int], column: int) -> tuple[int, ...]:
        start = column * self.pool.page_size
        return tuple(text[start : start + self.pool.page_size + 1])

    def _match(self, text: Sequence[int]) -> list[SharedPage]:
        """The longest beginning of the text that is in the tree.

        A key holds one more token than its page, so the last token of the text is never covered.
        """
        path, children = [], self._root.children
        while (shared := children.get(self._key(text, len(path)))) is not None:
            path.append(shared)
            children = shared.children
        return path

    def _has_room(self, path: Sequence[SharedPage], tokens: int, without: Sequence[Lease]) -> bool:
        matched = set(path)
        spare = len(self._idle) - sum(shared in self._idle for shared in path)
        released = collections.Counter(shared for lease in without for shared in _up(lease.last))
        spare += sum(
            times == shared.num_leases for shared, times in released.items() if shared not in matched
        )
        own = [_own(lease) for lease in without]
        return all(
            need - len(path) <= free + spare + sum(len(groups[index]) for groups in own)
            for index, (need, free) in enumerate(
                zip(self.pool.needed(tokens), self.pool.free_pages, strict=True)
            )
        )

    def _hold(self, shared: SharedPage) -> None:
        if shared.num_leases == 0:
            del self._idle[shared]
        shared.num_leases += 1

    def _evict(self) -> None:
        shared, _ = self._idle.popitem(last=False)
        assert shared.parent is not None and not shared.children
        del shared.parent.children[shared.key]
        self._free(shared)

    def _forget(self, top: SharedPage) -> None:
        assert top.parent is not None
        del top.parent.children[top.key]
        for shared in _with_those_below([top]):
            shared.forgotten = True
            if shared.num_leases == 0:
                del self._idle[shared]
                self._free(shared)

    def _free(self, shared: SharedPage) -> None:
        self.pool.give_back([[page] for page in shared.pages])


def _up(shared: SharedPage) -> Iterator[SharedPage]:
    """The page and those above it, without the root."""
    while shared.parent is not None:
        yield shared
        shared = shared.parent


def _with_those_below(top: Iterable[SharedPage]) -> Iterator[SharedPage]:
    waiting = list(top)
    while waiting:
        shared = waiting.pop()
        waiting.extend(shared.children.values())
        yield shared


def _own(lease: Lease) -> list[list[int]]:
    """Pages of each group that are not the tree's."""
    return [
        [page for column, page in enumerate(pages) if column not in lease.lent]
        for pages in lease.reservation.pages
    ]
