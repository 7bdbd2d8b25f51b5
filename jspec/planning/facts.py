"""What a plan asks the compiler for, and what it learns: numbers of one device, by nobody's estimate."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from pallas_kernels.ahead.program import Program
from pallas_kernels.ahead.topology import environment, library


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Which engine, on which devices."""

    target: str  # config.json, or a folder with one
    drafter: str  # the same, or "plain" or "ngram"
    topology: str  # "v5e:2x4"
    tensor: int  # devices that share heads, MLP and vocabulary
    dtype: str
    slots: int
    context: int  # tokens of each slot
    lanes: int  # requests in the rounds that are compiled
    chunk: int
    page_size: int
    draft_length: int | None = None
    tree: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= self.slots:
            raise ValueError(f"lanes: expected 1 to {self.slots} slots, got {self.lanes}; add slots")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device, by JAX's table of TPUs."""

    kind: str
    memory_bytes: int
    bytes_per_second: int
    flops_per_second: int  # bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
    """What lies on one device between the programs."""

    chip: Chip
    target_bytes: int
    drafter_bytes: int
    pool_bytes: int  # keys and values of the target, for all slots
    drafter_pool_bytes: int
    other_bytes: int  # texts, settings and counts of the slots
    draft_length: int
    draft_depth: int
    target_identity: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundProgram(Program):
    """One of the programs of a round."""

    embedding_bytes: int  # of its arguments: tables with a row per token id, of which it reads a few


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """An engine's programs: by round ("speculative", "plain", "prefill") and kind."""

    resident: Resident
    programs: dict[str, dict[str, RoundProgram]]


class PlanFailed(RuntimeError):
    """The programs of a plan did not compile."""


def compile_plan(request: Request, *, timeout: float = 1800.0) -> Compiled:
    """Compiles the programs of an engine for TPUs that need not be there.

    Args:
      request: what to compile.
      timeout: seconds for all of them.

    Raises:
      PlanFailed: libtpu is missing or refuses a program, or the engine is none.
    """
    lines = run_child("jspec.planning.child", json.dumps(dataclasses.asdict(request)), timeout=timeout)
    first, *rest = lines
    resident = Resident(**{**first, "chip": Chip(**first["chip"])})
    programs: dict[str, dict[str, RoundProgram]] = {}
    for line in rest:
        programs.setdefault(line["round"], {})[line["kind"]] = RoundProgram(**line["program"])
    return Compiled(resident=resident, programs=programs)


def run_child(module: str, *arguments: str, timeout: float) -> list[dict[str, Any]]:
    """Runs a module that compiles ahead of time, and returns its lines of JSON.

    Raises:
      PlanFailed: there is no libtpu, or the module failed or took too long.
    """
    path = library()
    if path is None or not path.is_file():
        raise PlanFailed(
            "libtpu: expected the compiler for TPUs (no TPU is needed), got none; pip install 'jspec[tpu-aot]', or "
            "set TPU_LIBRARY_PATH to a libtpu.so"
        )
    variables = {
        "TPU_LIBRARY_PATH": str(path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        **environment(),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise PlanFailed(
            f"plan: expected programs that compile in {timeout:g} s, got none; plan for fewer layers or drafts"
        ) from late
    if done.returncode:
        raise PlanFailed(_reason(done.stderr))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _reason(stderr: str) -> str:
    """The error that ended a child, in one line."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    for line in reversed(lines):
        if "Ran out of memory" in line or "RESOURCE_EXHAUSTED" in line:
            return f"topology: expected a device with memory for the plan, got: {line.strip()[:400]}; use more devices, or fewer slots or tokens"
        if ": expected " in line:
            return line.partition("Error: ")[2] or line
    return f"plan: expected programs that compile, got: {lines[-1] if lines else 'no message'}"
