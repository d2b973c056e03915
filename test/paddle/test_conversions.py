"""Every layout loads what every other one has saved, on real ranks."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from test.paddle import cases_conversions as cases
from test.paddle.layouts import LAYOUTS
from test.ranks.pool import RankPool
from test.strategies import some

NAMES = list(LAYOUTS)
# A sample for the slower ways: growing, shrinking, across kinds of cuts, and to itself.
SAMPLE = [
    ("one", "uneven4"),
    ("dp2", "mixed4"),
    ("mp2_rows", "mp2_columns"),
    ("pp2", "dp2_pp2_mp2"),
    ("uneven4", "mp2_rows"),
    ("mixed4", "mixed4"),
    ("ep4", "pp2_mp2"),
    ("dp2_pp2_mp2", "one"),
    ("dp2_pp2_mp2", "mixed4"),
]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a checkpoint that a layout has saved. Each layout saves once."""
    folders: dict[str, Path] = {}

    def folder(source: str) -> Path:
        if source not in folders:
            path = tmp_path_factory.mktemp(source)
            pool.run(cases.save, source, str(path), ranks=LAYOUTS[source].ranks)
            folders[source] = path
        return folders[source]

    return folder


@pytest.mark.parametrize(("source", "destination"), some(itertools.product(NAMES, NAMES), len(NAMES) ** 2 // 6))
def test_every_pair(pool: RankPool, saved: Callable[[str], Path], source: str, destination: str) -> None:
    problems = pool.run(cases.load, destination, str(saved(source)), "auto", ranks=LAYOUTS[destination].ranks)
    assert problems == [[]] * LAYOUTS[destination].ranks


@pytest.mark.parametrize("exchange", ["always", "never"])
@pytest.mark.parametrize(("source", "destination"), SAMPLE)
def test_exchange(pool: RankPool, saved: Callable[[str], Path], source: str, destination: str, exchange: str) -> None:
    problems = pool.run(cases.load, destination, str(saved(source)), exchange, ranks=LAYOUTS[destination].ranks)
    assert problems == [[]] * LAYOUTS[destination].ranks


@pytest.mark.parametrize(("source", "destination"), SAMPLE)
def test_every_rank_has_a_disk_of_its_own(pool: RankPool, tmp_path: Path, source: str, destination: str) -> None:
    pool.run(cases.save, source, str(tmp_path), True, ranks=LAYOUTS[source].ranks)
    assert [path.parent.name for path in tmp_path.glob("*/*.metadata")] == ["rank0"]
    _hand_on(tmp_path, LAYOUTS[source].ranks, LAYOUTS[destination].ranks)
    problems = pool.run(cases.load, destination, str(tmp_path), "auto", True, ranks=LAYOUTS[destination].ranks)
    assert problems == [[]] * LAYOUTS[destination].ranks


def _hand_on(path: Path, source: int, destination: int) -> None:
    """Give the files of ranks that are no more to those that are left; new ranks have not even a folder."""
    for rank in range(source):
        folder = path / f"rank{rank}"
        files = list(folder.glob("*.safetensors"))
        assert all(file.name.startswith(f"{rank}_") for file in files)
        if rank >= destination:
            for file in files:
                shutil.move(file, path / f"rank{rank % destination}")
            folder.rmdir()
