"""Scripts in a process of their own that sees several CPU devices."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_devices(script: str, *arguments: str, devices: int, timeout: float = 300) -> str:
    """What the script prints; the tests' own modules are there for it."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ
        | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
