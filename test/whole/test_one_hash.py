"""Empty tensors whose shapes a stranger made to have one hash: they take about as long as others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import paddle
import pytest

from paddle_dist_ckpt import (
    LoadOptions,
    SaveOptions,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from test.cli.commands import run
from test.one_hash import colliding

COUNT, BELOW = 8000, 1 << 58
NUMBERS = itertools.count()
_Case = tuple[dict[str, Any], Path]


def _save(state: dict[str, Any], path: Path) -> None:
    save_state_dict(state, path, unique_id=0, options=SaveOptions(no_dist=True))


CALLS: dict[str, Callable[[_Case], object]] = {
    "save": lambda case: _save({**case[0], f"another {next(NUMBERS)}": 0}, case[1].with_name("new")),  # planned anew
    "load": lambda case: load_state_dict(*case, options=LoadOptions(no_dist=True)),
    "load whole": lambda case: load_merged_state_dict(case[1]),
    "read": lambda case: read_metadata(case[1]),
    "inspect": lambda case: run("inspect", case[1]),
    "diff": lambda case: run("diff", case[1], case[1]),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[_Case]:
    """Tensors of different shapes of one hash, and as many of different hashes, each with where they are saved."""
    shapes, rng = colliding(COUNT, 0, below=BELOW), Random(1)
    cases = []
    for these in (shapes, [(*shape[:-1], rng.randrange(BELOW)) for shape in shapes]):
        state = {f"w{i}": paddle.empty(list(shape)) for i, shape in enumerate(these)}
        cases.append((state, tmp_path_factory.mktemp("saved") / "checkpoint"))
        _save(*cases[-1])
    return cases


def _seconds(call: Callable[[_Case], object], case: _Case) -> float:
    start = time.process_time()
    call(case)
    return time.process_time() - start


@pytest.mark.parametrize("name", CALLS)
def test_shapes_of_one_hash_take_as_long_as_others(name: str, cases: list[_Case]) -> None:
    colliding_ones, others = cases
    call = CALLS[name]
    assert any(_seconds(call, colliding_ones) < 2.5 * _seconds(call, others) for _ in range(5))
