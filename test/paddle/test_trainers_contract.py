"""What trainers count on under install(), beside that they can save and load: what they open, pass and wait for."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    CheckpointNotFoundError,
    LocalStorage,
    Metadata,
    SaveOptions,
    SaveReport,
    UnsupportedValueError,
    drop_in,
    list_checkpoints,
    save_state_dict,
)
from paddle_dist_ckpt.drop_in import install, uninstall
from paddle_dist_ckpt.paddle_adapter.patches import newest_replacement
from test.paddle import cases_drop_in as cases
from test.paddle.versions import lacks
from test.ranks.pool import RankPool

RANKS = 2
CLEAR = "clear_async_save_task_queue"
LOAD_OWN, PADDLE_LOAD = dist.load_state_dict, paddle.load
has_merged = lacks(hasattr(dist, "load_merged_state_dict"), "has no paddle.distributed.load_merged_state_dict")


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    while newest_replacement() is not None:
        uninstall()
    assert (dist.load_state_dict, paddle.load) == (LOAD_OWN, PADDLE_LOAD)


def home_of(name: str) -> Any:
    """The module of Paddle that defines a function which paddle.distributed does not hand on; skips without one."""
    for place in ("flex_checkpoint.dcp.load_state_dict", "flex_checkpoint.dcp.save_state_dict"):
        module = dist
        for part in place.split("."):
            module = getattr(module, part, None)
        if hasattr(module, name):
            return module
    pytest.skip(f"this Paddle has no {name}")


# -- a `.metadata` that is opened


def test_paddle_load_of_a_metadata_gives_what_it_says(tmp_path: Path) -> None:
    with install():
        dist.save_state_dict({"model": {"w": paddle.ones([2, 3])}}, tmp_path / "step")
        (file,) = (tmp_path / "step").glob("*.metadata")
        for path in (file, str(file)):
            found = paddle.load(path)
            assert isinstance(found, Metadata)
            (shard,) = found.state_dict_metadata["model.w"]
            assert (shard.global_shape, shard.dtype) == ((2, 3), "float32")
            assert next(iter(found.storage_metadata)).tensor_id == "model.w"
            assert found.flat_mapping["model.w"] == ("model", "w")
        assert paddle.framework.io.load is paddle.load is paddle.framework.load
    with pytest.raises(ValueError, match="can not parse"):
        paddle.load(str(file))


def test_the_modules_of_paddle_can_go_through_what_a_metadata_says(tmp_path: Path) -> None:
    """As PaddleFleet's Trainer has them do, to see whether each rank has its moving averages in a file of its own."""
    managers = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.metadata_manager")
    utils: Any = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.utils")
    states = {"w.w_0": paddle.ones([2, 3]), "b": paddle.ones([])}
    with install():
        dist.save_state_dict(states, tmp_path)
        (file,) = tmp_path.glob("*.metadata")
        manager = managers.MetadataManager()
        manager.set_metadata_list([paddle.load(file)])
    assert sorted(key for key, _ in manager.local_tensor_metadata) == ["b", "w.w_0"]
    assert not manager.has_flattened_tensors
    assert not utils.check_resumable_locally(str(tmp_path), states, manager, False, None)


def test_paddle_load_of_everything_else_is_paddles(tmp_path: Path) -> None:
    paddle.save({"a": paddle.ones([2]), "n": 3}, str(tmp_path / "0.metadata"))
    paddle.save({"b": 5}, str(tmp_path / "x.pdparams"))
    with install():
        found = paddle.load(str(tmp_path / "0.metadata"), return_numpy=True)
        assert isinstance(found["a"], np.ndarray)
        assert found["n"] == 3
        assert paddle.load(str(tmp_path / "x.pdparams")) == {"b": 5}
        with pytest.raises(ValueError, match="missing.pdparams"):
            paddle.load(str(tmp_path / "missing.pdparams"))


def test_the_function_of_later_versions_reads_a_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "load_state_dict_metadata", lambda *given: asked.append(given), raising=False)
    with install():
        dist.save_state_dict({"w": paddle.ones([2])}, tmp_path)
        (file,) = tmp_path.glob("*.metadata")
        merged = {"v": []}
        merged.update(dist.load_state_dict_metadata(path=str(file), allow_full_load=False))  # as PaddleFormers has it
        assert merged == {"v": [], **paddle.load(file).state_dict_metadata}
        assert [shard.local_shape for shard in merged["w"]] == [(2,)]
        dist.load_state_dict_metadata("elsewhere/0.metadata")
    assert asked == [("elsewhere/0.metadata", True)]


@pytest.mark.parametrize("empty", [(), (1,), (0,), (0, 1)])
def test_there_is_one_metadata_whoever_has_nothing_and_however_often(
    pool: RankPool, tmp_path: Path, empty: tuple[int, ...]
) -> None:
    assert pool.run(cases.save_twice, str(tmp_path), RANKS, empty, ranks=RANKS) == [len(empty) < RANKS] * RANKS
    assert len(list(tmp_path.glob("*.metadata"))) == 1


# -- arguments of later versions


def test_a_number_of_workers_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = {"w": paddle.zeros([2])}
    with install(), caplog.at_level(logging.DEBUG, "paddle_dist_ckpt"):
        dist.save_state_dict({"w": paddle.ones([2])}, tmp_path)
        dist.load_state_dict(target, tmp_path, num_workers=4)
    assert target["w"].tolist() == [1, 1]
    assert "num_workers=4 changes nothing here" in caplog.text


@pytest.mark.parametrize("having", [[0], [1], [0, 1]])
def test_a_transform_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path, having: list[int]) -> None:
    for rank, (error, later) in enumerate(pool.run(cases.with_transform, str(tmp_path), RANKS, having, ranks=RANKS)):
        assert error == ("NotImplementedError" if rank in having else "RankFailureError")
        assert later == 3.0


# -- what no reader knows


@pytest.mark.parametrize("foreign", ["error", "former"])
def test_what_no_reader_knows(
    tmp_path: Path, foreign: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "load_state_dict", lambda *given, **named: asked.append((given, named)))
    (tmp_path / "weights.bin").write_bytes(b"of somebody else")
    target = {"w": paddle.zeros([2])}
    with install(foreign=foreign):
        if foreign == "error":
            with pytest.raises(CheckpointNotFoundError):
                dist.load_state_dict(target, tmp_path)
        else:
            assert dist.load_state_dict(target, tmp_path, safetensors=True, num_workers=1, unique_id=2) is None
            assert "is left to the function that was there before" in caplog.text
    assert asked == ([] if foreign == "error" else [((target, tmp_path), {"safetensors": True, "unique_id": 2})])
    monkeypatch.undo()


def test_what_no_reader_knows_is_left_to_the_former_function_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(cases.leave_to_former, str(tmp_path), RANKS, ranks=RANKS) == [["former"]] * RANKS


@has_merged
def test_merged_loads_are_left_to_the_former_function_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "load_merged_state_dict", lambda *given, **named: {"given": (given, named)})
    with install(foreign="former"):
        assert dist.load_merged_state_dict(tmp_path, "model") == {"given": ((tmp_path,), {"prefix": "model"})}
    monkeypatch.undo()


@pytest.mark.parametrize("writer", ["ours", "Paddle"])
def test_what_a_reader_knows_is_not_left_to_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    save = save_state_dict if writer == "ours" else dist.save_state_dict
    save({"a": paddle.ones([2])}, str(tmp_path))
    for name in {"load_state_dict", "load_merged_state_dict"} & vars(dist).keys():
        monkeypatch.setattr(dist, name, lambda *given, **named: pytest.fail("somebody else is asked"))
    with install(foreign="former"):
        with pytest.raises(CheckpointNotFoundError, match="unique_id 3"):
            dist.load_state_dict({"a": paddle.ones([2])}, tmp_path, unique_id=3)
        with pytest.raises(UnsupportedValueError):
            dist.load_state_dict({("a", 1): paddle.ones([2])}, tmp_path)
        if hasattr(dist, "load_merged_state_dict"):
            with pytest.raises(CheckpointNotFoundError, match="no key matches"):
                dist.load_merged_state_dict(tmp_path, prefix="b")
    monkeypatch.undo()


def test_a_bad_choice_replaces_nothing() -> None:
    with pytest.raises(ValueError, match="foreign must be"):
        install(foreign="pickle")  # type: ignore[arg-type]
    assert newest_replacement() is None


# -- what goes with the three functions


def test_saves_in_the_background_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, gate = home_of(CLEAR), threading.Event()
    create = LocalStorage.create

    def wait(self: LocalStorage, *given: Any, **named: Any) -> Any:
        assert gate.wait(60)
        return create(self, *given, **named)

    monkeypatch.setattr(LocalStorage, "create", wait)
    with install():
        dist.save_state_dict({"w": paddle.ones([2])}, tmp_path, async_save=True)
        assert list_checkpoints(tmp_path) == []
        threading.Timer(0.1, gate.set).start()
        getattr(home, CLEAR)()
        assert list_checkpoints(tmp_path) == [0]


def test_a_failure_in_the_background_is_told_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    home = home_of(CLEAR)
    monkeypatch.setattr(LocalStorage, "create", fail)
    with install():
        dist.save_state_dict({"w": paddle.ones([2])}, tmp_path, async_save=True)
        with pytest.raises(CheckpointError, match="No space left"):
            getattr(home, CLEAR)()
        getattr(home, CLEAR)()


def test_a_failure_in_the_background_is_told_when_the_other_saves_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are those of other groups of ranks, and what was begun under another install()."""
    home, ended, gate = home_of(CLEAR), list[int](), threading.Event()

    def fail() -> SaveReport:
        raise OSError(28, "No space left on device")

    def end() -> SaveReport:
        assert gate.wait(60)
        ended.append(1)
        return SaveReport("", 0, 0, 0, 0)

    def begun(finish: Callable[[], SaveReport]) -> AsyncSave:
        pending = AsyncSave("", finish)
        with monkeypatch.context() as patched:
            patched.setattr(drop_in, "save_with", lambda *given, **named: pending)
            dist.save_state_dict({}, tmp_path, async_save=True)
        pending.start()
        return pending

    with install():
        failed = begun(fail)
        with install():
            others = [begun(end) for _ in range(3)]
            threading.Timer(0.1, gate.set).start()
            assert failed.wait(60)
            with pytest.raises(CheckpointError, match="No space left"):
                getattr(home, CLEAR)()
            assert len(ended) == len(others)
            getattr(home, CLEAR)()


# -- folders that are walked through


def unique_names(folder: Path) -> set[str]:
    """The names of tensors in all safetensors below a folder, as a trainer gathers them, who takes none twice."""
    found: set[str] = set()
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
        if names & found:
            raise ValueError(f"{path}: {sorted(names & found)} are in another file")
        found |= names
    return found


def save_steps(folder: Path) -> None:
    """Save some steps as a trainer does, and its model for others."""
    layer = paddle.nn.Linear(3, 2)
    for step in range(3):
        for part in ("model_state", "master_weight"):
            dist.save_state_dict(layer.state_dict(), str(folder / f"checkpoint-{step}" / part))
    save_file({"weight": np.ones((3, 2))}, folder / "model.safetensors")


def test_a_walk_for_safetensors_meets_no_name_twice(tmp_path: Path) -> None:
    with install():
        save_steps(tmp_path)
        assert unique_names(tmp_path) == {"weight"}
        target = paddle.nn.Linear(3, 2)
        dist.load_state_dict(target.state_dict(), str(tmp_path / "checkpoint-2" / "model_state"))


def test_other_options_do_not_change_that_but_one_does(tmp_path: Path) -> None:
    with install(save_options=SaveOptions(timeout=60)):
        save_steps(tmp_path / "some")
    assert unique_names(tmp_path / "some") == {"weight"}
    with install(save_options=SaveOptions(data_suffix=".safetensors")):
        save_steps(tmp_path / "asked")
    with pytest.raises(ValueError, match="in another file"):
        unique_names(tmp_path / "asked")
