"""A training job that is killed at random moments and started again ends as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_killed_job_ends_like_one_in_peace() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_"))}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / "killed.py"), "--kills", "2", "--seed", "7"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill ") == 4
    assert "equal bit for bit" in done.stdout
