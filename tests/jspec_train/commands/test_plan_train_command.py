from pathlib import Path

import pytest

from jspec.cli import main
from jspec.planning.facts import Chip
from jspec_train.commands.plan import step_table
from jspec_train.plan_step import CompiledStep, StepRequest
from pallas_kernels.ahead.program import Program

TARGET = Path(__file__).parents[2] / "data" / "targets" / "llama_plain"
REQUEST = StepRequest(
    target="target", drafter="drafter", topology="v5e:2x4", data=2, tensor=4, rows=4, tokens=8, num_anchors=2,
    dtype="bfloat16",
)  # fmt: skip


def test_rows_that_the_devices_do_not_divide_are_refused_in_one_line(capsys):
    paths = ["--target", str(TARGET), "--drafter", str(TARGET)]
    with pytest.raises(SystemExit) as ended:
        main(["plan-train", *paths, "--topology", "v5e:2x4", "--data", "2", "--rows", "3"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said == "jspec plan-train: rows: expected a multiple of 2 devices, got 3; round it"


def test_a_step_holds_what_is_given_and_made_but_nothing_twice():
    program = Program(
        argument_bytes=5 * 10**9, output_bytes=3 * 10**9, aliased_bytes=2 * 10**9, temporary_bytes=10**9,
        largest_made=0, collectives={"all-reduce": 100}, collective_bytes=0, flops=4e12, accessed_bytes=2e9,
    )  # fmt: skip
    chip = Chip(kind="toy", memory_bytes=16 * 10**9, bytes_per_second=10**9, flops_per_second=10**12)
    step = CompiledStep(chip=chip, state_bytes=0, target_bytes=0, batch_bytes=0, program=program)
    what, values, _ = (list(column.cells) for column in step_table(step, REQUEST).columns)
    said = dict(zip(what, values, strict=True))
    assert said["all of it"] == "7.000 GB of 16.0"
    assert said["at least"] == "4.0010 s (compute)"
