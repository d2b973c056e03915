"""install() and uninstall(): what they replace and give back, and how the functions in the place of Paddle's behave."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import pickle
import pydoc
import re
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    LoadOptions,
    LocalStorage,
    SaveOptions,
    SaveReport,
    StateDictMismatchError,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from paddle_dist_ckpt.drop_in import install, uninstall
from paddle_dist_ckpt.folder import commit
from paddle_dist_ckpt.paddle_adapter.patches import newest_replacement
from test.paddle import cases_drop_in as cases
from test.paddle.versions import FROM_LOCAL, lacks
from test.ranks.fresh import fresh_ranks, logs_of
from test.ranks.launcher import forked
from test.ranks.pool import RankPool
from test.strategies import draws

ALL = ("save_state_dict", "load_state_dict", "load_merged_state_dict")
NAMES = tuple(name for name in ALL if hasattr(dist, name))
OWN = {name: getattr(dist, name) for name in NAMES}
HOME = sys.modules[dist.load_state_dict.__module__]  # where Paddle defines two of them
has_merged = lacks("load_merged_state_dict" in NAMES, "has no paddle.distributed.load_merged_state_dict")
has_aoa = lacks("aoa_config" in inspect.signature(dist.load_state_dict).parameters, "has no aoa_config")
saves_by_id = lacks("unique_id" in inspect.signature(dist.save_state_dict).parameters, "saves without ids")


@pytest.fixture(autouse=True)
def _paddle_is_left_as_it_was() -> Iterator[None]:
    before = attributes()
    yield
    left = newest_replacement()
    while newest_replacement() is not None:
        uninstall()
    assert left is None
    assert attributes() == before


def attributes() -> dict[tuple[str, str], int]:
    """What the modules of paddle.distributed have, by identity."""
    modules = [(n, m) for n, m in list(sys.modules.items()) if n.split(".")[:2] == ["paddle", "distributed"]]
    return {(name, key): id(value) for name, module in modules for key, value in vars(module).items() if key in ALL}


def state(number: float) -> dict[str, Any]:
    return {"model": {"w": paddle.full([3], number), "encoder.b": paddle.full([2], number)}}


def value_in(folder: Path) -> float:
    target = state(0)
    load_state_dict(target, folder)
    return float(target["model"]["w"][0])


# -- what is replaced, and given back


def test_it_is_there_within_the_block_alone(tmp_path: Path) -> None:
    with install():
        assert not {getattr(dist, name) for name in NAMES} & set(OWN.values())
        assert isinstance(dist.save_state_dict(state(1), tmp_path), SaveReport)
    assert [getattr(dist, name) for name in NAMES] == list(OWN.values())


def test_no_module_of_paddle_distributed_keeps_the_former_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("paddle.distributed.made_up")
    module.under_another_name = dist.save_state_dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = {id(function) for function in OWN.values()}
    with install():
        modules = [loaded for name, loaded in list(sys.modules.items()) if name.startswith("paddle.")]
        kept = [(loaded, key) for loaded in modules for key, value in list(vars(loaded).items()) if id(value) in own]
        assert kept == []
        assert vars(module)["under_another_name"] is dist.save_state_dict
    assert vars(module)["under_another_name"] is OWN["save_state_dict"]


@has_merged
def test_a_function_that_is_not_handed_on_is_replaced_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "load_merged_state_dict")  # as in Paddle 3.0
    with install():
        assert not hasattr(dist, "load_merged_state_dict")
        assert vars(HOME)["load_merged_state_dict"] is not OWN["load_merged_state_dict"]
    assert vars(HOME)["load_merged_state_dict"] is OWN["load_merged_state_dict"]


@has_merged
def test_a_function_that_this_paddle_does_not_have_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "load_merged_state_dict")  # as in Paddle 2.6
    monkeypatch.delattr(HOME, "load_merged_state_dict")
    before = attributes()
    with install():
        assert attributes().keys() == before.keys()
        assert dist.load_state_dict is not OWN["load_state_dict"]
    assert attributes() == before


def test_the_functions_can_be_pickled_as_those_of_paddle() -> None:
    """For a pool of processes that is given one, such as ``paddle.load``."""
    names = [f"paddle.distributed.{name}" for name in NAMES] + ["paddle.load"]
    own = [pickle.dumps(pydoc.locate(name)) for name in names]
    for _ in range(2):  # one installed over another as well
        install()
        ours = [pydoc.locate(name) for name in names]
        assert [pickle.dumps(function) for function in ours] == own  # a process without install() finds Paddle's
        assert [pickle.loads(data) for data in own] == ours
    uninstall()
    uninstall()


def test_installed_twice_it_is_uninstalled_twice(tmp_path: Path) -> None:
    install("next")
    first = dist.save_state_dict
    install("paddle")
    assert dist.save_state_dict is not first
    assert [dist.save_state_dict(state(i), tmp_path).unique_id for i in range(2)] == [0, 0]
    uninstall()
    assert dist.save_state_dict is first
    assert [dist.save_state_dict(state(i), tmp_path).unique_id for i in range(2)] == [1, 2]
    uninstall()
    assert dist.save_state_dict is OWN["save_state_dict"]
    uninstall()  # of nothing


def test_a_block_takes_off_its_own(tmp_path: Path) -> None:
    with install("next"):
        outer = dist.save_state_dict
        with install():
            uninstall()
            assert dist.save_state_dict is outer
        assert dist.save_state_dict is outer, "what was taken off before is not taken off again"
        with pytest.raises(KeyError), install():
            raise KeyError
        assert dist.save_state_dict is outer


def test_blocks_may_end_in_any_order(tmp_path: Path) -> None:
    first, second, third = install("next"), install("paddle"), install("next")
    last = dist.save_state_dict
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert dist.save_state_dict is last
    third.__exit__(None, None, None)
    assert dist.save_state_dict is OWN["save_state_dict"]


def test_what_somebody_else_has_put_there_before_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(dist, "save_state_dict", theirs)
    with install():
        assert dist.save_state_dict is not theirs
    assert dist.save_state_dict is theirs


@has_merged
def test_what_somebody_else_has_put_over_it_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    called = []
    handle = install()
    ours = dist.load_merged_state_dict

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return ours(*args, **kwargs)

    dist.load_merged_state_dict = theirs
    try:
        dist.save_state_dict(state(4), tmp_path / "ours")
        assert sorted(dist.load_merged_state_dict(tmp_path / "ours")) == ["model.encoder.b", "model.w"]
        uninstall()
        assert dist.load_merged_state_dict is theirs
        assert "load_merged_state_dict was replaced by somebody else meanwhile" in caplog.text
        dist.save_state_dict({"w": paddle.full([2], 5.0)}, str(tmp_path / "paddle"))
        (loaded,) = dist.load_merged_state_dict(str(tmp_path / "paddle")).values()  # through ours, Paddle's
        assert loaded.tolist() == [5.0, 5.0]
        assert len(called) == 2
        handle.__exit__(None, None, None)
        assert dist.load_merged_state_dict is theirs
    finally:
        dist.load_merged_state_dict = OWN["load_merged_state_dict"]


def test_several_threads_may_replace_and_give_back_at_once() -> None:
    found, times = [], draws(3, 10)

    def work() -> None:
        for _ in range(times):
            with install():
                found.append(dist.save_state_dict is not OWN["save_state_dict"])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * (4 * times)
    assert newest_replacement() is None
    assert {name: getattr(dist, name) for name in NAMES} == OWN


def test_who_still_has_our_function_calls_the_former_one(tmp_path: Path) -> None:
    with install():
        held = dist.save_state_dict
    held({"w": paddle.ones([2])}, str(tmp_path))
    assert list(tmp_path.glob("*.distcp"))
    assert read_metadata(tmp_path).format == "paddle"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"unique_id_policy": "newest"}, ValueError),
        ({"foreign": "formerly"}, ValueError),
        ({"save_options": LoadOptions()}, TypeError),
        ({"load_options": {"strict": False}}, TypeError),
    ],
)
def test_bad_arguments_replace_nothing(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        install(**arguments)
    assert dist.save_state_dict is OWN["save_state_dict"]


# -- how it is called

SAVE = ["state_dict", "path", "process_group", "coordinator_rank"]  # since Paddle 2.6
LOAD = [*SAVE, "unique_id", "offload", "mw_name_compatibility"]  # since 3.0
LATER = ["load_transform", "num_workers"]  # than 3.3
MERGED = ["path", "prefix", "unique_id", "offload"]


@has_merged
@pytest.mark.parametrize(
    "wrong", [{"load_path": "/nowhere"}, {"skip_postfix_list": 5}, {"aoa_config": "x -> y"}], ids=str
)
def test_a_merge_that_is_wrong_on_one_rank_is_so_on_all(pool: RankPool, tmp_path: Path, wrong: dict[str, Any]) -> None:
    for merged, after in pool.run(cases.merge_wrongly, str(tmp_path), 2, wrong, ranks=2):
        assert merged.error in ("_FolderNotFoundError", "RankFailureError", "TypeError")
        assert re.search("no folder /nowhere|'int' object is not iterable|must be a mapping, not str", merged.message)
        assert merged.seconds < 30
        assert after.error is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("save_state_dict", [*SAVE, "unique_id", "async_save", "safetensors", "save_replicas"]),
        ("load_state_dict", [*LOAD, "aoa_config", "safetensors", "worker_groups", "comm_method", *LATER]),
        pytest.param("load_merged_state_dict", [*MERGED, "aoa_config", "safetensors"], marks=has_merged),
    ],
)
def test_parameters_are_those_of_paddle(name: str, parameters: list[str]) -> None:
    with install():
        ours = inspect.signature(getattr(dist, name)).parameters
        told = inspect.getfullargspec(getattr(dist, name))
    own = inspect.signature(OWN[name]).parameters
    assert list(ours) == parameters == [*told.args, *told.kwonlyargs]
    assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in ours.values()][: len(own)]


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("save_state_dict", "safetensors", True),
        ("save_state_dict", "save_replicas", True),
        ("load_state_dict", "safetensors", True),
        ("load_state_dict", "mw_name_compatibility", False),
        ("load_state_dict", "worker_groups", [None, None]),
        ("load_state_dict", "comm_method", "grouped_send_recv"),
        ("load_state_dict", "offload", True),
        pytest.param("load_merged_state_dict", "safetensors", True, marks=has_merged),
        pytest.param("load_merged_state_dict", "offload", True, marks=has_merged),
    ],
)
def test_arguments_that_change_nothing_are_taken(
    tmp_path: Path, name: str, argument: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_state_dict(state(1), tmp_path)
    with install(), caplog.at_level(logging.DEBUG, "paddle_dist_ckpt"):
        arguments = (tmp_path,) if name == "load_merged_state_dict" else (state(2), tmp_path)
        getattr(dist, name)(*arguments, **{argument: value})
    assert (f"{name}: {argument}={value!r} changes nothing here" in caplog.text) == (argument != "offload")
    assert value_in(tmp_path) == (2 if name == "save_state_dict" else 1)


@has_aoa
def test_an_aoa_config_is_done(tmp_path: Path) -> None:
    config = {"aoa_statements": ["w^T -> turned"]}
    with install():
        dist.save_state_dict({"w": paddle.arange(6.0).reshape([2, 3]), "b": paddle.ones([2])}, tmp_path)
        target = {"turned": paddle.zeros([3, 2]), "b": paddle.zeros([2])}
        dist.load_state_dict(target, tmp_path, aoa_config=config)
        merged = dist.load_merged_state_dict(tmp_path, aoa_config=config)
        plain = dist.load_merged_state_dict(tmp_path, aoa_config={})
    expected = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert target["turned"].tolist() == merged["turned"].tolist() == expected
    assert target["b"].tolist() == merged["b"].tolist() == [1.0, 1.0]
    assert set(merged) == {"turned", "b"}
    assert set(plain) == {"w", "b"}


@pytest.mark.parametrize(
    "config", [7, "a -> b", [], {"aoa_statements": "a -> b"}, {"aoa_statements": [7]}, {"aoa_statement": ["w^T -> w"]}]
)
def test_an_aoa_config_of_another_form_is_refused(tmp_path: Path, config: Any) -> None:
    with install():
        dist.save_state_dict(state(1), tmp_path)
        target = state(0)
        with pytest.raises(TypeError, match="aoa_config must"):
            dist.load_state_dict(target, tmp_path, aoa_config=config)
    assert not target["model"]["w"].any()


def test_options_are_used(tmp_path: Path) -> None:
    with install(save_options=SaveOptions(user_metadata={"run": 7})):
        dist.save_state_dict(state(1), tmp_path)
        target = {**state(0), "more": paddle.zeros([1])}
        with pytest.raises(StateDictMismatchError, match="more"):
            dist.load_state_dict(target, tmp_path)
        with install(load_options=LoadOptions(strict=False)):
            assert len(dist.load_state_dict(target, tmp_path).skipped) == 1
    assert target["model"]["w"].tolist() == [1, 1, 1]
    assert read_metadata(tmp_path).user_metadata == {"run": 7}


@pytest.mark.parametrize("call", ["load", "former", pytest.param("merge", marks=has_merged), "paddle.load"])
def test_a_disk_that_does_not_answer_is_given_up(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever is read first, as ``progress_timeout`` says."""
    answers = threading.Event()
    with install(foreign="former" if call == "former" else "error", load_options=LoadOptions(progress_timeout=0.3)):
        dist.save_state_dict(state(1), tmp_path / "saved")
        read = LocalStorage.read
        monkeypatch.setattr(LocalStorage, "read", lambda self, *of: (answers.wait(5), read(self, *of))[1])
        try:
            with pytest.raises(CheckpointTimeoutError, match=r"reading .*0\.metadata has not returned for 0\.3 s"):
                if call == "merge":
                    home: Any = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.load_state_dict")
                    home.merge_sharded_state_dict(tmp_path / "saved", tmp_path / "merged")
                elif call == "paddle.load":
                    paddle.load(str(tmp_path / "saved" / "0.metadata"))
                else:
                    dist.load_state_dict(state(0), tmp_path / "saved")
        finally:
            answers.set()


@has_merged
def test_it_works_in_static_mode(tmp_path: Path) -> None:
    with install():
        saved, target = state(3), state(0)
        paddle.enable_static()
        try:
            dist.save_state_dict(saved, tmp_path)
            dist.load_state_dict(target, tmp_path)
            merged = dist.load_merged_state_dict(tmp_path)
            assert not paddle.in_dynamic_mode()
        finally:
            paddle.disable_static()
    assert target["model"]["w"].tolist() == merged["model.w"].tolist() == [3, 3, 3]


@has_merged
def test_a_merged_load_returns_flat_keys_as_paddle_does(tmp_path: Path) -> None:
    flat = {"model.w": paddle.full([3], 1.0), "model.encoder.b": paddle.full([2], 1.0), "modelling": paddle.ones([1])}
    dist.save_state_dict(flat, str(tmp_path / "paddle"))
    prefixes = (None, "", "model", "model.encoder")
    own = [dist.load_merged_state_dict(str(tmp_path / "paddle"), prefix) for prefix in prefixes]
    assert own[2].pop("ing").tolist() == [1.0], "which is what Paddle leaves of 'modelling'"
    with install():
        dist.save_state_dict({**state(1), "modelling": flat["modelling"]}, tmp_path / "ours")
        ours = [dist.load_merged_state_dict(tmp_path / "ours", prefix) for prefix in prefixes]
        for found, expected in zip(ours, own, strict=True):
            assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in expected.items()}
        with pytest.raises(CheckpointNotFoundError, match="no key matches"):
            dist.load_merged_state_dict(tmp_path / "ours", "optimizer")


# -- which checkpoint a save without an id makes


@saves_by_id
def test_the_newest_checkpoint_is_replaced(tmp_path: Path) -> None:
    dist.save_state_dict({"w": paddle.ones([2])}, str(tmp_path / "paddle"), unique_id=3)
    dist.save_state_dict({"w": paddle.ones([2])}, str(tmp_path / "paddle"))
    assert sorted(path.name for path in (tmp_path / "paddle").glob("*.distcp")) == ["0_3.distcp"], "so does Paddle"
    with install():
        asked = (None, None, 3, None, 1, None)
        ids = [dist.save_state_dict(state(1), tmp_path, unique_id=unique_id).unique_id for unique_id in asked]
    assert ids == [0, 0, 3, 3, 1, 3]
    assert list_checkpoints(tmp_path) == [0, 1, 3]


def test_a_folder_that_is_saved_to_again_and_again_does_not_grow(tmp_path: Path) -> None:
    with install():
        for i in range(5):
            dist.save_state_dict(state(i), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert value_in(tmp_path) == 4


@saves_by_id
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_paddles_is_put_aside_by_the_save_that_stands_for_it(tmp_path: Path, background: bool) -> None:
    """Trainers that save a step again, after a resume from an earlier one, insist on one `.metadata`."""
    for unique_id in (0, 1):
        dist.save_state_dict(state(unique_id), tmp_path, unique_id=unique_id)
    theirs = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with install():
        for i in (5, 6):
            saved = dist.save_state_dict(state(i), tmp_path, async_save=background)
            assert (saved.result() if background else saved).unique_id == 2
        assert value_in(tmp_path) == 6
    assert sorted(path.name for path in tmp_path.glob("*.metadata")) == ["0.metadata", "2.metadata"]
    theirs["1.metadata.replaced"] = theirs.pop("1.metadata")
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs
    (tmp_path / "1.metadata.replaced").rename(tmp_path / "1.metadata")
    assert load_merged_state_dict(tmp_path, unique_id=1)["model"]["w"].tolist() == [1, 1, 1]


@saves_by_id
@pytest.mark.parametrize("how", ["is gone", "process ends"])
def test_a_checkpoint_of_paddles_that_could_not_be_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Either there is nothing left to do, or the next save does it when the claim of the dead one has expired."""
    dist.save_state_dict(state(0), tmp_path)

    find_out = commit._aftermath

    def interfere(*args: Any) -> commit.Aftermath:
        if how == "process ends":
            raise OSError("as good as dead")
        (tmp_path / "0.metadata").unlink()
        return find_out(*args)

    with install():
        with monkeypatch.context() as patched:
            patched.setattr(commit, "_aftermath", interfere)
            dist.save_state_dict(state(1), tmp_path)
        claims = list(tmp_path.glob("*.claim"))
        assert len(claims) == (how == "process ends")
        for claim in claims:
            os.utime(claim, (0, 0))
        dist.save_state_dict(state(2), tmp_path)
    assert [path.name for path in tmp_path.glob("*.metadata")] == ["1.metadata"]
    assert not list(tmp_path.glob("*.claim"))
    assert value_in(tmp_path) == 2


@saves_by_id
@pytest.mark.parametrize("how", ["next", "another id", "its id", "failed"])
def test_a_checkpoint_of_paddles_that_nothing_stands_for_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    dist.save_state_dict(state(0), tmp_path)
    theirs = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with install(unique_id_policy="next" if how == "next" else "paddle"), monkeypatch.context() as patched:
        if how == "failed":
            patched.setattr(os, "link", lambda *args: os.stat("/nowhere"))
            with pytest.raises(OSError):
                dist.save_state_dict(state(1), tmp_path)
        elif how == "its id":
            with pytest.raises(ValueError, match="unique_id 0 is taken"):
                dist.save_state_dict(state(1), tmp_path, unique_id=0)
        else:
            dist.save_state_dict(state(1), tmp_path, unique_id=5 if how == "another id" else None)
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs


def test_all_are_kept_if_told_so(tmp_path: Path) -> None:
    with install(unique_id_policy="next"):
        assert [dist.save_state_dict(state(i), tmp_path).unique_id for i in range(3)] == [0, 1, 2]
        target = state(0)
        dist.load_state_dict(target, tmp_path, unique_id=1)
    assert target["model"]["w"].tolist() == [1, 1, 1]


def test_saves_in_the_background_replace_each_other(tmp_path: Path) -> None:
    with install():
        handles = [dist.save_state_dict(state(i), tmp_path, async_save=True) for i in range(3)]
        assert all(isinstance(handle, AsyncSave) for handle in handles)
        assert [handle.result().unique_id for handle in handles] == [0, 0, 0]
    assert value_in(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_fails_leaves_the_checkpoint_that_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with install():
        dist.save_state_dict(state(1), tmp_path)
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr(LocalStorage, "create", fail)
            dist.save_state_dict(state(2), tmp_path)
    assert value_in(tmp_path) == 1


def test_a_damaged_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    with install():
        dist.save_state_dict(state(1), tmp_path)
        (tmp_path / "0.metadata").write_bytes(b"\0" * 100)
        assert [dist.save_state_dict(state(i), tmp_path).unique_id for i in (2, 3)] == [1, 1]
    assert (tmp_path / "0.metadata").read_bytes() == b"\0" * 100
    assert value_in(tmp_path) == 3


@has_merged
def test_an_old_checkpoint_is_brought_over(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    saved = {"w": paddle.arange(6, dtype="float32").reshape([2, 3]), "b": paddle.full([3], 2.0)}
    dist.save_state_dict(dict(saved), str(old))
    save_state_dict(dist.load_merged_state_dict(str(old)), new)
    shutil.rmtree(old)
    target = {key: paddle.zeros_like(value) for key, value in saved.items()}
    with install():
        dist.load_state_dict(target, new)
    for key, value in saved.items():
        np.testing.assert_array_equal(target[key], value)


# -- on ranks


@lacks(FROM_LOCAL, "has keys that are numbers of the run in state_dict() of shard_optimizer")
def test_a_trainer_that_knows_only_paddle_goes_on_in_another_layout(tmp_path: Path) -> None:
    ends = fresh_ranks(4, cases.train_and_resume, str(tmp_path))
    assert [end.exit_code for end in ends] == [0] * 4, logs_of(ends)
    for end in ends:
        found = end.result
        np.testing.assert_allclose(found["resumed"], found["uninterrupted"], rtol=1e-4)
        assert not np.allclose(found["anew"], found["uninterrupted"], rtol=1e-2)
        assert found["checkpoints"] == [0], "the second save has replaced the first"
        first, second = found["names"]
        assert len(first) == len(second)
        assert not set(first) & set(second), "the runs call their variables differently"


def test_the_coordinator_alone_decides_which_is_the_newest(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(cases.newest_of_the_coordinator, str(tmp_path), 3, ranks=3)
    assert [saved for saved, _ in results] == [[4, 5, 5]] * 3
    assert [left for _, left in results] == [[3, 4, 5], [3, 9], [3, 9]]


@pytest.mark.parametrize("having", [[0], [2], [0, 2]])
def test_an_aoa_config_that_some_ranks_lack_is_refused_on_every_rank(
    pool: RankPool, tmp_path: Path, having: list[int]
) -> None:
    results = pool.run(cases.with_aoa_config, str(tmp_path), 3, having, {"aoa_statements": ["x -> y"]}, ranks=3)
    for first, second in results:
        assert first.error == "ValueError"
        assert "passed aoa_config=" in first.message
        assert first.seconds < 30
        assert second.result == 3.0


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"aoa_statements": 7}, "TypeError", "aoa_statements"),
        ({"aoa_statement": ["x -> x"]}, "TypeError", "it has 'aoa_statement'"),
        pytest.param({"aoa_statements": ["a -> b"]}, "ValueError", "a should be assigned before", marks=has_aoa),
        pytest.param({"aoa_statements": ["x ->"]}, "ValueError", "aoa_config", marks=has_aoa),
    ],
)
def test_an_aoa_config_that_cannot_be_done_is_refused_on_every_rank(
    pool: RankPool, tmp_path: Path, config: dict[str, Any], error: str, text: str
) -> None:
    for first, second in pool.run(cases.with_aoa_config, str(tmp_path), 3, [0, 1, 2], config, ranks=3):
        assert first.error == error
        assert text in first.message
        assert first.seconds < 30
        assert second.result == 3.0


UNINITIALISED = """
import sys
import paddle.distributed as dist
from paddle_dist_ckpt import read_metadata
from paddle_dist_ckpt.drop_in import install
import paddle

assert not dist.is_initialized()
install()
dist.save_state_dict({"w": paddle.ones([4])}, sys.argv[1])
assert read_metadata(sys.argv[1]).world_size == dist.get_world_size() == 2
"""


def test_a_job_that_has_not_initialised_anything_is_initialised_as_by_paddle(tmp_path: Path) -> None:
    ends = forked(tmp_path, UNINITIALISED, tmp_path / "checkpoint")
    assert [code for code, _ in ends] == [0, 0], ends
    assert list_checkpoints(tmp_path / "checkpoint") == [0]


def test_paddle_load_takes_what_is_no_path_as_before(tmp_path: Path) -> None:
    paddle.save({"w": paddle.ones([2])}, str(tmp_path / "a.pdparams"))
    buffer = io.BytesIO((tmp_path / "a.pdparams").read_bytes())
    install()
    try:
        assert paddle.load(buffer)["w"].tolist() == [1, 1]
    finally:
        uninstall()


@pytest.mark.parametrize("path", [b"ckpt", "gs://bucket/ckpt", "a\0b"], ids=["bytes", "URL", "zero byte"])
def test_a_path_that_is_none_is_refused_before_the_former_function_is_asked(path: Any) -> None:
    install()
    try:
        with pytest.raises((TypeError, ValueError), match="path must"):
            dist.load_state_dict({"w": paddle.ones([2])}, path)
    finally:
        uninstall()


@pytest.mark.parametrize(
    ("name", "before", "behind"),
    [
        ("load_state_dict", [{"w": paddle.ones([2])}], []),
        pytest.param("load_merged_state_dict", [], [], marks=has_merged),
        pytest.param("merge_sharded_state_dict", [], ["merged"], marks=has_merged),
    ],
)
def test_a_folder_that_is_not_there_is_a_file_not_found_as_with_paddle(
    tmp_path: Path, name: str, before: list[Any], behind: list[Any]
) -> None:
    """By which programs know that there is nothing to resume from."""
    path = str(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        getattr(HOME, name)(*before, path, *behind)
    with install(), pytest.raises(FileNotFoundError, match=f"there is no folder {path}") as caught:
        getattr(HOME, name)(*before, path, *behind)
    assert isinstance(caught.value, CheckpointNotFoundError)


def test_it_is_so_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(cases.load_from_nowhere, str(tmp_path), 2, ranks=2) == [(True, False)] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_when_it_is_known_who_can_read_is_told_to_all(pool: RankPool, tmp_path: Path, victim: int) -> None:
    results = pool.run(cases.interrupted_when_it_knows_who_can_read, str(tmp_path), 2, victim, ranks=2)
    for rank, (raised, seconds, loaded) in enumerate(results):
        assert raised.startswith("KeyboardInterrupt" if rank == victim else "RankFailureError"), raised
        assert seconds < 30
        assert loaded == [1, 1]
