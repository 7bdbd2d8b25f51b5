"""Measured seconds of rounds by bucket, as `jspec profile` writes them and an engine reads them."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jspec.buckets import Bucket
from jspec.schedule.tables import AdditiveTable, StepTable, fit_additive, step_table, table_from_json

# A table whose repeats differ by more than this fraction of their median (`Cell.spread`) is not good to decide on.
MOST_SPREAD = 0.10


@runtime_checkable
class RoundCosts(Protocol):
    """What a schedule asks: how long a round in a bucket takes, drafting included."""

    def round_seconds(self, requests: int, bucket: Bucket, context: int) -> float:
        """Of a decode round.

        Args:
          requests: lanes in use.
          bucket: without draft tokens it is the plain round, which does not draft either.
          context: committed tokens over all lanes.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of round, measured."""

    lanes: int
    nodes: int  # equal to lanes: the plain round
    chunk: int
    context: int  # committed tokens per lane
    seconds: float  # median over the repeats
    spread: float  # of the repeats: the middle half of them lies within this share of their median

    @property
    def noisy(self) -> bool:
        """Whether it is too uncertain to decide on."""
        return not self.spread <= MOST_SPREAD  # NaN is


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The cells of one machine, target and drafter.

    Raises:
      ValueError: no cell, two of the same kind, or a value that is not positive.
    """

    hardware: str
    target: str
    drafter: str
    draft_length: int
    dtype: str
    cells: tuple[Cell, ...]
    context_seconds: float = 0.0  # per committed token of any lane, beyond the cell's own context

    def __post_init__(self) -> None:
        kinds = [(c.lanes, c.nodes, c.chunk, c.context) for c in self.cells]
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(
                f"cells: expected at least one, and one per kind of round, got {kinds}; profile again"
            )
        for cell in self.cells:
            positive = math.isfinite(cell.seconds) and cell.seconds > 0
            if not positive or not 1 <= cell.lanes <= cell.nodes or min(cell.chunk, cell.context) < 0:
                raise ValueError(
                    f"cells: expected positive seconds and at least one node per lane, got {cell}; profile again"
                )
        if not (math.isfinite(self.context_seconds) and self.context_seconds >= 0):
            raise ValueError(
                f"context_seconds: expected a number from 0 on, got {self.context_seconds!r}; profile again"
            )

    @functools.cached_property
    def decode_cells(self) -> dict[tuple[int, int], Cell]:
        """Cells of decode rounds by (lanes, nodes), those of the shortest context."""
        found: dict[tuple[int, int], Cell] = {}
        for cell in sorted(self.cells, key=lambda c: -c.context):
            if cell.chunk == 0:
                found[cell.lanes, cell.nodes] = cell
        return found

    @property
    def noisy(self) -> tuple[Cell, ...]:
        """Cells whose repeats differ too much."""
        return tuple(cell for cell in self.cells if cell.noisy)

    def round_seconds(self, requests: int, bucket: Bucket, context: int) -> float:
        """See `RoundCosts.round_seconds`. Padding lanes cost what lanes cost.

        Raises:
          ValueError: the bucket was not measured.
        """
        cell = self.decode_cells.get((bucket.lanes, bucket.nodes))
        if cell is None:
            raise ValueError(
                f"cells: expected one for {bucket.lanes} lanes and {bucket.nodes} nodes, got none; "
                "profile with this max_slots and draft length"
            )
        return cell.seconds + self.context_seconds * max(context - cell.lanes * cell.context, 0)

    def step(self) -> StepTable:
        """As a step table over nodes: where several cells have as many, the slowest counts."""
        slowest: dict[int, float] = {}
        for cell in self.decode_cells.values():
            slowest[cell.nodes] = max(slowest.get(cell.nodes, 0.0), cell.seconds)
        return step_table([(nodes, 1 / seconds) for nodes, seconds in slowest.items()])

    def additive(self) -> AdditiveTable | None:
        """As a sum of parts, if there are enough cells and their common part is positive."""
        cells = [(c.lanes, c.nodes, c.seconds) for c in self.decode_cells.values()]
        if len(cells) < 4:
            return None
        try:
            return fit_additive(cells).table
        except ValueError:
            return None  # rounds of so few kinds that the common part is not positive

    def break_even(self) -> dict[int, dict[int, float]]:
        """By lanes, then nodes: how many tokens per lane a round must emit to be as fast as plain rounds."""
        cells = self.decode_cells
        return {
            lanes: {
                nodes: cells[lanes, nodes].seconds / cells[lanes, lanes].seconds
                for of, nodes in sorted(cells)
                if of == lanes and nodes > lanes
            }
            for lanes in sorted({lanes for lanes, nodes in cells if lanes == nodes})
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCosts:
    """A step or additive table of another program: it knows no buckets, and not what drafting costs."""

    table: StepTable | AdditiveTable

    def __post_init__(self) -> None:
        """Refuses a table that makes every budget look free.

        Raises:
          ValueError: one probe.
        """
        if not self.table.informative:
            raise ValueError(
                "cost table: expected at least 2 probes of nodes, got 1; a single one says nothing about budgets"
            )

    def round_seconds(self, requests: int, bucket: Bucket, context: int) -> float:
        """See `RoundCosts.round_seconds`."""
        return float(self.table.seconds(requests, bucket.nodes))


def save_costs(costs: MeasuredCosts, path: Path) -> None:
    """Writes a cost table, with the step and additive forms that other programs read.

    Raises:
      ValueError: it is too noisy to decide on.
    """
    if costs.noisy:
        raise ValueError(
            f"cost table: expected half of the repeats within {MOST_SPREAD:.0%} of each other, got {len(costs.noisy)} of "
            f"{len(costs.cells)} kinds of rounds beyond it (worst {max(c.spread for c in costs.noisy):.0%}); "
            "stop what else runs on the machine, or raise repeats"
        )
    additive = costs.additive()
    forms = {
        "step": costs.step().to_json(),
        "additive": None if additive is None else additive.to_json(),
    }
    path.write_text(json.dumps({**dataclasses.asdict(costs), **forms}, indent=1), "utf-8")


def load_costs(path: str | Path) -> MeasuredCosts | TableCosts:
    """Reads a cost table: one of `jspec profile`, or a step or additive table of SGLang.

    Raises:
      ValueError: no such file, no JSON, or entries that are wrong.
    """
    values = read_object("schedule", path)
    if "cells" not in values:
        return TableCosts(table=table_from_json(values))
    fields = {f.name for f in dataclasses.fields(MeasuredCosts)}
    known = {name: value for name, value in values.items() if name in fields}
    missing = fields - set(known) - {"context_seconds"}
    if missing:
        raise ValueError(
            f"schedule: expected the fields {', '.join(sorted(missing))} in {path}, got none; profile again"
        )
    if not _is_number(known.get("context_seconds", 0.0)):
        raise ValueError(
            f"context_seconds: expected a number, got {known['context_seconds']!r}; profile again"
        )
    names = {f.name for f in dataclasses.fields(Cell)}
    if not isinstance(known["cells"], list) or any(
        not isinstance(cell, dict) or set(cell) != names or not all(map(_is_number, cell.values()))
        for cell in known["cells"]
    ):
        raise ValueError(
            f"cells: expected a list of numbers named {', '.join(sorted(names))}, got {str(known['cells'])[:60]}; "
            "profile again"
        )
    cells = tuple(
        Cell(
            lanes=int(cell["lanes"]),
            nodes=int(cell["nodes"]),
            chunk=int(cell["chunk"]),
            context=int(cell["context"]),
            seconds=float(cell["seconds"]),
            spread=float(cell["spread"]),
        )
        for cell in known["cells"]
    )
    return MeasuredCosts(**{**known, "cells": cells})


def check_costs(
    costs: RoundCosts,
    *,
    hardware: str,
    target: str,
    drafter: str,
    draft_length: int,
    dtype: str,
    buckets: Sequence[Bucket],
) -> None:
    """Refuses a table that was measured for something else.

    Args:
      costs: of `jspec profile`, or a foreign one, which says nothing about itself.
      hardware: of this machine.
      target: its identity.
      drafter: its name.
      draft_length: its own.
      dtype: of weights and cache.
      buckets: that the engine will ask about.

    Raises:
      ValueError: naming what differs.
    """
    if isinstance(costs, TableCosts) and isinstance(costs.table, StepTable):
        most = max((bucket.nodes for bucket in buckets), default=0)
        if most > costs.table.most_nodes:
            raise ValueError(
                f"schedule: expected a table for rounds of up to {most} nodes, got one for {costs.table.most_nodes} "
                "(max_batch_tokens); profile further, or lower max_slots or draft_length"
            )
    if not isinstance(costs, MeasuredCosts):
        return
    wanted = {"hardware": hardware, "target": target, "drafter": drafter, "dtype": dtype}
    for name, expected in [*wanted.items(), ("draft_length", draft_length)]:
        got = getattr(costs, name)
        if got != expected:
            raise ValueError(
                f"schedule: expected a cost table for {name} {expected!r}, got one for {got!r}; run jspec profile here"
            )
    for bucket in buckets:
        costs.round_seconds(bucket.lanes, bucket, 0)


def read_object(argument: str, path: str | Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: there is none.
    """
    try:
        values = json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(
            f"{argument}: expected a JSON file, got {str(path)!r} ({problem}); check the path"
        ) from problem
    if not isinstance(values, dict):
        raise ValueError(f"{argument}: expected a JSON object in {str(path)!r}, got {type(values).__name__}")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
