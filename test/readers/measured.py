"""Reads checkpoints one after the other, each in a process of its own, and prints what that took.

Run as ``python -m test.readers.measured FOLDER...``; prints one JSON object for each: the ``error`` (its type and text,
None if there was none), ``seconds`` of the processor, and ``memory``, the most bytes beyond what there was before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["measured"]


def measured(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """What finding out what these folders hold takes, each alone."""
    command = [sys.executable, "-m", "test.readers.measured", *map(str, folders)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _most_memory() -> int:
    """The most memory that this process has had since it last asked to forget that, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _measure(folder: str) -> None:
    from paddle_dist_ckpt import read_metadata

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    error, memory, start = None, _most_memory(), time.process_time()
    try:
        read_metadata(folder)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    taken = {"error": error, "seconds": time.process_time() - start, "memory": _most_memory() - memory}
    print(json.dumps(taken), flush=True)


def _main() -> None:
    import paddle_dist_ckpt  # noqa: F401  # once for all

    for folder in sys.argv[1:]:
        child = os.fork()
        if not child:
            try:
                _measure(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError(f"{folder}: the process that reads it died")


if __name__ == "__main__":
    _main()
