"""Compiles named cases in a process of its own, where a fault that aborts libtpu costs one check only.

`python -m pallas_kernels.ahead.child MODULE DUMP GENERATION,... NAME...` prints one line of JSON per name and
generation. MODULE has `COMPILED`, a dict of cases by name, each with a method `case(generation)` that returns
(mesh, function, arguments, donated) for `topology.compile_for`.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from pallas_kernels.ahead.program import Program, facts
from pallas_kernels.ahead.topology import compile_for, environment, library


class CompileFailed(RuntimeError):
    """A child did not compile all of its cases; the message ends with what it said."""


def compile_in_child(
    module: str,
    names: Iterable[str],
    generations: Sequence[str],
    *,
    listings: bool = False,
    timeout: float = 600,
) -> dict[str, dict[str, Program]]:
    """Compiles cases for TPUs; returns what is known of them by name and generation.

    Args:
      module: with `COMPILED`, importable from here.
      names: of the cases.
      generations: "v5e", "v5p", "v6e", "v7x".
      listings: also count instructions, which takes the compiler a few seconds more.
      timeout: seconds for all of them.

    Raises:
      CompileFailed: a case does not compile, or libtpu is missing.
    """
    path = library()
    if path is None:
        raise CompileFailed("libtpu: expected the package, found none; pip install 'jspec[tpu-aot]'")
    with tempfile.TemporaryDirectory() as folder:
        dump = str(pathlib.Path(folder) / "listings") if listings else "-"
        variables = {
            "TPU_LIBRARY_PATH": str(path),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **environment(pathlib.Path(dump) if listings else None),
        }
        command = [sys.executable, "-m", __name__, module, dump, ",".join(generations), *names]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout, check=False
        )
    found: dict[str, dict[str, Program]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            read = json.loads(line)
            found.setdefault(read["name"], {})[read["generation"]] = Program(**read["program"])
    if done.returncode:
        raise CompileFailed(
            f"{module}: expected exit status 0, got {done.returncode} after "
            f"{ {name: list(by) for name, by in found.items()} }; {done.stderr[-3000:]}"
        )
    return found


def main(module: str, dump: str, generations: str, *names: str) -> None:
    """See the module."""
    cases = importlib.import_module(module).COMPILED
    folder = None if dump == "-" else pathlib.Path(dump)
    for generation in generations.split(","):
        for name in names:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            mesh, run, arguments, donated = cases[name].case(generation)
            program = facts(compile_for(mesh, run, arguments, donated=donated), folder)
            read = {"name": name, "generation": generation, "program": dataclasses.asdict(program)}
            print(json.dumps(read), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
