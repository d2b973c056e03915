"""A save is cut short at every single operation on its folder: a reader sees the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints, verify
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.files.names import parse_claim, parse_data_file
from paddle_dist_ckpt.testing import FaultyStorage
from test import strategies
from test.jobs import (
    SMALL,
    Killed,
    Watch,
    age,
    check_pieces,
    load_alone,
    load_on,
    rows_of,
    same_bits,
    save_alone,
    save_on,
    saves_in,
    sharded,
    try_save,
)

SHAPE = (30, 70)


def states_of(version: int, ranks: int, fill: bool = True) -> list[dict[str, Any]]:
    """A version's state_dicts: a cut tensor, a replicated one, a plain array, a value, a large value."""
    table = np.arange(SHAPE[0] * SHAPE[1], dtype="float32").reshape(SHAPE) + 10000 * version
    plain = np.full(40, version, "int64")
    return [
        {
            "cut": sharded(table, [rows_of(SHAPE, rank, ranks)], fill=fill),
            "copy": sharded(table, [rows_of(SHAPE, 0, 1)], fill=fill),
            "plain": plain if fill else np.zeros_like(plain),
            "n": version if fill else None,
            "text": f"{version} " * 3000 if fill else None,
        }
        for rank in range(ranks)
    ]


def version_in(folder: Path, unique_id: int | None = None) -> int:
    """The version that a reader finds, which must be whole."""
    (state,) = states_of(0, 1, fill=False)
    load_alone(state, folder, unique_id)
    version: int = state["n"]
    (expected,) = states_of(version, 1)
    check_pieces(state["cut"], expected["cut"].pieces[0])
    check_pieces(state["copy"], expected["copy"].pieces[0])
    assert same_bits(state["plain"], expected["plain"])
    assert state["text"] == expected["text"]
    assert verify(folder, unique_id).ok
    return version


def versions_in(folder: Path) -> dict[int, int]:
    """The version under each committed id."""
    return {unique_id: version_in(folder, unique_id) for unique_id in list_checkpoints(folder)}


def check_no_orphans(folder: Path) -> None:
    """Every data file belongs to a committed checkpoint, or to a claim, whose expiry will remove it."""
    committed = saves_in(folder)
    claimed = {parsed.save_id for path in folder.iterdir() if (parsed := parse_claim(path.name))}
    replaced = "".join(path.read_text() for path in folder.glob("*.claim"))
    for path in folder.iterdir():
        parsed = parse_data_file(path.name)
        if parsed is not None:
            assert parsed.save_id in committed or parsed.save_id in claimed or parsed.save_id in replaced, path.name


def check_clean(folder: Path) -> None:
    """Nothing is left but committed checkpoints."""
    committed = saves_in(folder)
    for path in folder.iterdir():
        parsed = parse_data_file(path.name)
        known = path.suffix == ".metadata" or (parsed is not None and parsed.save_id in committed)
        assert known, f"{path.name} is left"


def age_claims(folder: Path) -> None:
    """Make all that is there look old."""
    for path in folder.iterdir():
        age(path)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of saves; that they sync at the right moments is seen from the operations."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def prepared(tmp_path: Path, name: str, ranks: int) -> Path:
    """A folder with two checkpoints, of versions 1 and 2."""
    template = tmp_path / "template"
    if not template.exists():
        save_on(states_of(1, ranks), template)
        save_on(states_of(2, ranks), template)
    return shutil.copytree(template, tmp_path / name)


def cut_short(counts: dict[int, int], mode: str, shift: int = 0) -> list[tuple[int, int]]:
    """The operations to try, as rank and number; all of them with ``--long``.

    Without it, ranks 1 and 2 do alike, so that one of them will do; and each operation is cut short in one of the
    modes, the next in another.
    """
    if strategies.long_run:
        return [(rank, step) for rank, count in counts.items() for step in range(count)]
    modes = ("fail", "kill all") if len(counts) == 1 else ("fail", "kill the rank", "kill all")
    first = (shift + modes.index(mode)) % len(modes)
    return [(rank, step) for rank, count in counts.items() if rank != 1 for step in range(first, count, len(modes))]


def counted(tmp_path: Path, ranks: int, unique_id: int | None) -> dict[int, int]:
    """How many operations each rank does in the save that is then cut short."""
    watch = Watch([prepared(tmp_path, "dry", ranks)] * ranks)
    save_on(states_of(3, ranks), watch.storages(), unique_id)
    assert "publish" in {operation for _, operation, _ in watch.steps}
    return watch.count_by_rank()


def add_torn_temporary(watch: Watch, folder: Path) -> None:
    """If it struck before a publication, pretend that half of the temporary file was there already."""
    assert watch.happened is not None
    _, operation, name = watch.happened
    if operation != "publish":
        return
    if name.endswith(".claim"):
        (folder / f"{name}.tmp").write_bytes(b'{"sav')
    for claim in folder.glob("*.claim"):
        if name.endswith(".metadata") and parse_claim(claim.name) and claim.stat().st_mtime:
            (folder / claim.name.replace(".claim", ".metadata.tmp")).write_bytes(b'{"format":"paddle')


@pytest.mark.parametrize("unique_id", [None, 1])
@pytest.mark.parametrize(
    ("ranks", "mode"), [(1, "fail"), (1, "kill all"), (3, "fail"), (3, "kill the rank"), (3, "kill all")]
)
def test_a_save_cut_short_anywhere(tmp_path: Path, ranks: int, unique_id: int | None, mode: str) -> None:
    old, new = {0: 1, 1: 2}, {0: 1, 1: 2, 2: 3} if unique_id is None else {0: 1, 1: 3}
    problems = []
    for rank, step in cut_short(counted(tmp_path, ranks, unique_id), mode, shift=unique_id or 0):
        folder = prepared(tmp_path, f"{rank}-{step}", ranks)
        error = (lambda: OSError((errno.ENOSPC, errno.EIO)[step % 2], "injected")) if mode == "fail" else Killed  # noqa: B023
        kills = {"fail": "none", "kill the rank": "rank", "kill all": "all"}[mode]
        watch = Watch([folder] * ranks, (rank, step), error, kills, tmp_path / "frozen" / f"{rank}-{step}")
        results = try_save(states_of(3, ranks), watch.storages(), unique_id)
        if watch.happened is None:
            continue  # this run did a step less than the dry one
        if mode == "kill all":
            frozen = tmp_path / "frozen" / f"{rank}-{step}" / folder.name
            add_torn_temporary(watch, frozen)
            folder = frozen
        try:
            seen = check_outcome(folder, results, rank, old, new, mode)
            check_later_saves(folder, ranks, seen)
        except Exception as failure:
            problems.append(f"rank {rank}, step {step} {watch.happened}: {type(failure).__name__}: {failure}")
        shutil.rmtree(tmp_path / f"{rank}-{step}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)


def check_outcome(
    folder: Path, results: list[Any], rank: int, old: dict[int, int], new: dict[int, int], mode: str
) -> dict[int, int]:
    """Assert that a reader sees one whole state, and that the ranks were told which. Returns the versions seen."""
    seen = versions_in(folder)
    assert seen in (old, new)
    check_no_orphans(folder)
    raised = [isinstance(result, BaseException) for result in results]
    if seen == old:
        assert all(raised), f"not committed, but some rank says it was: {results}"
        for result in results:
            if mode != "kill all" and not isinstance(result, Killed):
                assert isinstance(result, RankFailureError)
                assert rank in result.failures, f"{result!r} does not blame rank {rank}"
                assert "injected" in str(result) or mode != "fail"
    elif mode == "fail":
        assert not any(raised), f"committed, but raised: {results}"
    return seen


def check_later_saves(folder: Path, ranks: int, seen: dict[int, int]) -> None:
    """Assert that the next save works and spares what is fresh, and that a later one removes what is old."""
    before = {path.name for path in folder.iterdir() if parse_data_file(path.name)}
    saved = save_on(states_of(4, ranks), folder)[0].unique_id
    assert before <= {path.name for path in folder.iterdir()}, "a save that might still live has lost files"
    age_claims(folder)
    last = save_alone(*states_of(5, 1), folder).unique_id
    assert versions_in(folder) == {**seen, saved: 4, last: 5}
    check_clean(folder)


@pytest.mark.parametrize(("ranks", "mode"), [(1, "fail"), (1, "kill all"), (3, "fail"), (3, "kill the rank")])
def test_a_save_cut_short_while_it_cleans_up_after_dead_ones(tmp_path: Path, ranks: int, mode: str) -> None:
    """What it had taken upon itself to remove must not be forgotten."""
    problems = []
    for rank, step in cut_short(counted_after_dead(tmp_path, ranks), mode):
        folder = shutil.copytree(tmp_path / "dead", tmp_path / f"{rank}-{step}")
        error = (lambda: OSError(errno.ENOSPC, "injected")) if mode == "fail" else Killed
        kills = {"fail": "none", "kill the rank": "rank", "kill all": "all"}[mode]
        watch = Watch([folder] * ranks, (rank, step), error, kills, tmp_path / "frozen" / f"{rank}-{step}")
        try_save(states_of(3, ranks), watch.storages(), 1)
        if watch.happened is None:
            continue
        if mode == "kill all":
            folder = tmp_path / "frozen" / f"{rank}-{step}" / folder.name
        try:
            assert versions_in(folder) in ({0: 1, 1: 2}, {0: 1, 1: 3})
            for _ in range(2):
                age_claims(folder)
                save_alone(*states_of(4, 1), folder, 5)
            assert version_in(folder, 5) == 4
            check_clean(folder)
        except Exception as failure:
            problems.append(f"rank {rank}, step {step} {watch.happened}: {type(failure).__name__}: {failure}")
        shutil.rmtree(tmp_path / f"{rank}-{step}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)


def counted_after_dead(tmp_path: Path, ranks: int) -> dict[int, int]:
    """Make a folder with the remains of two saves, one that died before its commit and one after it."""
    folder = prepared(tmp_path, "dead", ranks)
    for operation, unique_id in (("sync", None), ("delete", 1)):
        dead: list[bool] = []

        def die(done: str, name: str, operation: str = operation, dead: list[bool] = dead) -> None:
            if dead or done == operation:
                dead.append(True)
                raise Killed

        try_save(states_of(2, ranks), FaultyStorage(folder, die), unique_id)
    age_claims(folder)
    assert len(list(folder.glob("*.claim"))) == 2
    assert versions_in(folder) == {0: 1, 1: 2}
    watch = Watch([shutil.copytree(folder, tmp_path / "dry")] * ranks)
    save_on(states_of(3, ranks), watch.storages(), 1)
    check_clean(tmp_path / "dry")
    return watch.count_by_rank()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", ["fail", "kill the rank"])
def test_a_save_to_folders_of_their_own_cut_short_anywhere(tmp_path: Path, victim: int, mode: str) -> None:
    """Each rank has its own disk; old files must go from all of them."""

    def homes(name: str) -> list[Path]:
        made = [tmp_path / name / str(rank) for rank in range(2)]
        save_on(states_of(1, 2), made, 5)
        return made

    dry = Watch(homes("dry"))
    save_on(states_of(2, 2), dry.storages(), 5)
    problems = []
    begin, stride = (0, 1) if strategies.long_run else (int(mode == "fail"), 2)
    for step in range(begin, dry.count_by_rank()[victim], stride):
        folders = homes(str(step))
        error = (lambda: OSError(errno.ENOSPC, "injected")) if mode == "fail" else Killed
        watch = Watch(folders, (victim, step), error, "none" if mode == "fail" else "rank")
        results = try_save(states_of(2, 2), watch.storages(), 5)
        if watch.happened is None:
            continue
        try:
            check_two_folders(folders, results, mode)
        except Exception as failure:
            problems.append(f"step {step} {watch.happened}: {type(failure).__name__}: {failure}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)


def check_two_folders(folders: list[Path], results: list[Any], mode: str) -> None:
    states = states_of(0, 2, fill=False)
    load_on(states, folders)
    version = states[0]["n"]
    assert version in (1, 2)
    for state, expected in zip(states, states_of(version, 2), strict=True):
        assert state["text"] == expected["text"]
        check_pieces(state["copy"], expected["copy"].pieces[0])
    raised = [isinstance(result, BaseException) for result in results]
    assert all(raised) if version == 1 else mode != "fail" or not any(raised), (version, results)
    for folder in folders:
        age_claims(folder)
    save_on(states_of(3, 2), folders)
    committed = saves_in(folders[0])
    for folder in folders:
        for path in folder.iterdir():
            parsed = parse_data_file(path.name)
            assert path.suffix == ".metadata" or (parsed and parsed.save_id in committed), f"{path} is left"


def test_running_out_of_room_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    watch = Watch([tmp_path])
    storages = [FaultyStorage(tmp_path, watch._hook(rank), free_bytes=5000) for rank in range(2)]
    for result in try_save(states_of(1, 2), storages, options=SMALL):
        assert isinstance(result, RankFailureError)
        assert "5,000 bytes free" in str(result)
    assert watch.names_of("create") == []
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_save_are_durable_before_it_is_committed(tmp_path: Path) -> None:
    watch = Watch([tmp_path] * 2)
    save_on(states_of(1, 2), watch.storages())
    steps = [(operation, name) for _, operation, name in watch.steps]
    commit = next(i for i, (operation, name) in enumerate(steps) if operation == "publish" and "metadata" in name)
    for name in watch.names_of("create"):
        written = max(i for i, step in enumerate(steps) if step == ("write", name))
        assert written < steps.index(("sync_file", name)) < commit
    last_file = max(i for i, (operation, _) in enumerate(steps) if operation == "sync_file")
    assert any(operation == "sync" for operation, _ in steps[last_file:commit]), "the folder is synced in between"
    claim = next(i for i, (operation, name) in enumerate(steps) if operation == "publish" and "claim" in name)
    assert claim < min(i for i, (operation, _) in enumerate(steps) if operation == "create")
