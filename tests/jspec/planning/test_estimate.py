import pytest

from jspec.planning.estimate import (
    USABLE,
    break_even,
    estimate,
    tokens_that_fit,
    transient_bytes,
)
from jspec.planning.facts import Chip, Compiled, Resident, RoundProgram
from pallas_kernels.ahead.program import collective_sizes

CHIP = Chip(kind="toy", memory_bytes=10_000, bytes_per_second=1000, flops_per_second=2000)
RESIDENT = Resident(
    chip=CHIP,
    target_bytes=2000,
    drafter_bytes=500,
    pool_bytes=800,
    drafter_pool_bytes=200,
    other_bytes=100,
    draft_length=3,
    draft_depth=3,
    target_identity="toy",
)


def program(**facts) -> RoundProgram:
    none = dict(
        argument_bytes=0, output_bytes=0, aliased_bytes=0, temporary_bytes=0, largest_made=0, collectives={},
        collective_bytes=0, flops=0.0, accessed_bytes=0.0, embedding_bytes=0,
    )  # fmt: skip
    return RoundProgram(**{**none, **facts})


def test_execute_reads_weights_once_and_the_lanes_share_of_pages():
    facts = program(
        argument_bytes=2000 + 800 + 10,
        embedding_bytes=300,
        output_bytes=40,
        flops=6000.0,
        collectives={"all-reduce": 5},
    )
    found = estimate(facts, "execute", RESIDENT, context_share=0.25, collective_seconds=0.1)
    assert found.bytes_read == 2000 - 300 + 200 + 10 + 40  # of the embedding that is no head, a few rows
    assert found.memory_seconds == pytest.approx(1.95)
    assert found.compute_seconds == 3.0
    assert found.seconds == pytest.approx(3.0 + 0.5)


def test_settle_reads_nothing_of_what_it_updates_in_place_and_of_embeddings_a_few_rows():
    facts = program(
        argument_bytes=1000 + 300 + 70, output_bytes=1000 + 30, aliased_bytes=1000, embedding_bytes=300
    )
    assert estimate(facts, "settle", RESIDENT, context_share=1.0).bytes_read == 100


def test_between_programs_lies_what_they_hand_on():
    programs = {
        "speculative": {
            "propose": program(temporary_bytes=50, output_bytes=5),
            "execute": program(temporary_bytes=100, output_bytes=30),
            "settle": program(temporary_bytes=120, output_bytes=1003, aliased_bytes=1000),
        },
        "plain": {"execute": program(temporary_bytes=10), "settle": program()},
    }
    compiled = Compiled(resident=RESIDENT, programs=programs)
    assert transient_bytes(compiled) == 5 + 30 + 120 + 3
    free = 10_000 * USABLE - 158 - 2000 - 500 - 100
    assert tokens_that_fit(compiled, tokens=100) == int(free / 10)


def test_break_even_is_the_acceptance_that_commits_the_ratio():
    found = break_even(1.0, 1.75, depth=2)
    assert found.acceptance == pytest.approx(0.5)  # 1 + 1/2 + 1/4
    assert break_even(1.0, 0.9, depth=2).acceptance == 0.0
    assert break_even(1.0, 3.01, depth=2).acceptance is None


def test_collectives_are_sized_by_what_they_return():
    text = """
  %a = bf16[16,64]{1,0:T(8,128)(2,1)} all-reduce(bf16[16,64] %x), replica_groups={{0,1}}
  ROOT %b = (s32[8]{0}, f32[2,2]{1,0}) all-reduce(s32[8] %y, f32[2,2] %z), to_apply=%add
  %c = (f32[4]{0}, f32[8]{0}) all-gather-start(f32[4] %w), dimensions={0}
  %d = f32[8]{0} all-gather-done(%c)
  %f = (bf16[6]{0}, bf16[6]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(bf16[6] %v)
  %e = f32[100]{0} add(f32[100] %p, f32[100] %q), metadata={op_name="all-reduce(x"}
"""
    assert collective_sizes(text) == [16 * 64 * 2, 8 * 4 + 16, 32, 12]
