"""Writes the table of instruction counts that tests compare: `python benchmarks/instructions.py`.

Needs libtpu (`pip install 'jspec[tpu-aot]'`), and no TPU.
"""

import json
import pathlib

from pallas_kernels.ahead.child import compile_in_child
from pallas_kernels.ahead.topology import TOPOLOGIES, library_version

TABLE = pathlib.Path(__file__).parent.parent / "tests" / "pallas_kernels" / "instructions.json"
COUNTED = {
    "attention": ("chain", "tree"),
    "block_attention": ("qwen3 8b", "window", "float32"),
    "commit": ("round", "chunk"),
    "survival": ("16 chains", "128 trees"),
    "vocabulary_row": ("nodes", "plain"),
}


def main() -> None:
    """Counts anew for the installed libtpu; other versions' rows stay."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    own = {}
    for kernel, names in COUNTED.items():
        programs = compile_in_child(
            f"pallas_kernels.{kernel}.shapes", names, tuple(TOPOLOGIES), listings=True
        )
        own[kernel] = {
            name: {generation: [p.instructions, p.bundles] for generation, p in by_generation.items()}
            for name, by_generation in programs.items()
        }
    table[str(library_version())] = own
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(json.dumps(own, indent=1))


if __name__ == "__main__":
    main()
