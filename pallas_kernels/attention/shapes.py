"""Named shapes of `attend`: what tests and benchmarks run, so that their numbers can be compared."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One call: every lane has the same number of nodes and the same context."""

    lanes: int
    nodes: int  # per lane; they are queries and in-flight keys
    context: int  # committed tokens per lane
    capacity: int = 2048  # tokens that a lane's page table can name
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    page_size: int = 256


# SmolLM2-135M's attention: 30 layers of this make a step.
DECODE: dict[str, AttentionShape] = {
    "decode": AttentionShape(lanes=1, nodes=1, context=200),
    "decode, long": AttentionShape(lanes=1, nodes=1, context=1000),
    "chain of 2": AttentionShape(lanes=1, nodes=2, context=200),
    "chain of 4": AttentionShape(lanes=1, nodes=4, context=200),
    "chain of 8": AttentionShape(lanes=1, nodes=8, context=200),
    "chain of 8, long": AttentionShape(lanes=1, nodes=8, context=1000),
    "4 lanes of 4": AttentionShape(lanes=4, nodes=4, context=200),
}

PREFILL: dict[str, AttentionShape] = {
    "first chunk": AttentionShape(lanes=1, nodes=256, context=0),
    "late chunk": AttentionShape(lanes=1, nodes=256, context=1500),
}
