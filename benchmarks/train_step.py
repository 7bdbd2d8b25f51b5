"""One training step: jspec against an eager PyTorch implementation of the same loss, in one run.

Each side runs in processes of its own, in turns, on the same arrays: the losses have to agree, then
samples per second and peak memory are compared. Needs `pip install 'jspec[train,compare]'`.

  python benchmarks/train_step.py [--method eagle3] [--steps 5] [--turns 2] [--json FILE]
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys

import train_step_dflash
import train_step_eagle3
from train_step_sizes import ROWS

METHODS = {"dflash": train_step_dflash, "eagle3": train_step_eagle3}


@dataclasses.dataclass(frozen=True)
class Side:
    """All turns of one side; the first step of each is left out (compilation, warm-up)."""

    seconds: list[float]
    losses: list[float]
    peak_gib: float


def child(method: str, side: str, steps: int) -> None:
    """Prints what one process measured."""
    module = METHODS[method]
    measured = module.run_jax(steps) if side == "jspec" else module.run_torch(steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"measured": measured, "peak_gib": peak}))


def turn(method: str, side: str, steps: int) -> Side:
    """One process of a side."""
    command = [sys.executable, __file__, "--method", method, "--side", side, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    out = json.loads(done.stdout.splitlines()[-1])
    return Side([s for s, _ in out["measured"][1:]], [loss for _, loss in out["measured"]], out["peak_gib"])


def main() -> None:
    """Runs both sides in turns and prints the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=sorted(METHODS), default="dflash")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--side", choices=("jspec", "torch"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return child(options.method, options.side, options.steps)
    turns: dict[str, list[Side]] = {"torch": [], "jspec": []}
    for _ in range(options.turns):
        for side, sides in turns.items():
            sides.append(turn(options.method, side, options.steps))
    first = {side: sides[0].losses for side, sides in turns.items()}
    difference = max(abs(a - b) for a, b in zip(first["torch"], first["jspec"], strict=True))
    if difference > 2e-3:
        raise SystemExit(f"the two sides do not train alike: losses {first}")
    figures = {}
    for side, sides in turns.items():
        rate = ROWS / statistics.median(s for one in sides for s in one.seconds)
        figures[side] = {"samples_per_second": rate, "peak_gib": max(one.peak_gib for one in sides)}
        print(
            f"{side:6} {rate:6.2f} samples/s   peak {figures[side]['peak_gib']:.2f} GiB   losses {first[side][:3]}"
        )
    ratio = figures["jspec"]["samples_per_second"] / figures["torch"]["samples_per_second"]
    print(f"jspec / torch: {ratio:.2f}x samples/s, largest difference of the losses {difference:.1e}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures | {"ratio": ratio, "loss_difference": difference}, file, indent=1)


if __name__ == "__main__":
    main()
