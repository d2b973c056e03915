"""What is saved: states that are a function of a version and nothing else, and what a reader finds of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dist_ckpt import list_checkpoints
from paddle_dist_ckpt.testing import shard_array
from test.jobs import alike, load_whole, rows_of

__all__ = ["LEFT_ALONE", "blank_states", "check_states", "states_of", "version_in", "version_of", "versions_in"]

_SHAPE = (24, 130)
LEFT_ALONE = -1
"""The version of targets that nothing was loaded into."""


@functools.lru_cache(maxsize=256)
def _whole(version: int) -> dict[str, Any]:
    """All of a version: what is cut, what every rank has, and values, of which one is so large that it has a shard."""
    rng = np.random.default_rng(version + 1)
    return {
        "cut": rng.integers(0, 2**32, _SHAPE, np.uint32).view(np.float32),
        "copy": rng.integers(0, 256, 5001, np.uint8),
        "plain": np.full(40, version, np.int64),
        "n": version,
        "text": f"{version} " * 3000,
    }


def states_of(version: int, ranks: int, fill: bool = True) -> list[dict[str, Any]]:
    """A version's state_dicts."""
    known = _whole(version)
    copy = shard_array(known["copy"], [rows_of((5001,), 0, 1)], fill)
    return [
        {
            "cut": shard_array(known["cut"], [rows_of(_SHAPE, rank, ranks)], fill),
            "copy": copy if fill else shard_array(known["copy"], [rows_of((5001,), 0, 1)], fill),
            "plain": known["plain"].copy(),
            "n": version if fill else None,
            "text": known["text"] if fill else None,
        }
        for rank in range(ranks)
    ]


def blank_states(ranks: int) -> list[dict[str, Any]]:
    """Targets for what any version has."""
    return states_of(LEFT_ALONE, ranks, fill=False)


def check_states(states: Sequence[dict[str, Any]]) -> int:
    """The version that has been loaded into these states, bit for bit, on every rank; or `LEFT_ALONE`."""
    versions = {LEFT_ALONE if state["n"] is None else state["n"] for state in states}
    assert len(versions) == 1, f"ranks have got several versions: {versions}"
    (version,) = versions
    expected = blank_states(len(states)) if version == LEFT_ALONE else states_of(version, len(states))
    for rank, (state, meant) in enumerate(zip(states, expected, strict=True)):
        for key, value in meant.items():
            found = state[key]
            if key in ("cut", "copy"):
                found, value = list(found.pieces), list(value.pieces)
            assert alike(found, value), f"rank {rank}: {key} is not that of version {version}"
    return version


def version_of(found: dict[Any, Any]) -> int:
    """The version that a state with whole tensors is, bit for bit."""
    version = found.get("n")
    assert isinstance(version, int), f"no version: {version!r}"
    assert alike(found, _whole(version)), f"a mix of version {version} and something else"
    return version


def version_in(folder: Path, unique_id: int | None = None) -> int:
    """The version that a reader finds in a folder. A load of all of it looks at every byte, as `verify` does."""
    return version_of(load_whole(folder, unique_id))


def versions_in(folder: Path) -> dict[int, int]:
    """The version under each committed id; the newest is what is found without an id."""
    ids = list_checkpoints(folder)
    return {unique_id: version_in(folder, None if unique_id == max(ids) else unique_id) for unique_id in ids}
