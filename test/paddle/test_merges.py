"""``merge_sharded_state_dict`` under install(): whole tensors of a checkpoint as safetensors, as Paddle makes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from safetensors import safe_open

from paddle_dist_ckpt import (
    LoadOptions,
    Metadata,
    StateDictMismatchError,
    UnsupportedValueError,
    folder_calls,
    install,
    list_checkpoints,
    load_merged_state_dict,
    read_metadata,
    save_state_dict,
    stored,
    verify,
)
from paddle_dist_ckpt.export_calls import export_request
from paddle_dist_ckpt.state_exports import export_filled_with
from test.paddle.layouts import Array
from test.paddle.tensors import to_array
from test.paddle.test_sharded_weight import assert_same, on_ranks, tensor_of
from test.strategies import some

home: Any = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.load_state_dict")


def merge(folder: Path, *statements: str, to: str = "merged", options: LoadOptions | None = None, **more: Any) -> Any:
    """Merge the checkpoint in ``saved``, as statements make it if there are any."""
    if statements:
        more["aoa_config"] = {"aoa_statements": list(statements), "enable_traceback": False}
    with install(load_options=options):
        return home.merge_sharded_state_dict(str(folder / "saved"), str(folder / to), **more)


def merged(folder: Path, to: str = "merged") -> dict[str, Any]:
    """What a merge has made."""
    return {key: tensor.tolist() for key, tensor in load_merged_state_dict(folder / to, flat=True).items()}


def numbered(folder: Path, *keys: str) -> None:
    """Save tensors of two elements, each with its number."""
    save_state_dict({key: paddle.full([2], number) for number, key in enumerate(keys)}, folder / "saved")


as_stored_and_as_made = pytest.mark.parametrize("statements", [[], ["a -> a"]], ids=["as stored", "as made"])


def test_a_checkpoint_is_merged_to_safetensors(tmp_path: Path) -> None:
    weight = paddle.arange(6, dtype="float32")
    state = {"model": {"w": weight, "b": paddle.ones([2])}, "optimizer": {"w.m": paddle.ones([1])}}
    with install():
        dist.save_state_dict(state, tmp_path / "saved")
    merge(tmp_path, to="all", skip_postfix_list=["b", ".m"])
    merge(tmp_path, to="model", prefix="model")
    merge(tmp_path, to="named", safetensor_prefix="weights")
    for prefix in ("", "a/b", ".a"):
        with pytest.raises(ValueError, match="names of files cannot begin with"):
            merge(tmp_path, to="x", safetensor_prefix=prefix)
    assert merged(tmp_path, "all") == {"model.w": [0, 1, 2, 3, 4, 5]}
    assert sorted(read_metadata(tmp_path / "model").state_dict_metadata) == ["model.b", "model.w"]
    assert [path.name for path in (tmp_path / "named").iterdir()] == ["weights.safetensors"]
    assert not (tmp_path / "x").exists()


@as_stored_and_as_made
def test_it_says_of_no_format_what_trainers_of_paddle_refuse(tmp_path: Path, statements: list[str]) -> None:
    """PaddleNLP loads safetensors files that say nothing of a format, as Paddle's own, or that it is numpy's."""
    numbered(tmp_path, "a")
    merge(tmp_path, *statements)
    with safe_open(tmp_path / "merged" / "model.safetensors", "numpy") as file:
        assert file.metadata() is None
        assert list(file.keys()) == ["a"]


@as_stored_and_as_made
def test_it_is_of_one_checkpoint_with_all_of_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: list[str]
) -> None:
    """Another one, with more keys, is saved when the merge has looked at the keys."""
    saved, one = tmp_path / "saved", paddle.ones([2])
    save_state_dict({"a": one}, saved)
    read, times = folder_calls.read_checkpoint, list[int]()

    def read_and_save(storage: Any, unique_id: int | None) -> Metadata:
        metadata = read(storage, unique_id)
        times.append(metadata.unique_id)
        if len(times) == 1:
            save_state_dict({"a": 2 * one, "b": one}, saved)
        return metadata

    monkeypatch.setattr(folder_calls, "read_checkpoint", read_and_save)
    merge(tmp_path, *statements)
    assert times == [0]
    assert list_checkpoints(saved) == [0, 1]
    assert merged(tmp_path) == {"a": [1, 1]}


@as_stored_and_as_made
def test_it_says_what_it_cannot_read(statements: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = {
        key: {"dtype": dtype, "shape": [1], "data_offsets": [at, at + 1]}
        for at, (key, dtype) in enumerate({"a": "U8", "odd": "F8_E8M0", "skipped": "F8_E8M0"}.items())
    }
    text = json.dumps(header).encode()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
    report = merge(tmp_path, *statements, skip_postfix_list=["skipped"])
    assert (report.tensors, report.left_out) == (1, ("odd",))
    assert ["odd is left out" in record.getMessage() for record in caplog.records].count(True) == 1


def test_it_leaves_out_endings_and_not_letters(tmp_path: Path) -> None:
    numbered(tmp_path, "a.weight", "a.bias", "as")
    with pytest.raises(TypeError, match="skip_postfix_list must be a list of endings, not 'bias'"):
        merge(tmp_path, skip_postfix_list="bias")
    merge(tmp_path, skip_postfix_list=["bias"])
    assert merged(tmp_path) == {"a.weight": [0, 0], "as": [2, 2]}


def test_it_takes_no_key_for_the_pattern_of_another(tmp_path: Path) -> None:
    numbered(tmp_path, "x*", "x[*]", "xy")
    merge(tmp_path, skip_postfix_list=["y"])
    assert merged(tmp_path) == {"x*": [0, 0], "x[*]": [1, 1]}


MERGED = [
    ["a -> t", "b -> a", "t -> b"],
    ["square^T -> square"],
    ["a, b -> t, axis=0", "t -> b, a, axis=0"],
    ["ffn -> ffn, fused_ffn"],
    ["half -> h, dtype='float32'", "h -> half, dtype='bfloat16'", "a -> new"],
    [],
]


@pytest.mark.parametrize("statements", some(MERGED, 3))
def test_what_is_made_is_what_paddle_makes(
    tmp_path: Path, statements: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self, *_, **__: self)  # as there is none
    shapes = {"a": (4, 6), "b": (4, 6), "square": (4, 4), "half": (3, 2), "ffn": (4, 8), "a.moment1_0": (4, 6)}
    arrays: dict[str, Array] = {
        key: np.random.default_rng(i).normal(size=shape).astype("float32")
        for i, (key, shape) in enumerate(shapes.items())
    }
    arrays["half"] = to_array(tensor_of(arrays["half"]).cast("bfloat16"))
    dist.save_state_dict({key: tensor_of(array) for key, array in arrays.items()}, str(tmp_path / "saved"))
    skip, config = ["moment1_0"], {"aoa_statements": statements, "enable_traceback": False}
    home.merge_sharded_state_dict(
        str(tmp_path / "saved"), str(tmp_path / "theirs"), skip_postfix_list=skip, aoa_config=config
    )
    merge(tmp_path, skip_postfix_list=skip, aoa_config=config)
    theirs, ours = (load_merged_state_dict(tmp_path / who, flat=True) for who in ("theirs", "merged"))
    assert set(theirs) == set(ours) == {"a", "b", "square", "half", "ffn"}
    for key, tensor in theirs.items():
        assert_same(to_array(ours[key]), to_array(tensor))
    assert ("and not new" in caplog.text) == ("a -> new" in statements)


def test_what_is_dropped_or_does_not_fit(tmp_path: Path) -> None:
    save_state_dict({"a": paddle.ones([2, 3]), "b": paddle.ones([3, 2])}, tmp_path / "saved")
    assert merge(tmp_path, "a -> _", to="dropped").tensors == 1
    for statement, to, error, text in (
        ("a -> b", "gone", StateDictMismatchError, "b: the target has shape"),
        ("gone -> a", "gone", ValueError, "aoa_config: gone"),
        ("b^T -> a", "dropped", ValueError, "is there already"),
    ):
        with pytest.raises(error, match=text):
            merge(tmp_path, statement, to=to)
    assert set(merged(tmp_path, "dropped")) == {"b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dropped", "saved"]


def test_no_tensor_is_looked_for_under_the_key_that_a_program_has_for_it(tmp_path: Path) -> None:
    numbered(tmp_path, "a", "b", "c")
    merge(tmp_path, "b -> c", options=LoadOptions(key_map={"a": "b"}, resize={"*": 0}))
    assert merged(tmp_path) == {"a": [0, 0], "b": [1, 1], "c": [1, 1]}


def test_it_says_what_it_leaves_out_for_it_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_state_dict({"a": paddle.ones([2, 3]), "b": paddle.ones([3, 2]), "c": paddle.ones([1])}, tmp_path / "saved")
    assert merge(tmp_path, "a -> b", "c -> _", options=LoadOptions(strict=False)).tensors == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.startswith("left out: b: the target has shape [3, 2]") for text in said] == [True]


def test_no_tensor_is_taken_for_another_whose_key_is_the_same_but_for_escapes(tmp_path: Path) -> None:
    state = {"a.b": paddle.full([2], 1.0), "a": {"b": paddle.full([2], 2.0)}, "c": paddle.full([1, 2], 3.0)}
    save_state_dict(state, tmp_path / "saved")
    options = LoadOptions(strict=False)
    for others in ([], ["\\.b"]):
        with pytest.raises(UnsupportedValueError, match=r"a.*\.b: such keys are escaped"):
            merge(tmp_path, "c -> d", options=options, skip_postfix_list=others)
    merge(tmp_path, "c -> d", options=options, skip_postfix_list=["b"])
    assert merged(tmp_path) == {"c": [[3, 3]]}


@pytest.mark.parametrize(
    "options",
    [LoadOptions(aoa_config={"aoa_statements": ["a -> b", "a -> new"]}), LoadOptions(recipes={"b": stored("a")})],
)
def test_what_is_stored_is_filled_by_the_options_too(tmp_path: Path, options: LoadOptions) -> None:
    numbered(tmp_path, "a", "b", "c")
    merge(tmp_path, options=options)
    assert merged(tmp_path) == {"a": [0, 0], "b": [0, 0], "c": [2, 2]}


def test_what_one_rank_cannot_hold_ends_it_on_all(tmp_path: Path) -> None:
    save_state_dict({"a": paddle.ones([2]), "b": np.zeros([1] * 10, "float32")}, tmp_path / "saved")
    request = export_request(tmp_path / "merged")
    options = LoadOptions(timeout=20, aoa_config={"aoa_statements": ["a -> c"]})
    errors = on_ranks([{}, {}], lambda ranks, _: export_filled_with(ranks, tmp_path / "saved", request, options, False))
    assert all(isinstance(error, UnsupportedValueError) for error in errors), errors
    assert all("b: Paddle has no tensors of more than 9 dimensions" in str(error) for error in errors)


def test_a_pattern_of_what_is_wanted(tmp_path: Path) -> None:
    save_state_dict(
        {"a": paddle.arange(4.0), "m.0.x": paddle.zeros([2]), "m.1.x": paddle.zeros([2])}, tmp_path / "saved"
    )
    merge(tmp_path, "a -> m.*.x, axis=0")
    assert [merged(tmp_path)[f"m.{i}.x"] for i in range(2)] == [[0, 1], [2, 3]]


def test_it_goes_on_without_the_recipes_of_what_it_does_not_write(tmp_path: Path) -> None:
    """They are for the program's loads: of keys that are not stored, or not asked for."""
    numbered(tmp_path, "a", "b", "m.a", "m.b")
    recipes = {"b": stored("a"), "m.b": stored("m.a"), "new": stored("a"), "n.{x}": stored("m.{x}")}
    merge(tmp_path, to="all", options=LoadOptions(recipes=recipes))
    merge(tmp_path, to="part", options=LoadOptions(recipes=recipes), prefix="m")
    assert merged(tmp_path, "all") == {"a": [0, 0], "b": [0, 0], "m.a": [2, 2], "m.b": [2, 2]}
    assert merged(tmp_path, "part") == {"m.a": [2, 2], "m.b": [2, 2]}


def test_what_is_not_written_may_be_there_however_strict_loads_are(tmp_path: Path) -> None:
    state = {"a": paddle.ones([2]), "b": paddle.zeros([2]), "x": paddle.ones([1]), "step": 3}
    save_state_dict(state, tmp_path / "saved")
    options = LoadOptions(strict="all")
    merge(tmp_path, "a -> b", options=options, skip_postfix_list=["x"])
    assert merged(tmp_path) == {"a": [1, 1], "b": [1, 1]}
    with pytest.raises(StateDictMismatchError, match="'a -> new' changes nothing"):
        merge(tmp_path, "a -> new", to="other", options=options)


def test_in_static_mode(tmp_path: Path) -> None:
    save_state_dict({"a": paddle.ones([2]), "b": paddle.zeros([2])}, tmp_path / "saved")
    paddle.enable_static()
    try:
        merge(tmp_path, "a -> b")
    finally:
        paddle.disable_static()
    assert merged(tmp_path)["b"] == [1, 1]


def test_what_a_killed_export_has_left_is_not_removed_where_it_is_merged(tmp_path: Path) -> None:
    """It is all that there is, until the merge is done."""
    hidden = tmp_path / ".merged.state-0123456789abcdef"
    save_state_dict({"a": paddle.ones([2, 3])}, hidden)
    (hidden / ".claim").write_text(hidden.name)
    os.utime(hidden / ".claim", (1, 1))
    with install():
        home.merge_sharded_state_dict(hidden, tmp_path / "merged", aoa_config={"aoa_statements": ["a -> b", "b -> a"]})
    assert set(merged(tmp_path)) == {"a"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [hidden.name, "merged"]
    assert verify(hidden).ok
