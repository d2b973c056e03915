"""Saving and loading by one call: whatever a user passes, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    LocalStorage,
    PerRank,
    SaveReport,
    StateDictMismatchError,
    UnsupportedValueError,
    export,
    list_checkpoints,
    load,
    load_merged_state_dict,
    load_state_dict,
    one_call,
    read_metadata,
    save,
    save_state_dict,
)
from test.paddle.cases_one_call import arrays, assert_equal, job, numpy_of, train


def linear(number: float = 0.0) -> Any:
    layer = paddle.nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.set_value(paddle.full(parameter.shape, number))
    return layer


def adam(*layers: Any, number: float | None = None) -> Any:
    """An optimizer for all the layers; if a number is given, stepped without changing them, with that first moment."""
    optimizer = paddle.optimizer.Adam(0.1, parameters=[p for layer in layers for p in layer.parameters()])
    if number is not None:
        sum(((layer(paddle.ones([1, 3])) * 0).sum() for layer in layers), paddle.zeros([])).backward()
        optimizer.step()
        optimizer.clear_grad()
        for moment in first_moments(optimizer):
            moment.set_value(paddle.full(moment.shape, number))
    return optimizer


def first_moments(optimizer: Any) -> list[Any]:
    return [value for key, value in optimizer.state_dict().items() if "moment1" in key]


# -- alone


def test_a_job_goes_on(tmp_path: Path) -> None:
    model, optimizer, schedule = job(7)
    train(model, optimizer, schedule, 3)
    report = save(tmp_path, model, optimizer, {"epoch": 3})
    assert isinstance(report, SaveReport)
    saved, losses = arrays(model, optimizer), train(model, optimizer, schedule, 3, first=3)

    again, other, later = job(8)
    assert (arrays(again)["large.weight"] != saved["large.weight"]).any()
    state = load(tmp_path, again, other)
    assert_equal(arrays(again, other), saved)
    assert later.last_epoch == 3
    assert list(state) == ["model", "optimizer", "epoch"]
    assert state["epoch"] == 3
    assert_equal(numpy_of(state["model"]), arrays(again))
    assert set(state["optimizer"]) == set(other.state_dict())
    assert train(again, other, later, 3, first=3) == losses


def test_without_objects_the_whole_state_is_returned(tmp_path: Path) -> None:
    model, optimizer, schedule = job(7)
    others = {
        "epoch": 3,
        "ema": paddle.arange(3),
        "array": np.arange(4),
        "nested": {"best": [0.5, None], 7: b"x"},
        "schedule": schedule,
        "own": PerRank("mine"),
    }
    save(tmp_path, model, optimizer, others)
    state = load(tmp_path)
    assert set(state) == {"model", "optimizer", *others}
    assert_equal({**numpy_of(state["model"]), **numpy_of(state["optimizer"])}, arrays(model, optimizer))
    assert {"large.weight.moment1", "norm.bias.beta1_pow_acc"} <= set(state["optimizer"])
    assert (state["epoch"], state["nested"], state["own"]) == (3, others["nested"], {0: "mine"})
    assert isinstance(state["array"], np.ndarray)
    assert state["ema"].tolist() == [0, 1, 2]
    assert state["schedule"] == schedule.state_dict()
    beside = load(tmp_path, job(8)[0])
    assert set(beside) == {"model", *others}, "what was not asked for is not read"
    assert beside["own"] == state["own"]
    assert beside["ema"].tolist() == [0, 1, 2]


def test_a_fresh_optimizer_is_saved_too(tmp_path: Path) -> None:
    layer = linear(1.0)
    save(tmp_path, layer, adam(layer))
    again = linear()
    optimizer = adam(again, number=5.0)
    load(tmp_path, again, optimizer)
    assert [moment.abs().max() for moment in first_moments(optimizer)] == [0, 0]
    assert again.weight.tolist() == layer.weight.tolist()


def test_lists(tmp_path: Path) -> None:
    models = [linear(1.0), linear(2.0)]
    save(tmp_path, models, [adam(models[0], number=3.0), adam(models[1], number=4.0)])
    state = load(tmp_path)
    assert [one["bias"].tolist() for one in state["model"]] == [[1.0, 1.0], [2.0, 2.0]]
    assert [one["bias.moment1"].tolist() for one in state["optimizer"]] == [[3.0, 3.0], [4.0, 4.0]]
    targets = [linear(), linear()]
    optimizers = [adam(targets[0]), adam(targets[1])]
    found = load(tmp_path, targets, optimizers)
    assert [target.bias.tolist() for target in targets] == [[1.0, 1.0], [2.0, 2.0]]
    assert [first_moments(one)[0].max() for one in optimizers] == [3, 4]
    assert [one["bias"].tolist() for one in found["model"]] == [[1.0, 1.0], [2.0, 2.0]]
    assert len(found["optimizer"]) == 2
    with pytest.raises(StateDictMismatchError, match="model.weight"):
        load(tmp_path, linear())


def test_one_optimizer_for_several_models(tmp_path: Path) -> None:
    models = [linear(1.0), linear(2.0)]
    optimizer = adam(*models, number=3.0)
    first_moments(optimizer)[-1].set_value(paddle.full([2], 9.0))
    save(tmp_path, models, optimizer)
    targets = [linear(), linear()]
    again = adam(*targets)
    load(tmp_path, targets, again)
    assert [moment.max() for moment in first_moments(again)] == [3, 3, 3, 9]


def test_a_list_of_one_stays_a_list(tmp_path: Path) -> None:
    save(tmp_path, [linear(1.0)])
    assert [one["bias"].tolist() for one in load(tmp_path)["model"]] == [[1.0, 1.0]]


@pytest.mark.parametrize("wrapped", ["saved", "loaded"])
@pytest.mark.parametrize("several", [False, True])
def test_wrapped_for_data_parallelism_or_not(tmp_path: Path, wrapped: str, several: bool) -> None:
    source, target = linear(1.0), linear()
    outer = {"saved": source, "loaded": target}
    outer[wrapped] = paddle.DataParallel(outer[wrapped])
    passed = {name: [layer] if several else layer for name, layer in outer.items()}
    save(tmp_path, passed["saved"])
    assert set(read_metadata(tmp_path).state_dict_metadata) == (
        {"model.0.weight", "model.0.bias"} if several else {"model.weight", "model.bias"}
    )
    load(tmp_path, passed["loaded"])
    assert target.bias.tolist() == [1.0, 1.0]


def test_other_functions_read_it(tmp_path: Path) -> None:
    model, optimizer, schedule = job(7)
    train(model, optimizer, schedule, 1)
    save(tmp_path, model, optimizer, {"epoch": 3})
    merged = load_merged_state_dict(tmp_path)
    assert_equal({**numpy_of(merged["model"]), **numpy_of(merged["optimizer"])}, arrays(model, optimizer))
    again, other, _ = job(8)
    target = {"model": again, "optimizer": other, "epoch": None}
    assert load_state_dict(target, tmp_path).unused_keys == ()
    assert_equal(arrays(again, other), arrays(model, optimizer))
    assert target["epoch"] == 3


# -- one checkpoint in a folder


def test_another_format_has_what_was_saved_beside_the_model_too(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", linear(3.0), None, {"epoch": 3})
    export(tmp_path / "ckpt", tmp_path / "all.pdparams", format="pdparams")
    layer = linear()
    state = load(tmp_path / "all.pdparams", layer)
    assert (set(state), state["epoch"], layer.bias.tolist()) == ({"model", "epoch"}, 3, [3, 3])


def test_what_others_wrote(tmp_path: Path) -> None:
    first, optimizer = linear(3.0), adam(linear(0.0), number=2.0)
    paddle.save(first.state_dict(), str(tmp_path / "model.pdparams"))
    save(tmp_path / "ckpt", first)
    export(tmp_path / "ckpt", tmp_path / "hf", prefix="model")
    export(tmp_path / "ckpt", tmp_path / "nested", format="paddle")
    for source in ("model.pdparams", "hf", "nested"):
        second = linear(0.0)
        loaded = load(tmp_path / source, second)
        assert set(loaded) == {"model"}
        for found, expected in zip(second.parameters(), first.parameters(), strict=True):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())
    assert set(load(tmp_path / "model.pdparams")) == set(first.state_dict())
    with pytest.raises(StateDictMismatchError):
        load(tmp_path / "hf", linear(0.0), optimizer)


def test_a_part_of_a_larger_model_that_others_wrote(tmp_path: Path) -> None:
    """Its keys are there as they are, or behind what the part is called there, which is often ``model`` too."""
    body, head = linear(3.0).state_dict(), paddle.ones([2])
    paddle.save({**{f"model.{key}": tensor for key, tensor in body.items()}, "head": head}, f"{tmp_path}/m.pdparams")
    layer = linear(0.0)
    load(tmp_path / "m.pdparams", layer)
    assert (layer.weight.numpy() == 3).all()
    with pytest.raises(StateDictMismatchError) as caught:
        load(tmp_path / "m.pdparams", paddle.nn.LayerDict({"other": linear()}))
    assert "'other.weight')" in str(caught.value)
    assert "key_map" not in str(caught.value)  # of which there is none
    assert "load takes no options; load_state_dict({'model': model}" in str(caught.value)


def test_a_model_with_one_key_in_it_and_in_a_part(tmp_path: Path) -> None:
    """``model.weight`` is then that of the part, and not taken for the other, which is missing."""
    outer = linear(1.0)
    outer.model = linear(2.0)
    stored = {key: tensor for key, tensor in outer.state_dict().items() if key.startswith("model.")}
    paddle.save(stored, f"{tmp_path}/m.pdparams")
    with pytest.raises(StateDictMismatchError, match="missing") as caught:
        load(tmp_path / "m.pdparams", outer)
    assert len(caught.value.problems) == 2


def test_which_checkpoint_of_a_folder_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (3, 12):
        save_state_dict({"model": linear(number), "epoch": number}, tmp_path, unique_id=number)
    target = linear()
    assert load(tmp_path)["epoch"] == load(tmp_path, target)["epoch"] == 12
    assert target.weight[0, 0] == 12
    assert load(tmp_path, target, unique_id=3)["epoch"] == 3
    assert target.weight[0, 0] == 3
    save(tmp_path, linear(1), others={"epoch": 1})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert load(tmp_path)["epoch"] == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(part in said for part in ("(3, 12)", "unique_id=12", "load_state_dict({'model': model}, path)"))
    assert load(tmp_path, target, unique_id=12)["epoch"] == 12
    with pytest.raises(CheckpointNotFoundError, match="ids 0, 3, 12"):
        load(tmp_path, unique_id=4)
    with pytest.raises(ValueError, match="unique_id must be"):
        load(tmp_path, unique_id=-1)


def test_a_step_of_a_manager_is_loaded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(7, {"model": linear(7)})
    with pytest.raises(CheckpointNotFoundError, match="pass .*/step-00000007"):
        load(tmp_path, linear())
    assert load(tmp_path / "step-00000007")["model"]["weight"][0, 0] == 7


def test_a_file_of_a_checkpoint_is_taken_for_it(tmp_path: Path) -> None:
    save(tmp_path, linear(7))
    for file in tmp_path.iterdir():
        assert load(file)["model"]["weight"][0, 0] == 7


def test_a_load_of_a_model_alone_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = paddle.nn.Linear(2, 3)
    save(str(tmp_path), model)
    assert load(str(tmp_path), model).keys() == {"model"}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_one_line_is_logged_for_each_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = paddle.nn.Linear(3, 2)
    with caplog.at_level("INFO", "paddle_dist_ckpt"):
        save(tmp_path, model, others={"epoch": 3})
        load(tmp_path, paddle.nn.Linear(3, 2))
        load(tmp_path)
    saved, filled, whole = (record.message for record in caplog.records)
    assert [line.split()[0] for line in (saved, filled, whole)] == ["saved", "loaded", "loaded"]
    assert "not asked for" not in filled


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        assert save(tmp_path, linear(number)).unique_id == 0
    assert list_checkpoints(tmp_path) == [0]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    save_state_dict({"model": linear(3.0)}, tmp_path)
    assert load(tmp_path)["model"]["bias"].tolist() == [2.0, 2.0], "another function's is not taken for it"


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, linear(1.0))
    before = sorted(path.name for path in tmp_path.iterdir())
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(LocalStorage, "create", no_space)
        save(tmp_path, linear(2.0))
    assert load(tmp_path)["model"]["bias"].tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def no_space(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def replaced(name: str, saves: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch, before: bool = False) -> None:
    """Have the checkpoint replaced after a part of a load, or before it, as often as there are saves."""
    real = getattr(one_call, name)

    def with_a_save(*args: Any) -> Any:
        if before and saves:
            saves.pop()()
        result = real(*args)
        if not before and saves:
            saves.pop()()
        return result

    monkeypatch.setattr(one_call, name, with_a_save)


@pytest.mark.parametrize("part", ["_fill", "_load_others"])
def test_all_that_is_loaded_is_of_one_save(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, linear(1.0), others={"number": 1, "only once": 1})
    replaced(part, [lambda: save(tmp_path, linear(2.0), others={"number": 2})], monkeypatch)
    target = linear()
    state = load(tmp_path, target)
    assert (target.bias.tolist(), state["number"], set(state)) == ([2.0, 2.0], 2, {"model", "number"})


def test_a_checkpoint_that_never_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, linear(1.0))
    replaced("_fill", [lambda: save(tmp_path, linear(2.0))] * 4, monkeypatch)
    with pytest.raises(CheckpointError, match="replaced 4 times"):
        load(tmp_path, linear())


# -- threads and places


class CountedReads(LocalStorage):
    """Reads that wait until as many as expected go on at once; tells how many did, and on which threads."""

    def __init__(self, path: Path, expected: int) -> None:
        super().__init__(path)
        self.expected, self.now, self.most = expected, 0, 0
        self.threads: set[int] = set()
        self.changed = threading.Condition()

    def open(self, name: str) -> Any:
        file = super().open(name)
        real = file.read_into

        def read_into(buffers: Any, *where: Any) -> None:
            if sum(len(buffer) for buffer in buffers) >= 1 << 20:
                self.count()
            real(buffers, *where)

        file.read_into = read_into  # type: ignore[method-assign]
        return file

    def count(self) -> None:
        with self.changed:
            self.threads.add(threading.get_ident())
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.expected, 10)
            self.now -= 1


@pytest.mark.parametrize("into", ["objects", "nothing"])
@pytest.mark.parametrize(("nthreads", "expected"), [(0, 1), (2, 2), (8, 8)])
def test_how_many_threads_read(tmp_path: Path, nthreads: int, expected: int, into: str) -> None:
    layer = paddle.nn.Linear(2048, 8 * 256, bias_attr=False)
    save(tmp_path, layer)
    storage = CountedReads(tmp_path, expected)
    arguments = {"model": paddle.nn.Linear(2048, 8 * 256, bias_attr=False)} if into == "objects" else {}
    state = load(storage, nthreads=nthreads, **arguments)
    assert (state["model"]["weight"] == layer.weight).all()
    assert storage.most == expected
    assert threading.get_ident() in storage.threads
    assert nthreads or len(storage.threads) == 1


@pytest.mark.parametrize("place", [None, "cpu", paddle.CPUPlace(), paddle.zeros([1]).place])
def test_places(tmp_path: Path, place: Any) -> None:
    save(tmp_path, linear(1.0))
    assert load(tmp_path, map_location=place)["model"]["bias"].place.is_cpu_place()


# -- what is wrong


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": None}, TypeError, "^model must be a paddle.nn.Layer or a list of them, not NoneType"),
        ({"model": {"weight": 1}}, TypeError, "^model must be .*, not dict"),
        ({"model": paddle.nn.Linear}, TypeError, "^model must be .*, not the class Linear"),
        ({"model": [linear(), 3]}, TypeError, r"^model\[1\] must be a paddle.nn.Layer, not int"),
        ({"optimizer": linear()}, TypeError, "^optimizer must be a paddle.optimizer.Optimizer .*, not Linear"),
        ({"optimizer": [None]}, TypeError, r"^optimizer\[0\] must be .*, not NoneType"),
        ({"others": [1]}, TypeError, "^others must be None or a dict, not list"),
        ({"others": {"model": 1, "x": 1}}, ValueError, r"^others must not have the keys \['model'\]"),
        ({"others": {"optimizer": 1, "model": 1}}, ValueError, r"\['model', 'optimizer'\]"),
        ({"group": 3}, TypeError, "^group must be None or a paddle.distributed group, not int"),
        ({"path": 3}, TypeError, "^path must be .*, not int"),
        ({"path": ""}, ValueError, "^path must name"),
        ({"others": {"call": {"back": print}}}, UnsupportedValueError, "call.back"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, arguments: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        save(**{"path": tmp_path / "new", "model": linear(), **arguments})
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_a_part_that_does_not_say_of_what(tmp_path: Path) -> None:
    layer = linear()
    layer.weight.is_distributed = True
    with pytest.raises(UnsupportedValueError, match="model.weight.*is_distributed"):
        save(tmp_path, layer)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "net"}, TypeError, "^model must be .*, not str"),
        ({"model": [linear(), None]}, TypeError, r"^model\[1\] must be"),
        ({"optimizer": {}}, TypeError, "^optimizer must be .*, not dict"),
        ({"map_location": "gpu:0"}, ValueError, "^map_location is 'gpu:0', which this Paddle does not have"),
        ({"map_location": "nowhere"}, ValueError, "^map_location is 'nowhere', which this Paddle does not have"),
        ({"map_location": 0}, TypeError, "^map_location must be .*, not int"),
        ({"map_location": paddle.CPUPlace}, TypeError, "^map_location must be .*, not the class CPUPlace"),
        ({"nthreads": -1}, ValueError, "^nthreads must not be negative, but is -1"),
        ({"nthreads": True}, TypeError, "^nthreads must be an integer, not True"),
        ({"nthreads": 1.0}, TypeError, "^nthreads must be an integer, not 1.0"),
        ({"nthreads": None}, TypeError, "^nthreads must be an integer, not None"),
        ({"path": None}, TypeError, "^path must be"),
        ({"path": "/nowhere"}, CheckpointNotFoundError, "/nowhere"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, arguments: dict[str, Any], error: Any, words: str) -> None:
    save(tmp_path, linear())
    with pytest.raises(error, match=words):
        load(**{"path": tmp_path, **arguments})


def test_an_object_that_does_not_fit(tmp_path: Path) -> None:
    layer = linear(1.0)
    save(tmp_path, layer, adam(layer))
    target = paddle.nn.Linear(3, 4)
    before = target.weight.numpy().copy()
    with pytest.raises(StateDictMismatchError) as caught:
        load(tmp_path, target)
    assert len(caught.value.problems) == 2
    assert (target.weight.numpy() == before).all()
    with pytest.raises(StateDictMismatchError, match="pass model beside optimizer") as caught:
        load(tmp_path, optimizer=adam(linear()))
    assert caught.value.problems


def test_a_process_that_works_alone_has_no_other_coordinator(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="coordinator_rank is 3, but this process works alone"):
        save_state_dict({"a": 1}, tmp_path, coordinator_rank=3)
    assert not list(tmp_path.iterdir())


def test_a_path_below_a_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "ckpt", tmp_path / "file" / "below" / "ckpt"):
        with pytest.raises(CheckpointNotFoundError, match=f"there is no folder {path}: a part of that path is a file"):
            load(path, linear())


def test_a_damaged_checkpoint_is_told_as_such_and_one_that_is_replaced_meanwhile_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, linear(1.0), others={"text": "v" * 6000})
    (file,) = tmp_path.glob("*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good.replace(b"v" * 6000, b"v" * 5999 + b"u"))
    with pytest.raises(CheckpointCorruptedError, match="text: the checksum of"):
        load(tmp_path, linear())
    file.write_bytes(good)
    replaced("_fill", [lambda: save(tmp_path, linear(2.0), others={"text": "new"})], monkeypatch, before=True)
    model = linear()
    state = load(tmp_path, model)
    assert (state["text"], model.weight.numpy().min()) == ("new", 2.0)


def test_what_is_gone_since_the_checkpoint_was_replaced_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, linear(1.0), others={"text": "v" * 6000})
    replaced("_load_others", [lambda: save(tmp_path, linear(2.0), others={"note": "new"})], monkeypatch, before=True)
    model = linear()
    state = load(tmp_path, model)
    assert ("text" in state, state["note"], model.weight.numpy().min()) == (False, "new", 2.0)
