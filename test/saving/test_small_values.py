"""What can be saved of small Python values can be loaded, and what would be refused then is refused at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointError,
    PerRank,
    SaveOptions,
    UnsupportedValueError,
    read_metadata,
    rebuild_metadata,
    verify,
)
from paddle_dist_ckpt.storage.local import LocalStorage
from test.cli.commands import fails, run
from test.jobs import (
    data_files,
    errors_of,
    load_alone,
    load_on,
    load_whole,
    save_alone,
    save_on,
    try_load,
    try_save,
)

FREE = 1 << 20
ADVICE = "Store them as numpy arrays"


@pytest.fixture(autouse=True)
def _little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.files.room._FREE", FREE)


def numbers(cost: int) -> list[int]:
    """A list that costs about so much to be decoded."""
    return [1] * (cost // 40)


def tensor(nbytes: int) -> np.ndarray:
    return np.arange(nbytes // 8, dtype=np.int64)


@pytest.mark.parametrize(
    "state",
    [
        {"v": numbers(FREE + FREE // 2)},
        {"a": numbers(FREE), "b": {"c": numbers(FREE // 4)}},
        {f"v{i}": numbers(5_000) for i in range(200)},
        {"w": tensor(FREE // 8), "v": numbers(FREE + FREE // 2)},
        {"mine": PerRank(numbers(FREE + FREE // 2))},
    ],
    ids=["one", "several", "inline", "a tensor that is too small", "a rank's own"],
)
def test_values_that_would_be_refused_are_refused_at_once(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedValueError, match=ADVICE):
        save_alone(state, tmp_path / "alone")
    assert not list((tmp_path / "alone").iterdir())
    for error in errors_of(try_save([state] * 2, tmp_path / "two"), UnsupportedValueError):
        assert ADVICE in str(error)
    assert not list((tmp_path / "two").iterdir())


def test_beside_tensors_there_is_room_for_as_many_as_these_have_bytes(tmp_path: Path) -> None:
    state = {"w": tensor(4 * FREE), "v": numbers(3 * FREE), "s": {f"v{i}": numbers(4_000) for i in range(100)}}
    save_alone(state, tmp_path)
    assert verify(tmp_path).ok
    assert verify(tmp_path / "0.metadata").ok
    found = load_whole(tmp_path)
    assert found["v"] == state["v"]
    assert found["s"] == state["s"]
    run("cat", tmp_path, "v")
    run("inspect", tmp_path)
    assert read_metadata(tmp_path).unique_id == 0
    (tmp_path / "0.metadata").unlink()
    rebuild_metadata(tmp_path)
    assert load_whole(tmp_path)["v"] == state["v"]


def test_equal_values_of_ranks_count_once_and_their_own_each(tmp_path: Path) -> None:
    save_on([{"v": numbers(FREE * 3 // 4)}] * 4, tmp_path / "equal")
    own = [{"v": PerRank(numbers(FREE * 3 // 4))} for _ in range(4)]
    assert all(ADVICE in str(error) for error in errors_of(try_save(own, tmp_path / "own"), UnsupportedValueError))
    save_on([{"w": tensor(3 * FREE)} | state for state in own], tmp_path / "own")
    targets = [{"w": tensor(3 * FREE), "v": PerRank(None)} for _ in range(4)]
    load_on(targets, tmp_path / "own")
    assert targets[3]["v"] == own[3]["v"]


def test_user_metadata_count(tmp_path: Path) -> None:
    options = SaveOptions(user_metadata={"seen": numbers(FREE * 3 // 4)})
    with pytest.raises(UnsupportedValueError, match=ADVICE):
        save_alone({"n": 1}, tmp_path, options=options)
    save_alone({"n": 1, "w": tensor(FREE)}, tmp_path, options=options)
    assert len(read_metadata(tmp_path).user_metadata["seen"]) > 1000


def thinned(folder: Path) -> None:
    """Make all of its tensor a hole, as somebody may who wants a checkpoint to cost more than it is."""
    (file,) = data_files(folder)
    data = file.read_bytes()
    with file.open("r+b") as stream:
        stream.truncate(8 + int.from_bytes(data[:8], "little"))
        stream.truncate(len(data))
        start = data.rindex(b"[1,1,1")
        stream.seek(start)
        stream.write(data[start : data.index(b"]", start) + 1])


@pytest.mark.parametrize("inline", [False, True])
def test_bytes_that_are_not_there_make_no_room(tmp_path: Path, inline: bool) -> None:
    values = {f"v{i}": numbers(4_000) for i in range(300)} if inline else {"v": numbers(2 * FREE)}
    save_alone({"w": np.zeros(4 * FREE, np.uint8), **values}, tmp_path / "0")
    load_whole(tmp_path / "0")
    if inline:
        data_files(tmp_path / "0")[0].unlink()
    else:
        thinned(tmp_path / "0")
    for error in errors_of(try_load([{"v": None}, {"v": None}], tmp_path / "0"), CheckpointError):
        assert "more objects than its size has room for" in str(error)
    with pytest.raises(CheckpointCorruptedError, match="more objects"):
        load_whole(tmp_path / "0", flat=True)
    if inline:
        with pytest.raises(CheckpointCorruptedError, match="more objects"):
            read_metadata(tmp_path / "0")
    else:
        assert "more objects" in "".join(verify(tmp_path / "0").problems)
        assert "more objects" in fails("cat", tmp_path / "0", "v")


def test_the_files_are_not_looked_at_where_values_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({"w": tensor(FREE), "v": numbers(FREE // 2), "n": 1}, tmp_path)
    for module in ("loading.load_rounds", "folder.checkpoint", "folder.stored_values"):
        monkeypatch.setattr(f"paddle_dist_ckpt.{module}.bytes_on_disk", lambda storage, save_id: 1 // 0)
    target = {"v": None, "n": 0}
    load_alone(target, tmp_path)
    assert len(target["v"] or ()) == FREE // 80
    assert verify(tmp_path).ok


def test_a_rank_that_sees_no_file_of_it_loads_all_the_same(tmp_path: Path) -> None:
    save_alone({"w": tensor(4 * FREE), "v": numbers(3 * FREE)}, tmp_path / "a")
    targets: list[dict[str, Any]] = [{"v": None}, {"v": None}]
    results = try_load(targets, [tmp_path / "a", LocalStorage(tmp_path / "b")])
    assert not [result for result in results if isinstance(result, BaseException)], results
    assert targets[0] == targets[1]


def test_an_export_of_values_alone_is_one_that_can_be_loaded(tmp_path: Path) -> None:
    save_alone({"w": tensor(4 * FREE), "few": numbers(FREE // 2), "many": numbers(3 * FREE)}, tmp_path / "0")
    run("convert", tmp_path / "0", tmp_path / "few", "--to", "native", "--key", "few")
    assert len(load_whole(tmp_path / "few")["few"]) == FREE // 80
    assert ADVICE in fails("convert", tmp_path / "0", tmp_path / "many", "--to", "native", "--key", "many")
    run("convert", tmp_path / "0", tmp_path / "all", "--to", "native")
    assert len(load_whole(tmp_path / "all")["many"]) == 3 * FREE // 40
    shutil.rmtree(tmp_path / "all")
