"""What a round costs: a step function or a sum of parts over its lanes and nodes."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class CostTable(Protocol):
    """Anything that says how long a round takes. Lanes are requests; nodes are anchors and draft tokens."""

    def seconds(self, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """Of rounds with `lanes` requests, by nodes."""
        ...

    def tokens_per_second(self, tokens: np.ndarray, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """Speed of rounds that emit so many tokens."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTable:
    """Rounds per second by nodes alone; between two probes, that of the lower one.

    Args:
      nodes: probed, strictly ascending.
      rounds_per_second: measured there.
      most_nodes: largest round that the table is meant for, at least the last probe.

    Raises:
      ValueError: no probe, unsorted or non-positive entries, or most_nodes below the last probe.

    Source: SGLang 0.5.23 `SpsCostTable`.
    """

    nodes: tuple[int, ...]
    rounds_per_second: tuple[float, ...]
    most_nodes: int

    def __post_init__(self) -> None:
        check_probes("sample_batch_tokens", self.nodes, least=1)
        check_values(
            "sample_steps_per_sec", self.rounds_per_second, len(self.nodes), positive=True, what="probes"
        )
        if self.most_nodes < self.nodes[-1]:
            raise ValueError(
                f"max_batch_tokens: expected at least the last probe {self.nodes[-1]}, got {self.most_nodes}; "
                "raise it"
            )

    @property
    def informative(self) -> bool:
        """Whether there is more than one probe: with one, any budget seems free."""
        return len(self.nodes) > 1

    def rate(self, nodes: np.ndarray | int) -> np.ndarray:
        """Rounds per second."""
        index = np.searchsorted(np.asarray(self.nodes), nodes, side="right") - 1
        return np.asarray(np.asarray(self.rounds_per_second, np.float64)[np.maximum(index, 0)])

    def seconds(self, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """See `CostTable.seconds`; the number of lanes does not count."""
        return np.asarray(1.0 / self.rate(nodes))

    def tokens_per_second(self, tokens: np.ndarray, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """See `CostTable.tokens_per_second`."""
        return np.asarray(tokens * self.rate(nodes))

    def to_json(self) -> dict[str, Any]:
        """The file's fields, named as in SGLang."""
        return {
            "sample_batch_tokens": list(self.nodes),
            "sample_steps_per_sec": list(self.rounds_per_second),
            "max_batch_tokens": self.most_nodes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveTable:
    """Seconds of a round as a constant, a part by lanes and a part by nodes, each interpolated.

    Outside the probes the nearest one counts.

    Args:
      bias_seconds: the constant.
      lanes: probed, strictly ascending.
      lane_seconds: at them.
      nodes: probed, strictly ascending.
      node_seconds: at them.

    Raises:
      ValueError: a bias that is not positive, no probe, unsorted probes, or a value that is not finite.

    Source: SGLang 0.5.23 `SpsAdditiveCostTable`.
    """

    bias_seconds: float
    lanes: tuple[int, ...]
    lane_seconds: tuple[float, ...]
    nodes: tuple[int, ...]
    node_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < self.bias_seconds < math.inf:
            raise ValueError(
                f"bias_seconds: expected a positive number of seconds, got {self.bias_seconds!r}; profile again"
            )
        check_probes("bs_probes", self.lanes, least=0)
        check_values("alpha_seconds", self.lane_seconds, len(self.lanes), positive=False, what="probes")
        check_probes("m_probes", self.nodes, least=0)
        check_values("theta_seconds", self.node_seconds, len(self.nodes), positive=False, what="probes")

    @property
    def informative(self) -> bool:
        """Whether nodes cost something that can be told."""
        return len(self.nodes) > 1

    def seconds(self, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """See `CostTable.seconds`."""
        by_lanes = np.interp(lanes, self.lanes, self.lane_seconds)
        return np.asarray(self.bias_seconds + by_lanes + np.interp(nodes, self.nodes, self.node_seconds))

    def tokens_per_second(self, tokens: np.ndarray, lanes: int, nodes: np.ndarray | int) -> np.ndarray:
        """See `CostTable.tokens_per_second`."""
        return np.asarray(tokens / self.seconds(lanes, nodes))

    def to_json(self) -> dict[str, Any]:
        """The file's fields, named as in SGLang."""
        return {
            "bias_seconds": self.bias_seconds,
            "bs_probes": list(self.lanes),
            "alpha_seconds": list(self.lane_seconds),
            "m_probes": list(self.nodes),
            "theta_seconds": list(self.node_seconds),
        }


def table_from_json(values: Mapping[str, Any]) -> StepTable | AdditiveTable:
    """The table that a file's fields say; they are named as in SGLang.

    Raises:
      ValueError: fields are missing or unknown, or a table refuses its values.
    """
    additive = "bias_seconds" in values
    wanted = (
        ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
        if additive
        else ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
    )
    if set(values) != set(wanted):
        raise ValueError(
            f"cost table: expected the fields {', '.join(wanted)}, got {', '.join(map(str, values)) or 'none'}; "
            "write it with jspec profile"
        )
    if additive:
        return AdditiveTable(
            bias_seconds=_numbers("bias_seconds", [values["bias_seconds"]])[0],
            lanes=_whole_numbers("bs_probes", values["bs_probes"]),
            lane_seconds=_numbers("alpha_seconds", values["alpha_seconds"]),
            nodes=_whole_numbers("m_probes", values["m_probes"]),
            node_seconds=_numbers("theta_seconds", values["theta_seconds"]),
        )
    return StepTable(
        nodes=_whole_numbers("sample_batch_tokens", values["sample_batch_tokens"]),
        rounds_per_second=_numbers("sample_steps_per_sec", values["sample_steps_per_sec"]),
        most_nodes=_whole_numbers("max_batch_tokens", [values["max_batch_tokens"]])[0],
    )


def step_table(probes: Sequence[tuple[int, float]], most_nodes: int | None = None) -> StepTable:
    """A step table of (nodes, rounds per second) in any order."""
    ordered = sorted(probes)
    return StepTable(
        nodes=tuple(nodes for nodes, _ in ordered),
        rounds_per_second=tuple(rate for _, rate in ordered),
        most_nodes=ordered[-1][0] if most_nodes is None and ordered else most_nodes or 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """An additive table fitted to measured rounds, and how well it does."""

    table: AdditiveTable
    rms_seconds: float
    r_squared: float


def fit_additive(cells: Sequence[tuple[int, int, float]], *, bin_width: int = 1) -> Fit:
    """Least squares of (lanes, nodes, seconds) on one dummy per lanes and one per bin of nodes.

    The smallest lanes and the lowest bin are the reference, so their parts are 0 and the bias is theirs.

    Args:
      cells: at least 4, with at least 2 numbers of lanes or bins.
      bin_width: nodes are rounded to multiples of it, a half to even.

    Raises:
      ValueError: too few cells.

    Source: SGLang 0.5.23 `dspark_sps_profiler fit`.
    """
    if len(cells) < 4:
        raise ValueError(f"cells: expected at least 4 measured rounds, got {len(cells)}; measure more")
    lanes = sorted({lane for lane, _, _ in cells})
    binned = [round(nodes / bin_width) * bin_width for _, nodes, _ in cells]
    bins = sorted(set(binned))
    design = np.zeros((len(cells), 1 + len(lanes) - 1 + len(bins) - 1))
    design[:, 0] = 1
    for row, ((lane, _, _), nodes) in enumerate(zip(cells, binned, strict=True)):
        if lane != lanes[0]:
            design[row, lanes.index(lane)] = 1
        if nodes != bins[0]:
            design[row, len(lanes) - 1 + bins.index(nodes)] = 1
    seconds = np.array([second for _, _, second in cells])
    solution, *_ = np.linalg.lstsq(design, seconds, rcond=None)
    residual = seconds - design @ solution
    spread = seconds - seconds.mean()
    return Fit(
        table=AdditiveTable(
            bias_seconds=float(solution[0]),
            lanes=tuple(lanes),
            lane_seconds=(0.0, *map(float, solution[1 : len(lanes)])),
            nodes=tuple(bins),
            node_seconds=(0.0, *map(float, solution[len(lanes) :])),
        ),
        rms_seconds=float(np.sqrt(np.mean(residual**2))),
        r_squared=float(1 - residual @ residual / (spread @ spread)) if spread.any() else 1.0,
    )


def lane_sweep(most: int) -> tuple[int, ...]:
    """Numbers of lanes to measure: 1, 2, 4, 8, then steps of 8, 16, 32, 64, and `most` itself.

    Source: SGLang 0.5.23 `dspark_sps_profiler`.
    """
    steps = itertools.chain((1, 2, 4, 8), range(16, 65, 8), range(80, 129, 16), range(160, 257, 32))
    further = range(320, max(most, 320) + 1, 64)
    return tuple(sorted({count for count in itertools.chain(steps, further) if count < most} | {most}))


def check_probes(name: str, probes: Sequence[int], *, least: int) -> None:
    """Raises ValueError unless there is a probe and they are whole, ascending and from `least` on."""
    if not probes or probes[0] < least or any(a >= b for a, b in itertools.pairwise(probes)):
        raise ValueError(
            f"{name}: expected whole numbers from {least} on in strictly ascending order, got {list(probes)}; "
            "sort them, or profile again"
        )


def check_values(name: str, values: Sequence[float], count: int, *, positive: bool, what: str) -> None:
    """Raises ValueError unless there are `count` finite numbers, positive ones if asked."""
    fine = all(math.isfinite(v) and (v > 0 or not positive) for v in values)
    if len(values) != count or not fine:
        kind = "positive" if positive else "finite"
        raise ValueError(
            f"{name}: expected {count} {kind} numbers, one per one of the {what}, got {list(values)}; profile again"
        )


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """Of a file's list; TypeErrors would come too late to say which field is wrong."""
    if not isinstance(values, list | tuple) or not all(_is_number(v) for v in values):
        raise ValueError(f"{name}: expected numbers, got {str(values)[:60]}; write it with jspec profile")
    return tuple(map(float, values))


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    numbers = _numbers(name, values)
    if not all(number.is_integer() for number in numbers):
        raise ValueError(
            f"{name}: expected whole numbers, got {str(values)[:60]}; write it with jspec profile"
        )
    return tuple(map(int, numbers))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
