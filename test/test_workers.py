"""What a run of all tests does when one of its processes dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test.rooms import ROOT

TESTS = """
import os, pytest

# from test.ranks.pool import RankPool: so they are one unit of work
@pytest.mark.parametrize("number", range(4))
def test(number):
    if number == 1:
        os._exit(3)
"""


def test_no_worker_takes_the_place_of_one_that_has_died(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.pluginmanager.hasplugin("xdist"):
        pytest.skip("without pytest-xdist there are no workers")
    assert pytestconfig.getoption("maxworkerrestart") == "0"


@pytest.mark.long
def test_a_run_of_which_a_worker_dies_fails_and_ends(tmp_path: Path) -> None:
    (tmp_path / "test_death.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "test.conftest", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "-c", tmp_path / "pytest.ini", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "crashed while running 'test_death.py::test[1]'" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout
