"""What scheduling itself costs, beside the rounds of a cost table: less than 2% of a round is wanted.

The host's half is everything a session asks of the schedule in a round: what has arrived, the choice of a
bucket, and what is on its way. The device's half is survival and allotment, here in a program of their own,
whose launch counts; within a round they are part of drafting, so this is an upper bound. Without a table the
rounds are those of an imagined accelerator (`jspec bench --simulate`), which are far shorter than a CPU's,
and only the seconds say something.

  python benchmarks/scheduling.py --schedule costs.json --calibration calibration.json
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.bench.simulate import curve_costs
from jspec.buckets import Ladder
from jspec.round import OneHot, Proposal
from jspec.schedule.allotment import allot
from jspec.schedule.calibration_file import load_calibration
from jspec.schedule.costs import MeasuredCosts, RoundCosts, load_costs
from jspec.schedule.scheduler import Lanes, Scheduler
from jspec.schedule.survival import Curve, survival_of

WANTED = 0.02
CONTEXT = 128  # committed tokens per request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Medians over rounds of so many requests, and what they are beside the round that was chosen."""

    requests: int
    host_seconds: float
    device_seconds: float
    round_seconds: float

    @property
    def of_round(self) -> float:
        """Scheduling as a fraction of a round. Host and device overlap, but not always: their sum."""
        return (self.host_seconds + self.device_seconds) / self.round_seconds


def share(
    costs: RoundCosts,
    requests: int,
    *,
    draft_length: int,
    max_slots: int,
    curve: Curve | None = None,
    rounds: int = 200,
) -> Share:
    """Schedules rounds of random confidence, and times it.

    Args:
      costs: of rounds.
      requests: in every round.
      draft_length: draft tokens of each.
      max_slots: of the engine that is imagined.
      curve: of a calibration.
      rounds: that are timed.
    """
    ladder = Ladder(max_slots=max_slots, draft_length=draft_length, chunks=(1,))
    scheduler = Scheduler(costs=costs, ladder=ladder, max_slots=max_slots)
    slots = tuple(range(requests))
    lanes = Lanes(
        slots=slots,
        generations=(1,) * requests,
        ready=(draft_length,) * requests,
        least_survival=(0.0,) * requests,
        context=requests * CONTEXT,
    )
    width = ladder.lanes(requests)
    confidence = np.random.default_rng(0).beta(3, 1, (8, width, draft_length)).astype(np.float32)
    padded = jnp.asarray([*slots, *[-1] * (width - requests)], jnp.int32)
    lengths = jnp.where(padded >= 0, draft_length, 0)
    tokens = jnp.zeros((width, draft_length), jnp.int32)

    @jax.jit
    def spread(confidence: jax.Array, budget: jax.Array) -> tuple[jax.Array, jax.Array]:
        proposal = Proposal(tokens=tokens, lengths=lengths, q=OneHot(), confidence=confidence)
        survival = survival_of(proposal, curve)
        return survival, allot(survival, lengths, padded, budget)

    given = [jnp.asarray(one) for one in confidence]
    jax.block_until_ready(spread(given[0], jnp.int32(0)))
    host, device, chosen = [], [], []
    here = [True] * requests
    for number in range(rounds):
        start = time.perf_counter()
        decision = scheduler.choose(lanes)
        between = time.perf_counter()
        bucket = decision.bucket
        budget = bucket.nodes - requests if bucket.budget else 0
        survival, _ = jax.block_until_ready(spread(given[number % len(given)], jnp.int32(budget)))
        done = time.perf_counter()
        if bucket.budget:
            scheduler.publish(decision, survival, here=here)
        end = time.perf_counter()
        host.append(between - start + end - done)
        device.append(done - between)
        chosen.append(costs.round_seconds(requests, bucket, lanes.context))
    return Share(
        requests=requests,
        host_seconds=statistics.median(host),
        device_seconds=statistics.median(device),
        round_seconds=statistics.median(chosen),
    )


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", help="cost table of jspec profile")
    parser.add_argument("--calibration")
    parser.add_argument("--draft-length", type=int, default=7, help="for a table that does not say it")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--max-slots", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args(arguments)
    costs = None if options.schedule is None else load_costs(options.schedule)
    draft_length = costs.draft_length if isinstance(costs, MeasuredCosts) else options.draft_length
    curve = None if options.calibration is None else load_calibration(options.calibration).curve
    for requests in options.concurrency:
        found = share(
            curve_costs("roofline", draft_length) if costs is None else costs,
            requests,
            draft_length=draft_length,
            max_slots=options.max_slots,
            curve=curve,
            rounds=options.rounds,
        )
        verdict = ""
        if costs is not None:
            met = "less" if found.of_round < WANTED else "NOT less"
            verdict = (
                f", {found.of_round:.2%} of a round of {found.round_seconds * 1e3:.1f} ms: "
                f"{met} than {WANTED:.0%}"
            )
        show(
            f"{requests} requests: host {found.host_seconds * 1e6:.0f} us, "
            f"device {found.device_seconds * 1e6:.0f} us{verdict}"
        )


if __name__ == "__main__":
    main()
