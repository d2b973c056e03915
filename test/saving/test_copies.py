"""Copies of distributed tensors that ranks hold beside what is written: one flipped bit in one of them is told of."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import UnsupportedValueError
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.saving import copies
from paddle_dist_ckpt.saving.present import present
from paddle_dist_ckpt.testing import NumpyAdapter, ShardedArray, SimulatedRank, run_ranks
from test.jobs import (
    all_ok,
    errors_of,
    everything,
    laid_out,
    load_whole,
    make_array,
    same_bits,
    save_on,
    sharded,
    split_rows,
    try_save,
)
from test.strategies import some

BLOCK = 4096


def options(check: Any = "auto", **more: Any) -> SaveOptions:
    return SaveOptions(check_replicas=check, block_bytes=BLOCK, timeout=60, **more)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks of copies that are hashed."""
    sizes: list[int] = []
    digest = copies._digest

    def noted(block: Any) -> int:
        sizes.append(len(block))
        return digest(block)

    monkeypatch.setattr(copies, "_digest", noted)
    return sizes


def flip(state: dict[str, Any], key: str, at: int = 0) -> None:
    """Flip one bit of a tensor's first piece."""
    piece = state[key].pieces[0]
    index = np.unravel_index(at, piece.shape)
    raw = np.array(piece[index]).reshape(1).view(np.uint8)
    raw[0] ^= 1
    piece[index] = raw.view(piece.dtype)[0]


def replicated(ranks: int, how: str = "c") -> list[dict[str, Any]]:
    """A large tensor that is divided among all writers, and small ones, of which every rank has all."""
    large, small = make_array((512, 300)), make_array((5,), "bfloat16", 1)
    return [
        {name: sharded(array, everything(array), how) for name, array in (("large", large), ("small", small))}
        for _ in range(ranks)
    ]


@pytest.mark.parametrize(
    ("place", "ranks", "how"),
    some(
        itertools.product([("large", 0), ("large", 512 * 300 - 1), ("small", 3)], [2, 3, 4], ["c", "fortran", "inner"]),
        9,
    ),
)
def test_one_bit_of_a_replica(tmp_path: Path, place: tuple[str, int], ranks: int, how: str) -> None:
    key, at = place
    for bad in (0, ranks - 1):
        states = replicated(ranks, how)
        flip(states[bad], key, at)
        reports = save_on(states, tmp_path, options=options())
        (warning,) = reports[0].warnings
        assert all(report.warnings == reports[0].warnings for report in reports)
        head, line = warning.splitlines()
        assert head == "copies of distributed tensors differ among ranks:"
        others = ", ".join(str(rank) for rank in range(ranks) if rank != bad)
        if ranks == 2:
            assert line.startswith(f"{key}: rank 0 and rank 1 have different ones, none of them the most; rank ")
        else:
            assert line.startswith(f"{key}: rank {bad}, the minority, differs from ranks {others}; rank ")
        saved = load_whole(tmp_path)[key]
        is_bad = same_bits(saved, np.ascontiguousarray(states[bad][key].pieces[0]))
        assert (f"rank {bad}'s is the one written" in line) == is_bad
        assert line.endswith(", of the minority") == (is_bad and ranks > 2)


@pytest.mark.parametrize(
    ("flipped", "words"),
    [
        ([2, 3, 4], "ranks 0, 1 and rank 2 and rank 3 and rank 4 have different ones, none of them more than half"),
        ([3, 4], "ranks 3, 4, the minority, differ from ranks 0, 1, 2"),
    ],
)
def test_a_minority_is_named_if_more_than_half_agree(tmp_path: Path, flipped: list[int], words: str) -> None:
    states = replicated(5)
    for place, rank in enumerate(flipped):
        flip(states[rank], "small", place)
    (warning,) = save_on(states, tmp_path, options=options())[0].warnings
    assert f"small: {words}" in warning


def test_copies_of_shards_on_a_mesh(tmp_path: Path) -> None:
    """Rows cut over one dimension of a mesh, copied over the other: ranks 0, 2, 4 and ranks 1, 3, 5."""
    array = make_array((64, 200))
    halves = [Box((0, 0), (32, 200)), Box((32, 0), (32, 200))]
    states = [{"w": sharded(array, [halves[rank % 2]]), "x": sharded(array, everything(array))} for rank in range(6)]
    assert save_on(states, tmp_path, options=options())[0].warnings == ()
    flip(states[3], "w", 5000)
    (warning,) = save_on(states, tmp_path, options=options())[0].warnings
    assert "w: rank 3, the minority, differs from ranks 1, 5; rank" in warning
    assert "x:" not in warning


@pytest.mark.parametrize("coordinator", [0, 1])
def test_as_an_error_nothing_is_saved(tmp_path: Path, coordinator: int) -> None:
    save_on(replicated(3), tmp_path, 0, options("error"), coordinator=coordinator)
    before = sorted(path.name for path in tmp_path.iterdir())
    states = replicated(3)
    flip(states[2], "large")
    for error in errors_of(
        try_save(states, tmp_path, 1, options("error"), coordinator=coordinator), UnsupportedValueError
    ):
        assert "large: rank 2, the minority, differs from ranks 0, 1" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    save_on(replicated(3), tmp_path, 1, options("error"))


def test_nobody_compares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = replicated(2)
    flip(states[0], "large")
    assert save_on(states, tmp_path, options=options("off"))[0].warnings == ()
    assert not caplog.records


def test_bytes_are_compared_and_not_numbers(tmp_path: Path) -> None:
    """NaNs with the same payload are equal; 0.0 and -0.0 are not."""
    payload = np.array([0x7FC00123, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    states = [{"n": sharded(payload, everything(payload)), "e": sharded(payload[:0], [])} for _ in range(3)]
    assert save_on(states, tmp_path, options=options())[0].warnings == ()
    zeros = [np.zeros(4, np.float32), np.zeros(4, np.float32), np.full(4, -0.0, np.float32)]
    (warning,) = save_on([{"z": sharded(z, everything(z))} for z in zeros], tmp_path, options=options())[0].warnings
    assert "z: rank 2, the minority" in warning


def test_what_is_no_copy_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Addends of a partial tensor differ, and so do parts that overlap without being the same."""
    addends = [make_array((100, 100), "int32", rank) for rank in range(3)]

    def state(rank: int) -> dict[str, Any]:
        box = whole((100, 100))
        addend = ShardedArray((100, 100), DTYPES["int32"], [box], [addends[rank]], reduction=Reduction("sum", rank, 3))
        return {"sum": addend, "rows": split_rows(addends[0], 3)[rank], "n": 1}

    assert save_on([state(rank) for rank in range(3)], tmp_path, options=options())[0].warnings == ()
    assert not caplog.records


def test_plain_tensors_are_compared_once(tmp_path: Path, hashed: list[int]) -> None:
    """What is compared before anything is written is not hashed again."""
    array = make_array((512, 300))
    save_on([{"plain": array} for _ in range(3)], tmp_path, options=options())
    assert hashed == []
    save_on(replicated(3), tmp_path, options=options())
    assert sum(hashed) == 2 * (array.nbytes + 10), "each of three copies but the one that is written"


@pytest.mark.parametrize("in_background", [False, True])
def test_another_tenth_in_each_save(tmp_path: Path, in_background: bool, hashed: list[int]) -> None:
    """In ten saves every block is looked at once, and about as many in each."""
    states = replicated(2)
    flip(states[1], "large", 70_000)
    check = options("auto" if in_background else "sampled")
    found: list[str] = []
    counts: list[int] = []

    def work(rank: SimulatedRank) -> None:
        for unique_id in range(10):
            if in_background:
                report = rank.save_in_background(states[rank.rank], tmp_path, unique_id, check).result()
            else:
                report = rank.save(states[rank.rank], tmp_path, unique_id, check)
            if rank.rank == 0:
                found.extend(report.warnings)
                counts.append(sum(hashed))

    all_ok(run_ranks(2, work))
    assert len(found) == 1
    assert "large: rank 0 and rank 1" in found[0]
    nbytes = 512 * 300 * 4 + 10
    assert sum(hashed) == nbytes
    assert max(np.diff([0, *counts])) < nbytes // 5


def test_states_that_are_saved_in_turns_are_each_compared_in_full(tmp_path: Path, hashed: list[int]) -> None:
    states = replicated(2), [{"other": sharded(make_array((9, 9)), everything(make_array((9, 9))))} for _ in range(2)]
    flip(states[0][1], "large", 70_000)
    found: list[str] = []

    def work(rank: SimulatedRank) -> None:
        for unique_id in range(20):
            report = rank.save(states[unique_id % 2][rank.rank], tmp_path, unique_id, options("sampled"))
            if rank.rank == 0:
                found.extend(report.warnings)

    all_ok(run_ranks(2, work))
    assert len(found) == 1


def test_many_tensors_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = {f"w{i:02}": make_array((8, 8), seed=i) for i in range(30)}
    states = [{name: sharded(array, everything(array)) for name, array in arrays.items()} for _ in range(3)]
    for name in arrays:
        flip(states[1], name)
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        (warning,) = save_on(states, tmp_path, options=options())[0].warnings
    assert len(caplog.records) == 1
    assert len(warning.splitlines()) == 22
    assert warning.endswith("... and more")


def test_the_minority_of_plain_tensors_and_values(tmp_path: Path) -> None:
    """The coordinator's are saved, even if it is the one that has others."""
    array = make_array((50, 50))
    states = [{"w": array.copy(), "n": int(rank == 0)} for rank in range(3)]
    states[0]["w"][0, 0] += 1
    for warning in save_on(states, tmp_path, options=options("warn"))[0].warnings:
        assert "of ranks 1, 2 differ from the others'" in warning
        assert warning.endswith("(the minority: rank 0)")
        assert ("as a PerRank each rank's own would be kept" in warning) == warning.startswith("n:")
    (warning, _) = save_on(states[:2], tmp_path, options=options("warn"))[0].warnings
    assert "minority" not in warning
    for error in errors_of(try_save(states, tmp_path, options=options("auto")), UnsupportedValueError):
        assert str(error).endswith("w: differs on ranks 1, 2 (the minority: rank 0)")


def test_a_plan_that_is_used_again_compares_again(tmp_path: Path) -> None:
    states = replicated(3)

    def work(rank: SimulatedRank) -> list[int]:
        found = []
        for unique_id in range(4):
            if rank.rank == 1 and unique_id == 2:
                flip(states[1], "large", 1000)
            found.append(len(rank.save(states[rank.rank], tmp_path, unique_id, options()).warnings))
        return found

    assert all_ok(run_ranks(3, work)) == [[0, 0, 1, 1]] * 3


def test_layouts_in_memory_do_not_matter(tmp_path: Path) -> None:
    array = make_array((300, 77), "int16")
    states = [{"w": sharded(laid_out(array, "c"), everything(array), how)} for how in ("c", "fortran", "reversed")]
    assert save_on(states, tmp_path, options=options())[0].warnings == ()


def presented(states: list[dict[str, Any]], check: str) -> list[Any]:
    """What ranks get, or raise, that present what they have."""

    def work(rank: SimulatedRank) -> Any:
        with rank.hub.session("gather_state_dict", 60) as session:
            return present(lambda: states[rank.rank], session, rank.transport, NumpyAdapter(), check)

    return run_ranks(len(states), work)


@pytest.mark.parametrize("how", ["c", "inner"])
@pytest.mark.parametrize(("key", "at"), [("large", 0), ("large", 512 * 300 - 1), ("small", 3)])
def test_copies_of_what_is_gathered(key: str, at: int, how: str) -> None:
    """Nothing is written, and the parts of one tensor come of several ranks."""
    states = replicated(3, how)
    all_ok(presented(states, "error"))
    flip(states[1], key, at)
    for error in errors_of(presented(states, "error"), UnsupportedValueError):
        assert "copies of distributed tensors differ among ranks" in str(error)
        assert f"{key}: rank 1, the minority, differs from ranks 0, 2" in str(error)
    all_ok(presented(states, "off"))


def test_a_tenth_of_the_copies_of_what_is_gathered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = replicated(2)
    flip(states[1], "small", 3)
    for number in range(10):
        monkeypatch.setattr("paddle_dist_ckpt.saving.planned_save.secrets.randbits", lambda bits, n=number: n)
        all_ok(presented(states, "auto"))
    (record,) = caplog.records
    assert "small" in record.getMessage()
