"""What the compiler's facts let one expect: bounds of time, room for context, where speculation breaks even.

None of it is measured. A program takes at least the time to read what it must read once, and to multiply what
it multiplies; every collective waits for the slowest device.
"""

import dataclasses

from jspec.planning.facts import Compiled, Resident, RoundProgram

USABLE = 0.98  # of a device's memory: libtpu keeps some to itself (v5e: 15.75 of 16 GiB)
COLLECTIVE_SECONDS = 10e-6  # latency of one among the chips of a slice: an assumption


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """One program on one device."""

    bytes_read: int  # what has to be read or written once
    flops: float
    memory_seconds: float
    compute_seconds: float
    collective_seconds: float

    @property
    def seconds(self) -> float:
        """At least so long."""
        return max(self.memory_seconds, self.compute_seconds) + self.collective_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakEven:
    """When a round with drafts costs no more per token than plain decoding."""

    ratio: float  # of the rounds' times: the mean commit length that pays for it
    acceptance: float | None  # of each draft token, given those before it; None = no acceptance is enough


def estimate(
    program: RoundProgram,
    kind: str,
    resident: Resident,
    *,
    context_share: float,
    collective_seconds: float = COLLECTIVE_SECONDS,
) -> Estimate:
    """Bounds for one program.

    Args:
      program: its facts.
      kind: "propose", "execute" or "settle".
      resident: what is on the device beside it.
      context_share: how much of all pages the lanes of the round fill, 0 to 1.
      collective_seconds: each of them.
    """
    read, written = program.argument_bytes, program.output_bytes - program.aliased_bytes
    read -= program.aliased_bytes  # updated in place, where something is committed
    read -= program.embedding_bytes
    if kind == "execute":
        read -= round((1 - context_share) * resident.pool_bytes)
    if kind == "propose":
        read -= round((1 - context_share) * resident.drafter_pool_bytes)
    total = read + written
    chip = resident.chip
    return Estimate(
        bytes_read=total,
        flops=program.flops,
        memory_seconds=total / chip.bytes_per_second,
        compute_seconds=program.flops / chip.flops_per_second,
        collective_seconds=collective_seconds * sum(program.collectives.values()),
    )


def transient_bytes(compiled: Compiled) -> int:
    """Most memory that programs need beside what is resident: temporary, and what execute hands to settle."""
    most = 0
    for programs in compiled.programs.values():
        execute, settle = programs["execute"], programs["settle"]
        drafted = programs.get("propose")
        peaks = [
            execute.output_bytes + execute.temporary_bytes,
            execute.output_bytes + settle.temporary_bytes + settle.output_bytes - settle.aliased_bytes,
        ]
        if drafted is not None:
            peaks = [drafted.temporary_bytes, *(drafted.output_bytes + peak for peak in peaks)]
        most = max(most, *peaks)
    return most


def tokens_that_fit(compiled: Compiled, tokens: int) -> int:
    """Tokens of context, over all slots, for which one device has memory.

    Args:
      compiled: with pages for `tokens` tokens.
      tokens: of all slots.
    """
    resident = compiled.resident
    free = resident.chip.memory_bytes * USABLE - transient_bytes(compiled)
    free -= resident.target_bytes + resident.drafter_bytes + resident.other_bytes
    per_token = (resident.pool_bytes + resident.drafter_pool_bytes) / tokens
    return max(int(free / per_token), 0) if per_token else 0


def break_even(plain_seconds: float, speculative_seconds: float, depth: int) -> BreakEven:
    """Where a round of at most depth + 1 tokens costs as much per token as plain decoding.

    With each draft token accepted with probability a, a round commits 1 + a + ... + a^depth on average.
    """
    ratio = speculative_seconds / plain_seconds
    if ratio > depth + 1:
        return BreakEven(ratio=ratio, acceptance=None)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < ratio else (low, middle)
    return BreakEven(ratio=ratio, acceptance=high if ratio > 1 else 0.0)
