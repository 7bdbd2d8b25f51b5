"""What this process runs on, by name: measured seconds hold for nothing else."""

import os
import pathlib

import jax


def hardware_name() -> str:
    """Kind and number of the devices; on a CPU its model and how many cores this process may use."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {_cpu_model()}"


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "an unnamed CPU"
