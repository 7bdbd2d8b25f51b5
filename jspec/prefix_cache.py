"""Pages of committed tokens that later texts with the same beginning read instead of executing it again.

A tree over token ids, one node per page: the path from the root spells a text. A page's key is its tokens and
the one after them, because an EAGLE drafter keeps the pair (feature t, token t + 1) at index t. So texts that
agree in their first c tokens share (c - 1) // page_size pages, whatever the drafter: a page is lost only where
they part exactly at its end.

Only whole pages are shared, and a request executes at least its last known token. So it writes to pages of its
own alone; the state that drafters keep in pages comes with the target's, since they follow its page table.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from jspec.pages import PagePool, Reservation


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Node:
    """One page of a text, in every layer group."""

    key: tuple[int, ...]  # its tokens and the next one
    pages: tuple[int, ...]  # one of each group
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)
    num_leases: int = 0  # requests that hold it; they hold its ancestors, too
    forgotten: bool = False  # not in the tree any more: freed when nobody holds it


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class Lease:
    """What a running request holds."""

    reservation: Reservation  # its pages in the order of its text, those of others first
    start: int  # tokens that were in the tree when it came
    node: Node  # the deepest one of its text; all on the path to it are held
    depth: int  # pages on that path
    lent: set[int]  # columns whose pages are the tree's, not its own


class PrefixCache:
    """The pages of a pool: free, held by a request, or in the tree.

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
        self._root = _root()
        # Nodes that nobody holds, a text's end before its beginning: evicting from the front meets leaves only.
        self._idle: collections.OrderedDict[Node, None] = collections.OrderedDict()

    def reserve(self, text: Sequence[int], tokens: int) -> Lease | None:
        """Takes all the pages that a request can ever need, those of its beginning from the tree.

        Args:
          text: known tokens; at least the last of them is not taken from the tree.
          tokens: that the text will never exceed.

        Returns:
          None if there are too few pages now; nothing has changed then.
        """
        path = self._match(text)
        if not self._has_room(path, tokens, ()):
            return None
        self._hold(path[-1])
        depth = len(path) - 1
        counts = tuple(need - depth for need in self.pool.needed(tokens))
        while (own := self.pool.take(counts)) is None:
            self._evict()
        held = zip(*(node.pages for node in path[1:]), strict=True) if depth else ((),) * len(own)
        pages = tuple((*shared, *fresh) for shared, fresh in zip(held, own, strict=True))
        return Lease(
            reservation=Reservation(pages=pages),
            start=depth * self.pool.page_size,
            node=path[-1],
            depth=depth,
            lent=set(range(depth)),
        )

    def has_room(self, text: Sequence[int], tokens: int, without: Sequence[Lease] = ()) -> bool:
        """Whether `reserve` would succeed, had the leases `without` been released."""
        return self._has_room(self._match(text), tokens, without)

    def unpublished(self, lease: Lease, committed: int, known: int) -> int:
        """Pages of a request that can be published: whole ones whose next token is known.

        Args:
          lease: the request's.
          committed: tokens in the cache.
          known: tokens of the text, which a stop may have cut to fewer.
        """
        if not self.enabled or lease.node.forgotten:
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
            key, node = self._key(text, lease.depth), lease.node
            child = node.children.get(key)
            if child is None:
                pages = tuple(group[lease.depth] for group in lease.reservation.pages)
                child = node.children[key] = Node(key=key, pages=pages, parent=node)
                lease.lent.add(lease.depth)
            elif child.num_leases == 0:
                del self._idle[child]
            child.num_leases += 1
            lease.node, lease.depth = child, lease.depth + 1

    def release(self, lease: Lease) -> None:
        """Ends a lease: frees the request's own pages, and what it held of the tree if no other does."""
        self.pool.give_back(_own(lease))
        for node in _up(lease.node):
            node.num_leases -= 1
            assert node.num_leases >= 0
            if node.num_leases == 0:
                if node.forgotten:
                    self.pool.give_back([[page] for page in node.pages])
                else:
                    self._idle[node] = None

    def clear(self) -> None:
        """Forgets all texts: the weights have changed. What requests hold is freed when they end."""
        for node in _below(self._root):
            node.forgotten = True
            if node.num_leases == 0:
                self.pool.give_back([[page] for page in node.pages])
        self._root.forgotten = True
        self._root = _root()
        self._idle.clear()

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages per group that a request could get now."""
        return tuple(free + len(self._idle) for free in self.pool.free_pages)

    @property
    def num_nodes(self) -> int:
        """Pages in the tree, held or not."""
        return sum(1 for _ in _below(self._root))

    def _key(self, text: Sequence[int], column: int) -> tuple[int, ...]:
        start = column * self.pool.page_size
        return tuple(text[start : start + self.pool.page_size + 1])

    def _match(self, text: Sequence[int]) -> list[Node]:
        """The root, and the nodes of the longest beginning of the text that is in the tree."""
        path = [self._root]
        # A key holds one more token than its page, so the last token of the text is never covered.
        while (child := path[-1].children.get(self._key(text, len(path) - 1))) is not None:
            path.append(child)
        return path

    def _has_room(self, path: Sequence[Node], tokens: int, without: Sequence[Lease]) -> bool:
        matched = set(path)
        released = collections.Counter(node for lease in without for node in _up(lease.node))
        spare = len(self._idle) - sum(node in self._idle for node in path)
        spare += sum(times == node.num_leases and node not in matched for node, times in released.items())
        owned = [_own(lease) for lease in without]
        return all(
            need - (len(path) - 1) <= free + spare + sum(len(pages[group]) for pages in owned)
            for group, (need, free) in enumerate(
                zip(self.pool.needed(tokens), self.pool.free_pages, strict=True)
            )
        )

    def _hold(self, deepest: Node) -> None:
        for node in _up(deepest):
            if node.num_leases == 0:
                del self._idle[node]
            node.num_leases += 1

    def _evict(self) -> None:
        node, _ = self._idle.popitem(last=False)
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        self.pool.give_back([[page] for page in node.pages])


def _root() -> Node:
    return Node(key=(), pages=(), parent=None)


def _up(node: Node) -> Iterator[Node]:
    """The node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _below(node: Node) -> Iterator[Node]:
    """All descendants."""
    waiting = list(node.children.values())
    while waiting:
        child = waiting.pop()
        waiting.extend(child.children.values())
        yield child


def _own(lease: Lease) -> list[list[int]]:
    """Pages of each group that are not the tree's."""
    return [
        [page for column, page in enumerate(pages) if column not in lease.lent]
        for pages in lease.reservation.pages
    ]
