"""How the TPU kernel cuts its work: sizes that decide its code and its memory on the chip."""

import dataclasses

from pallas_kernels.registers import LANES

_SCORES = 2**16  # scores of one unrolled stretch of code: beyond that, code grows and nothing is gained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static sizes of one call."""

    queries: int  # of a lane taken at once
    rows: int  # queries times query heads per kv head: the rows of a product
    block_pages: int  # pages copied and used at once; two such blocks are on the chip
    keys: int  # in-flight keys taken at once: one register, because rows of masks are stored one by one
    # Kv heads whose code is interleaved, so that one's products hide another's softmax.
    context_heads: int
    in_flight_heads: int

    @classmethod
    def choose(
        cls,
        *,
        num_queries: int,
        lanes: int,
        max_queries: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        columns: int,
    ) -> "Tiling":
        """Sizes for these shapes.

        Lanes of one call may be uneven: tiles follow the mean, so that a chunk beside chains is cut
        instead of chains being padded to the chunk.
        """
        group = heads // kv_heads
        mean = -(-num_queries // lanes)
        queries = max(1, min(max_queries, max(mean, 8), max(1, 256 // group)))
        rows = queries * group
        tokens = 512 if rows <= 64 else 256 if rows <= 128 else 128
        block_pages = max(1, min(tokens // page_size, columns))
        context_heads = _divisor(kv_heads, _SCORES // (rows * block_pages * page_size))
        return cls(
            queries=queries,
            rows=rows,
            block_pages=block_pages,
            keys=LANES,
            context_heads=context_heads,
            in_flight_heads=_divisor(kv_heads, min(4, _SCORES // 2 // (rows * LANES))),
        )


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most so much."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)
