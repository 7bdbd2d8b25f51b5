"""Static shapes: the only thing that decides which compiled program runs."""

import dataclasses
from collections.abc import Sequence

# Prompt tokens of rounds that decode besides, where they are asked for without a number: a running request waits
# so long for its next token, and a prompt's first one comes later the shorter they are.
MIXED_CHUNKS = (31, 127)


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """The shape of a round. Real sizes are padded up to it; padding is explicit and inert."""

    lanes: int
    nodes: int  # nodes whose logits are needed: one per lane, plus draft tokens
    chunk: int  # prompt tokens executed besides, without logits

    @property
    def budget(self) -> int:
        """Draft tokens that there is room for, over all lanes."""
        return self.nodes - self.lanes

    def width(self, draft_length: int) -> int:
        """Most nodes that one lane can have: its anchor, the draft tokens there is room for, a chunk."""
        return 1 + min(self.budget, draft_length) + self.chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The buckets that an engine may use, smallest first in each direction.

    Args:
      max_slots: most requests that run together.
      draft_length: draft tokens per lane at most.
      chunks: prompt tokens per prefill round, ascending.
      mixed_chunks: prompt tokens of a round that decodes besides, ascending; empty = there are no such rounds.

    Raises:
      ValueError: chunks out of order, or a mixed one beyond the longest.
    """

    max_slots: int
    draft_length: int
    chunks: tuple[int, ...]
    mixed_chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        chunks, mixed = self.chunks, self.mixed_chunks
        if not chunks or list(chunks) != sorted(set(chunks)) or chunks[0] < 1:
            raise ValueError(f"chunks: expected ascending positive sizes, got {chunks}; sort them")
        if list(mixed) != sorted(set(mixed)) or not all(1 <= size <= chunks[-1] for size in mixed):
            raise ValueError(
                f"mixed_chunks: expected ascending sizes from 1 to {chunks[-1]}, the longest of chunks, got {mixed}; "
                "sort them, or leave them out"
            )

    def lanes(self, count: int) -> int:
        """Smallest power of two that holds `count` lanes, or max_slots."""
        if not 1 <= count <= self.max_slots:
            raise ValueError(
                f"lanes: expected 1 to {self.max_slots}, got {count}; raise max_slots or send fewer requests"
            )
        return min(1 << (count - 1).bit_length(), self.max_slots)

    def decode(self, count: int, drafts: Sequence[int]) -> Bucket:
        """The bucket for `count` decoding lanes that will propose `drafts` tokens each.

        Without a draft token it is the plain step. Otherwise lanes get room for 3, 7, 15, ... draft
        tokens: on every machine measured so far 2 to 4 nodes cost about the same, so finer steps
        would only buy more programs.
        """
        lanes = self.lanes(count)
        total = sum(drafts)
        if total == 0:
            return Bucket(lanes=lanes, nodes=lanes, chunk=0)
        width = 4
        while lanes * (width - 1) < total:
            width *= 2
        return Bucket(lanes=lanes, nodes=lanes * min(width, self.draft_length + 1), chunk=0)

    def scheduled(self, count: int) -> tuple[Bucket, ...]:
        """The buckets that a schedule may choose from for `count` decoding lanes, ascending, plain first.

        Nodes grow by a half or less at a time: what a budget needs is never much less than what it gets.
        """
        lanes = self.lanes(count)
        most, halves = self.draft_length + 1, [2]
        while halves[-1] < 2 * most:
            step = 1 << (halves[-1].bit_length() - 2)  # 2, 3, 4, 6, 8, 12, 16, ...
            halves.append(halves[-1] + step)
        nodes = sorted({lanes * min(half, 2 * most) // 2 for half in halves})
        return tuple(Bucket(lanes=lanes, nodes=count, chunk=0) for count in nodes)

    def prefill(self, remaining: int) -> Bucket:
        """The bucket for one lane with `remaining` prompt tokens to execute (the last one is a node)."""
        return Bucket(lanes=1, nodes=1, chunk=_smallest(self.chunks, remaining - 1))

    def mixed(self, remaining: int, drafts: Sequence[int]) -> Bucket:
        """The bucket for a prompt's chunk beside decoding lanes that will propose `drafts` tokens each.

        It always has all lanes, since an empty one costs next to nothing beside a chunk, and room for no draft
        token or for a multiple of the lanes that doubles: a program is needed for each of few sizes.

        Args:
          remaining: tokens of the prompt to execute (the last one is a node).
          drafts: of the other lanes.

        Raises:
          ValueError: there are no such rounds.
        """
        if not self.mixed_chunks:
            raise ValueError("mixed: expected mixed_chunks, got none; make the engine with some")
        nodes, total = self.max_slots, sum(drafts)
        while nodes < self.max_slots + total:
            nodes *= 2
        return Bucket(
            lanes=self.max_slots,
            nodes=min(nodes, self.max_slots * (1 + self.draft_length)),
            chunk=_smallest(self.mixed_chunks, remaining - 1),
        )

    def every_mixed(self, length: int) -> set[Bucket]:
        """All buckets that `mixed` can give while a prompt of that length is executed."""
        most = (self.max_slots - 1) * self.draft_length
        return {
            self.mixed(min(chunk + 1, length), [drafts])
            for chunk in self.mixed_chunks
            for drafts in range(most + 1)
        }


def _smallest(chunks: Sequence[int], tokens: int) -> int:
    """The smallest chunk that holds so many tokens, or the largest one."""
    return next((chunk for chunk in chunks if tokens <= chunk), chunks[-1])
