"""The static choices of a draft tree: which candidates are expanded, which are kept."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """A tree that follows the drafter's confidence (EAGLE-2); see `dynamic_tree`."""

    width: int
    depth: int
    draft_length: int
    beam: int

    @property
    def is_chain(self) -> bool:
        """Whether no node can have two children."""
        return self.width == 1

    @property
    def draft_depth(self) -> int:
        """Most draft tokens on one path of what is kept."""
        return min(self.depth, self.draft_length)

    def frontier_length(self, depth: int) -> int:
        """How many of the candidates at `depth` (1 = below the anchor) are expanded."""
        generated = self.width if depth == 1 else self.frontier_length(depth - 1) * self.width
        return min(self.beam, generated)

    @property
    def generated(self) -> int:
        """Candidates of all depths together, from which `draft_length` are kept."""
        rows = [1, *(self.frontier_length(depth) for depth in range(1, self.depth))]
        return self.width * sum(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticTree:
    """A tree of one fixed shape (EAGLE); see `static_tree`."""

    paths: tuple[tuple[int, ...], ...]  # by length, then by rank: the order of the draft tokens

    @property
    def width(self) -> int:
        """Candidates wanted of an expanded node."""
        return 1 + max(path[-1] for path in self.paths)

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return len(self.paths[-1])

    @property
    def draft_depth(self) -> int:
        """As `depth`: all of it is kept."""
        return self.depth

    @property
    def draft_length(self) -> int:
        """Draft tokens."""
        return len(self.paths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.depth == self.draft_length

    def of_depth(self, depth: int) -> tuple[tuple[int, ...], ...]:
        """The paths of that length."""
        return tuple(path for path in self.paths if len(path) == depth)

    def frontier(self, depth: int) -> tuple[tuple[int, ...], ...]:
        """Those that go on; at depth 0 the anchor's."""
        inner = {path[:-1] for path in self.paths}
        return tuple(path for path in ((), *self.paths) if len(path) == depth and path in inner)

    def places(self, paths: Sequence[tuple[int, ...]]) -> list[int]:
        """Where paths of one length stand among the candidates of that depth: row by row, by rank."""
        rows = {path: row for row, path in enumerate(self.frontier(len(paths[0]) - 1))} if paths else {}
        return [rows[path[:-1]] * self.width + path[-1] for path in paths]


TreeShape = DynamicTree | StaticTree


def dynamic_tree(*, width: int, depth: int, draft_length: int, beam: int | None = None) -> DynamicTree:
    """A tree drafted by confidence, from which the best draft tokens are kept.

    Args:
      width: candidates of every expanded node (EAGLE: top-k).
      depth: most draft tokens on one path (EAGLE: steps).
      draft_length: draft tokens kept, the anchor not counted (EAGLE: the total of tokens, less one).
      beam: candidates expanded at each depth; None = width, as in EAGLE-2.

    Raises:
      ValueError: a size below 1, or more draft tokens than would be generated.

    Source: EAGLE-2 (arXiv 2406.16858), section 4.
    """
    beam = width if beam is None else beam
    for name, size in (("width", width), ("depth", depth), ("draft_length", draft_length), ("beam", beam)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}; a tree of width 1 is a chain")
    tree = DynamicTree(width=width, depth=depth, draft_length=draft_length, beam=beam)
    if draft_length > tree.generated:
        raise ValueError(
            f"draft_length: expected at most {tree.generated} (width {width}, depth {depth}, beam {beam}), got "
            f"{draft_length}; keep fewer draft tokens, or draft a wider or deeper tree"
        )
    return tree


def static_tree(paths: Sequence[Sequence[int]]) -> StaticTree:
    """A tree of a fixed shape.

    Args:
      paths: one per draft token, in any order: the ranks of the candidates from the anchor down to it, 0
        the best. [[0], [1], [0, 0]] are the two best tokens, and the best one after the best.

    Raises:
      ValueError: no path, an empty or repeated one, a negative rank, or one whose parent is missing.

    Source: EAGLE (arXiv 2401.15077), section 4.1.
    """
    listed = [tuple(path) for path in paths]
    if not listed:
        raise ValueError("paths: expected at least one path, got none; a chain of 2 is [[0], [0, 0]]")
    known = set(listed)
    for index, path in enumerate(listed):
        if not path:
            raise ValueError(
                f"paths[{index}]: expected at least one rank, got none; the anchor is there anyway"
            )
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise ValueError(f"paths[{index}]: expected ranks from 0 up, got {list(path)}; 0 is the best")
        if path in listed[:index]:
            raise ValueError(
                f"paths[{index}]: expected each path once, got {list(path)} again; remove one of them"
            )
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(
                f"paths[{index}]: expected {list(path[:-1])} among the paths too, since {list(path)} hangs on "
                f"it, got {len(listed)} paths without it; add it"
            )
    return StaticTree(paths=tuple(sorted(known, key=lambda path: (len(path), path))))


def parse_tree(text: str) -> DynamicTree:
    """A dynamic tree from "WIDTHxDEPTHxTOKENS": "10x6x60" keeps the best 60 of a tree of width 10 and depth 6.

    Raises:
      ValueError: something else, or sizes that `dynamic_tree` refuses.
    """
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(
            f'tree: expected "WIDTHxDEPTHxTOKENS", got {text!r}; for instance "10x6x60", or leave it out'
        )
    width, depth, draft_length = map(int, sizes)
    return dynamic_tree(width=width, depth=depth, draft_length=draft_length)


def chain_shape(draft_length: int) -> DynamicTree:
    """The tree of width 1: a chain of `draft_length` draft tokens."""
    return dynamic_tree(width=1, depth=draft_length, draft_length=draft_length)
