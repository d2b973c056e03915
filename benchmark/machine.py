"""The machine on which was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["describe", "filesystem"]


def describe(folder: Path) -> dict[str, str | int | float]:
    """What a reader needs to know of the machine to judge the numbers."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(int(memory.split()[1]) / (1 << 20), 1),
        "filesystem": filesystem(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    place = folder.resolve()
    within = [
        (len(Path(point).parts), i, kind) for i, (point, kind) in enumerate(mounts) if place.is_relative_to(point)
    ]
    return max(within)[2] if within else "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
