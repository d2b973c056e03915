"""Some of what :mod:`.decoders` and :mod:`.hostile_files` do, and the budgets themselves."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paddle_dist_ckpt import read_metadata
from test import strategies
from test.jobs import load_whole
from test.strategies import some

from . import decoders, hostile_files
from .budgets import Cost, cost_of
from .hostile_files import RECIPES, problem_of
from .pickles import PICKLES

_NAMES = list(RECIPES)
# Those that took gigabytes or minutes; `python -m test.torture.run` has them all.
_CASES = (
    "a hole, cut by columns",
    "a little in every large block, cut by columns",
    "a hole for a value",
    "a hole behind .metadata",
    "a grid of 2**20 in 20 dimensions",
    "paths of 255 short parts",
    "lists of empty lists",
    "half as many numbers",
    "many arrays of items without bytes",
    "integers of one hash",
    "a text of empty lines",
    "a key of four megabytes",
    "a huge world_size",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of reads fail here, and say so."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_files_with_something_changed_are_refused_or_read(
    tmp_path: Path, request: pytest.FixtureRequest, part: int
) -> None:
    """20,000 of them, and a million with ``--long``."""
    outcomes: Counter[str] = Counter()
    for seed in range(part, 5000 if request.config.getoption("--long") else 100, 4):
        place = tmp_path / str(seed)
        place.mkdir()
        outcomes += decoders.attempt(seed, place)
    assert outcomes.total() >= 5000
    assert outcomes["refused"] > outcomes.total() // 4
    assert outcomes["read"] > outcomes.total() // 10


@pytest.mark.parametrize("name", _CASES)
def test_files_that_describe_more_than_they_hold_cost_what_they_hold(tmp_path: Path, name: str) -> None:
    """Each is given to a fifth of the readers, and each reader gets a fifth of them; ``--long`` tries all with all."""
    readers = list(hostile_files.READERS)
    chosen = readers if strategies.long_run else readers[_CASES.index(name) % 5 :: 5]
    assert hostile_files.attempt(_NAMES.index(name), tmp_path, chosen).total() == len(chosen) >= 3


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("numbers far from one", "load"),
        ("lists in lists, inline", "load"),
        ("numbers far from one, inline", "inspect in JSON"),
        ("a text of what nobody sees", "cat value in JSON"),
        ("times of many ranks", "report"),
        ("a layout for each of many tensors of two dimensions", "load"),
    ],
)
def test_what_one_reader_took_too_much_for(tmp_path: Path, name: str, reader: str) -> None:
    plain = name.removesuffix(", inline")
    place = _NAMES.index(plain) if plain == name else len(_NAMES) + hostile_files.INLINE.index(plain)
    assert hostile_files.attempt(place, tmp_path, [reader])["read"] == 1


@pytest.mark.parametrize(
    ("cost", "problem"),
    [
        (Cost("", (), 64 << 20, 0.5), None),
        (Cost("KeyError: 'x'", ("KeyError", "Exception"), 0, 0.1), "raised KeyError: 'x'"),
        (Cost("x", ("CheckpointCorruptedError", "CheckpointError"), 80 << 20, 0.1), "took 80 MiB"),
        (Cost("", (), 0, 999.0), "took 999.0 s"),
    ],
)
def test_what_is_not_allowed_is_found(cost: Cost, problem: str | None) -> None:
    assert problem_of(cost, 1 << 20) == problem


def _cost_of_pickle(read: Callable[[Path], object], content: bytes, folder: Path) -> Cost:
    for name, data in {"small": PICKLES["marks"](99), "large": content}.items():
        (folder / name).mkdir()
        (folder / name / "a.pdparams").write_bytes(data)
    return cost_of(read, folder / "small", folder / "large")


@pytest.mark.parametrize("name", ["one half of a surrogate pair", "what is no number"])
def test_what_is_small_in_a_pickle_and_large_in_json_keeps_the_budget(name: str, tmp_path: Path) -> None:
    content = PICKLES[name](1 << 20)
    assert problem_of(_cost_of_pickle(lambda path: len(load_whole(path)), content, tmp_path), len(content)) is None


@pytest.mark.parametrize("name", some(PICKLES, 3))
def test_small_pickles_made_to_be_expensive_keep_the_budget(name: str, tmp_path: Path) -> None:
    content = PICKLES[name](4 << 20)
    assert abs(len(content) - (4 << 20)) < 2 << 10, "as large as asked for, but for a part that does not fit"
    cost = _cost_of_pickle(lambda path: len(read_metadata(path).table.paths), content, tmp_path)
    assert problem_of(cost, len(content)) is None
