"""A training job that is killed at random moments and started again ends as if nothing had happened."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO

import pytest

from test.ranks.forks import AT_IMPORT, SOURCES, ForkedProcess, fork

ROOT = Path(__file__).parents[1]
RANKS = 4


def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("killed", ROOT / "examples" / "killed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_killed_job_ends_like_one_in_peace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job, in peace, is started as the example starts it. The others' ranks have imported Paddle already."""
    numbers = itertools.count()

    def start(
        command: list[str], *, env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        number = next(numbers)
        if number < RANKS:
            return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)
        assert command[0] == sys.executable
        source = (number // RANKS + number) % SOURCES  # a rank's is another one when the job is started again
        return fork(source, [], stdout.fileno(), command[1:], {**env, **AT_IMPORT})

    for name in os.environ:
        if name.startswith(("PADDLE_", "FLAGS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["killed.py", "--kills", "2", "--seed", "7"])
    killed = example()
    monkeypatch.setattr(killed, "subprocess", SimpleNamespace(Popen=start))
    code = killed.main()
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.count("kill ") == 4
    assert "equal bit for bit" in printed
    assert next(numbers) == RANKS * 6 + 2  # all have been started here
