"""A measurement as a table for people and as JSON for programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jspec.bench.costs import Cost
from jspec.bench.measure import Measurement
from jspec.bench.scenarios import Outcome
from jspec.bench.simulate import POLICIES
from jspec.bench.simulate import Outcome as SimulatedOutcome
from jspec.bench.vocabularies import VocabularyCost

# No lines between the columns: a terminal of 80 must hold them all.
NARROW: dict[str, Any] = {"box": box.SIMPLE, "padding": (0, 1, 0, 0), "pad_edge": False}


def measurement_table(measurements: Sequence[Measurement]) -> Table:
    """One row per task and variant: how fast, and whether it is the same text."""
    table = Table(**NARROW, title="plain against speculative, medians of interleaved repeats")
    for heading in ("task", "variant", "tokens/s", "ratio", "end to end", "mean commit", "identical"):
        table.add_column(heading, justify="left" if heading in ("task", "variant") else "right")
    for m in measurements:
        table.add_row(
            m.task,
            _variant(m),
            f"{m.tokens_per_second:.1f} ±{m.spread / 2:.0%}",
            f"{m.ratio:.2f}x",
            f"{m.end_to_end_ratio:.2f}x",
            "-" if m.counters.mean_commit_length is None else f"{m.counters.mean_commit_length:.2f}",
            {None: "-", True: "yes", False: "NO"}[m.identical],
        )
    return table


def round_table(measurements: Sequence[Measurement]) -> Table:
    """One row per task and variant: where a round's time goes, and which draft tokens are accepted."""
    table = Table(**NARROW, title="time of a round by part; accepted draft tokens of rounds that drafted")
    numbers = ("draft", "target", "rest", "Python")
    for heading in ("task", "variant", *numbers, "by position, %"):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for m in measurements:
        table.add_row(
            m.task,
            _variant(m),
            *(f"{m.shares[part]:.0%}" for part in ("draft", "target", "rest")),
            f"{m.host_share:.1%}",
            " ".join(f"{p * 100:.0f}" for p in m.counters.acceptance_by_position()) or "-",
        )
    return table


def _variant(m: Measurement) -> str:
    return m.variant + (" (simulated)" if m.simulated else "")


def cost_table(costs: Sequence[Cost]) -> Table:
    """What a draft of each length costs, and what it must bring."""
    table = Table(**NARROW, title="cost of a round, and the mean commit length that pays for it")
    for heading in ("draft tokens", "ms per round", "of plain", "break-even mean commit"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.draft_length),
            f"{cost.seconds * 1e3:.1f}",
            f"{cost.relative:.2f}x",
            f"{cost.relative:.2f}" + (" (needs more than it can accept)" if not cost.attainable else ""),
        )
    return table


def simulation_table(rows: Mapping[str, Sequence[Mapping[str, SimulatedOutcome]]]) -> Table:
    """One row per cost curve and concurrency: speeds as multiples of plain decoding's.

    Args:
      rows: by the curve's name, one mapping of policies to outcomes per concurrency.
    """
    table = Table(**NARROW, title="simulated throughput, as a multiple of plain decoding")
    for heading in ("costs", "requests", "full", "scheduled", "of the better", "verified / round"):
        table.add_column(heading, justify="left" if heading == "costs" else "right")
    for name, outcomes in rows.items():
        for row in outcomes:
            plain, full, scheduled = (row[policy].tokens_per_second for policy in POLICIES)
            table.add_row(
                name,
                str(row["plain"].concurrency),
                f"{full / plain:.2f}x",
                f"{scheduled / plain:.2f}x",
                f"{scheduled / max(plain, full):.3f}",
                f"{row['scheduled'].verified / row['scheduled'].rounds:.1f}",
            )
    return table


def scenario_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per case and variant of one scenario."""
    table = Table(**NARROW, title=f"{outcomes[0].scenario}: plain against speculative, prompts included")
    for heading in ("case", "variant", "tokens/s", "ratio", "decoding", "first", "mean commit", "identical"):
        table.add_column(heading, justify="left" if heading in ("case", "variant") else "right")
    for one in outcomes:
        table.add_row(
            one.case,
            one.variant,
            f"{one.tokens_per_second:.1f}",
            f"{one.ratio:.2f}x",
            "-" if one.decode_ratio is None else f"{one.decode_ratio:.2f}x",
            f"{one.first_token_seconds * 1e3:.0f} ms",
            "-" if one.mean_commit_length is None else f"{one.mean_commit_length:.2f}",
            {None: "-", True: "yes", False: "NO"}[one.identical],
        )
    return table


def vocabulary_table(costs: Sequence[VocabularyCost]) -> Table:
    """One row per size of the vocabulary."""
    table = Table(**NARROW, title="vocabulary: a block drafter beside plain rounds, random weights")
    for heading in ("vocabulary", "plain", "with drafter", "of it drafting", "break-even mean commit"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.vocabulary),
            f"{cost.plain_seconds * 1e3:.1f} ms",
            f"{cost.seconds * 1e3:.1f} ms",
            f"{cost.draft_share:.0%}",
            f"{cost.break_even:.2f}" + ("" if cost.attainable else " (needs more than it can accept)"),
        )
    return table


def as_json(measurements: Sequence[Measurement], costs: Sequence[Cost]) -> dict[str, Any]:
    """Everything in the tables, and the counters behind them."""
    return {
        "measurements": [
            {
                **dataclasses.asdict(m),
                "mean_commit_length": m.counters.mean_commit_length,
                "acceptance_by_position": m.counters.acceptance_by_position(),
            }
            for m in measurements
        ],
        "costs": [dataclasses.asdict(c) for c in costs],
    }
