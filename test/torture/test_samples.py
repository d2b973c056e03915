"""A sample of every suite, so that a promise that is broken is seen before ``make torture`` is run."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paddle_dist_ckpt.folder import lease as lease_module
from paddle_dist_ckpt.folder.lease import Lease

from .relay import HARMS
from .scenarios import SCENARIOS
from .stops import PERIOD
from .suites import named

_REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Hundreds of saves fail here, and say so."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def tried(module: str, seeds: Iterable[int]) -> Counter[str]:
    """What has come of these seeds of a suite."""
    (suite,) = named(module)
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes += suite.try_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"python -m test.torture.run --suites {module} --seed {seed} --attempts 1") from error
    return outcomes


def tried_apart(module: str, count: int) -> str:
    """The same for a suite that forks, in a process that has one thread and no Paddle; returns what it prints."""
    command = ["-m", "test.torture.run", "--suites", module, "--attempts", str(count), "--workers", "1"]
    ended = subprocess.run([sys.executable, *command], cwd=_REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("scenario", range(len(SCENARIOS)))
def test_crash_states(scenario: int) -> None:
    outcomes = tried("crash_states", range(scenario, 6 * len(SCENARIOS), len(SCENARIOS)))
    assert outcomes.total() == 120
    assert outcomes["the new one, reported"]
    assert outcomes["the old one"] or outcomes["nothing"]


def test_kills() -> None:
    printed = tried_apart("kills", 60)
    assert "the old one" in printed
    assert "the new one" in printed


def test_stops_at_every_call() -> None:
    printed = tried_apart("stops", PERIOD)
    assert "both saved" in printed
    assert "the stopped one failed" in printed


def test_io_errors() -> None:
    outcomes = tried("io_errors", range(40))
    assert outcomes["refused"]
    assert outcomes["saved"]
    assert outcomes["load refused"]


@pytest.mark.parametrize("first", [0, 20, 40, 60])
def test_corruption(first: int) -> None:
    outcomes = tried("corruption", range(first, first + 20))
    assert outcomes.total() == 500
    assert outcomes["refused"] > 100
    assert outcomes["rebuilt"]


def test_mixes() -> None:
    outcomes = tried("mixes", range(6))
    assert outcomes["saved"] > 30
    assert outcomes["loaded"]
    assert outcomes["deleted"]


def test_interleavings() -> None:
    outcomes = tried("interleavings", range(60))
    assert outcomes["done"] > 60
    assert outcomes["refused"] > 10
    assert outcomes["killed"]


@pytest.mark.parametrize(("owner", "name"), [(Lease, "confirm"), (Lease, "take_on"), (lease_module, "take_over")])
def test_interleavings_find_what_a_lease_does_not_do(owner: Any, name: str) -> None:
    with mock.patch.object(owner, name), pytest.raises(AssertionError, match="suites interleavings --seed"):
        tried("interleavings", range(400))  # the first that finds it ends this


@pytest.mark.parametrize("kind", range(len(HARMS)))
def test_cuts(kind: int) -> None:
    (outcome,) = tried("cuts", [kind])
    assert outcome == "not reached" or outcome.startswith(f"{HARMS[kind]}: ")


@pytest.mark.long
def test_full_disks() -> None:
    printed = tried_apart("full_disks", 9)
    assert "refused" in printed or "cannot mount" in printed


@pytest.mark.long
def test_endurance() -> None:
    command = "import tempfile, pathlib, test.torture.endurance as e\n"
    command += "with tempfile.TemporaryDirectory() as folder: print(e.endure(2, pathlib.Path(folder), 600.0, 45))"
    ended = subprocess.run([sys.executable, "-c", command], cwd=_REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "'saved and loaded': 45" in ended.stdout
