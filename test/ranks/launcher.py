"""A script that Paddle's launcher starts on several ranks, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launched"]

_REPOSITORY = Path(__file__).parents[2]


def launched(folder: Path, script: str, ranks: int = 2) -> None:
    """Run a script in a folder, on ranks of this host; fail if it does, with the ends of the ranks' logs."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "--host", "127.0.0.1"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*command, "--log_dir", "logs", "script.py"],
        env={**env, "PYTHONPATH": str(_REPOSITORY)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("logs/workerlog.*")))
    assert done.returncode == 0, done.stdout[-1000:] + logs
