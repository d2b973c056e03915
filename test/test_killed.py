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
from test.strategies import draws

ROOT = Path(__file__).parents[1]
RANKS = 4
SEED = "37"  # the first kill is of all ranks, the second of one: the coordinator


def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("killed", ROOT / "examples" / "killed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_killed_job_ends_like_one_in_peace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank is started as the example starts it. The others have imported Paddle already."""
    kills = draws(1, 4)
    numbers = itertools.count()

    def start(
        command: list[str], *, env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        number = next(numbers)
        if number == 0:
            return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)
        assert command[0] == sys.executable
        source = (number // RANKS + number) % SOURCES  # a rank's is another one when the job is started again
        return fork(source, [], stdout.fileno(), command[1:], {**env, **AT_IMPORT})

    for name in os.environ:
        if name.startswith(("PADDLE_", "FLAGS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", ["killed.py", "--kills", str(kills), "--seed", SEED])
    killed = example()
    monkeypatch.setattr(killed, "STEPS", draws(8, 40))
    monkeypatch.setattr(killed, "MOST_SECONDS", draws(1, 3))
    monkeypatch.setattr(killed, "subprocess", SimpleNamespace(Popen=start))
    code = killed.main()
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.count("kill ") == 2 * kills
    assert len({line.count(",") for line in printed.splitlines() if "kill " in line}) == 2, "all at once, and one alone"
    assert "equal bit for bit" in printed
    assert next(numbers) == RANKS * (2 + 2 * kills) + 2  # all have been started here
