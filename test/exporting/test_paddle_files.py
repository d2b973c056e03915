"""Exports that Paddle's own functions read: their pickles, looked at with Python's pickle."""

from __future__ import annotations

import functools
import pickle
import pickletools
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import PerRank, UnsupportedValueError, export
from paddle_dist_ckpt.exporting.pickles import Template, pickled
from paddle_dist_ckpt.testing import NumpyAdapter
from test.jobs import alike, load_whole, make_array, same_bits, save_alone, save_on, split_all, split_rows

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"


class Record:
    """Stands for Paddle's classes: whatever attributes the pickle gives it."""

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, repr(value)) for name, value in vars(self).items())))


@pytest.fixture
def paddle_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of Paddle's names, for a pickle to find its classes in."""
    module: Any = types.ModuleType(MODULE)
    for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex"):
        setattr(module, name, type(name, (Record,), {}))
    monkeypatch.setitem(sys.modules, MODULE, module)


ARRAYS = {
    "weight": make_array((60, 70)),
    "half": make_array((9, 4), "bfloat16"),
    "flag": make_array((5,), "bool"),
    "scalar": make_array((), "int64"),
    "none": make_array((0, 3), "int16"),
    "wide": make_array((3,), "complex128"),
}


def as_paddle_keeps_it(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def saved(folder: Path) -> None:
    save_on([{"model": model, "step": 7} for model in split_all(ARRAYS)], folder)


@pytest.mark.usefixtures("paddle_classes")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    report = export(tmp_path / "ckpt", tmp_path / "out", format="paddle", max_shard_bytes=1000)
    assert report.left_out == ("step",)
    assert report.files[-1] == "0.metadata"
    assert len(report.files) > 2
    metadata = pickle.loads((tmp_path / "out" / "0.metadata").read_bytes())
    files = {name: pickle.loads((tmp_path / "out" / name).read_bytes()) for name in report.files[:-1]}
    assert list(files) == [f"{rank}_0.distcp" for rank in range(len(files))]
    places = {index.tensor_key: name for index, name in metadata.storage_metadata.items()}
    assert set(places) == {f"model.{key}" for key in ARRAYS}
    for key, array in ARRAYS.items():
        stored = files[places[f"model.{key}"]][f"model.{key}"]
        assert same_bits(stored, as_paddle_keeps_it(array)), key
        assert stored.flags.c_contiguous
        (local,) = metadata.state_dict_metadata[f"model.{key}"]
        assert (local.global_offset, local.local_shape, local.global_shape) == (
            (0,) * array.ndim,
            array.shape,
            array.shape,
        )
        assert local.dtype == array.dtype.name
        assert metadata.flat_mapping[f"model.{key}"] == ("model", key)


@pytest.mark.usefixtures("paddle_classes")
def test_variable_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has none is called by its key."""
    plain, names = NumpyAdapter.view, {"/a": "w_0"}
    monkeypatch.setattr(
        NumpyAdapter, "view", lambda self, value, path: plain(self, value, path)._replace(name=names.get(path))
    )
    save_alone({key: split_rows(make_array((4, 2)), 1)[0] for key in "ab"}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out", format="paddle")
    data = pickle.loads((tmp_path / "out" / "0_0.distcp").read_bytes())
    assert data["StructuredToParameterName@@"] == {"a": "w_0", "b": "b"}
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    assert {key: name for key, (name, _) in found.items()} == {"a": "w_0", "b": "b"}


def test_a_file_of_a_nested_state_dict(tmp_path: Path) -> None:
    extra = {"name": "x", "list": [1, (2.5, None)], "deep": {3: True}}
    save_alone({"model": dict(ARRAYS), "extra": extra}, tmp_path / "ckpt")
    report = export(tmp_path / "ckpt", tmp_path / "all.pdparams", format="pdparams")
    assert report.files == ("all.pdparams",)
    found = pickle.loads((tmp_path / "all.pdparams").read_bytes())
    assert alike(found["extra"], extra)
    assert set(found["model"]) == set(ARRAYS)
    for key, array in ARRAYS.items():
        assert same_bits(found["model"][key], as_paddle_keeps_it(array)), key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pdparams", "ckpt"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_arrays_of_bfloat16_stay_that_beside_tensors(dtype: str | None, tmp_path: Path) -> None:
    """A file with tensors in pairs has arrays beside them, of which uint16 would be uint16 to `paddle.load`."""
    arrays = {"half": make_array((5,), "bfloat16"), "full": np.arange(3, dtype=np.float32)}
    state = {**arrays, "tensor": split_rows(np.ones((4, 2), np.float32), 1)[0]}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams", dtype=dtype)
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    assert found["half"][0] == "half"
    assert type(found["full"]) is (tuple if dtype else np.ndarray)
    read = load_whole(tmp_path / "out.pdparams")
    assert {key: read[key].dtype.name for key in arrays} == {"half": "bfloat16", "full": dtype or "float32"}
    assert same_bits(read["half"], arrays["half"])


@pytest.mark.parametrize("beside", [{}, {"tensor": split_rows(np.ones((4, 2), np.float32), 1)[0]}])
def test_a_pair_of_a_text_and_an_array_is_none_of_a_name_and_a_tensor(beside: Any, tmp_path: Path) -> None:
    """To `paddle.load` a pair with an array in it is a tensor, and its first part no more than the tensor's name."""
    array = np.arange(3)
    save_alone({"pair": ("a", array), "three": ("a", array, 1), "list": [("b", array)], **beside}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    for text, (name, inner) in (found["pair"], found["list"][0]):
        assert (text, type(name)) in (("a", str), ("b", str))
        assert same_bits(inner, array)
    assert found["three"][0] == "a"
    assert type(found["three"][1]) is np.ndarray
    read = load_whole(tmp_path / "out.pdparams")
    assert (read["pair"][0], read["list"][0][0], read["three"][2]) == ("a", "b", 1)
    assert same_bits(read["pair"][1], array)


@pytest.mark.parametrize("format", ["paddle", "pdparams"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e4m3fn"])
def test_types_that_paddle_has_no_array_for(tmp_path: Path, format: str, dtype: str) -> None:
    save_alone({"a": make_array((3,), dtype)}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedValueError, match=f"a: .*{dtype}"):
        export(tmp_path / "ckpt", tmp_path / "out", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_arrays_of_types_that_paddle_has_no_tensors_of_stay_arrays_beside_tensors(tmp_path: Path) -> None:
    """As in the state of numpy's random numbers."""
    arrays = {dtype: np.arange(3, dtype=dtype) for dtype in ("uint16", "uint32", "uint64")}
    state = {**arrays, "random": ("MT19937", arrays["uint32"], 5), "tensor": split_rows(np.ones((4, 2)), 1)[0]}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    assert all(same_bits(found[dtype], array) for dtype, array in arrays.items())
    assert same_bits(found["random"][1], arrays["uint32"])
    export(tmp_path / "out.pdparams", tmp_path / "again.pdparams", format="pdparams")  # read, all of them are tensors
    read = load_whole(tmp_path / "again.pdparams")
    assert {key: read[key].dtype.name for key in arrays} == {key: key for key in arrays}


def test_those_of_which_paddle_would_make_tensors_are_refused(tmp_path: Path) -> None:
    pair = ("a", np.arange(3, dtype=np.uint32))
    save_alone({"pair": pair, "tensor": split_rows(np.ones((4, 2)), 1)[0]}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedValueError, match=r"pair\.1: Paddle would make a tensor of it"):
        export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")


def test_an_array_of_bfloat16_stays_that_beside_a_pair_of_a_text_and_an_array(tmp_path: Path) -> None:
    save_alone({"half": make_array((5,), "bfloat16"), "pair": ("a", np.arange(3))}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    assert load_whole(tmp_path / "out.pdparams")["half"].dtype.name == "bfloat16"


def test_paths_that_paddle_has_no_keys_for(tmp_path: Path) -> None:
    save_alone({"a": [make_array((3,)), make_array((4,))]}, tmp_path / "ckpt")
    with pytest.raises(UnsupportedValueError, match="str keys"):
        export(tmp_path / "ckpt", tmp_path / "out", format="paddle")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    assert [array.shape for array in found["a"]] == [(3,), (4,)]


def test_values_too_large_for_the_metadata(tmp_path: Path) -> None:
    state = {
        "a": make_array((3,)),
        "text": "x" * 10_000,
        "deep": [{"numbers": list(range(5000))}],
        "own": PerRank({"x": 1}),
    }
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams", keys=["text", "deep*", "own*"])
    found = pickle.loads((tmp_path / "out.pdparams").read_bytes())
    assert alike(found, {"text": state["text"], "deep": state["deep"], "own": {0: {"x": 1}}})


@pytest.mark.parametrize("value", [b"x", [1, {"a": (b"x",)}], {b"x": 1}])
def test_bytes_for_which_paddle_refuses_all_are_refused(tmp_path: Path, value: Any) -> None:
    save_alone({"extra": {"tag": value}, "long": b"y" * 10_000, "a": make_array((3,))}, tmp_path / "ckpt")
    for key in ("extra*", "long"):
        with pytest.raises(UnsupportedValueError, match=r"(extra\.tag|long).*: bytes are not loaded by Paddle"):
            export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams", keys=[key])
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams", keys=["a"])


@pytest.mark.parametrize("name", ["StructuredToParameterName@@", "UnpackBigParamInfor@@"])
@pytest.mark.parametrize(
    ("content", "formats"),
    [
        (make_array((3,)), ["paddle", "pdparams"]),
        ({"a": make_array((3,))}, ["pdparams"]),
        ({"a": "b"}, ["pdparams"]),
        ("b", ["pdparams"]),
    ],
    ids=["tensor", "tensors below it", "values below it", "value"],
)
def test_names_that_paddle_keeps_for_itself_are_refused(
    content: Any, formats: list[str], name: str, tmp_path: Path
) -> None:
    save_alone({"w": make_array((2,)), name: content}, tmp_path / "ckpt")
    for format in formats:
        with pytest.raises(UnsupportedValueError, match=f"^{name}.*: Paddle's files keep the name '{name}'"):
            export(tmp_path / "ckpt", tmp_path / "out", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    export(tmp_path / "ckpt", tmp_path / "out", format="native")
    assert alike(load_whole(tmp_path / "out")[name], content)


@pytest.mark.parametrize("format", ["paddle", "pdparams"])
def test_names_that_paddle_keeps_for_itself_may_be_anywhere_below(format: str, tmp_path: Path) -> None:
    state = {"model": {"StructuredToParameterName@@": make_array((3,)), "UnpackBigParamInfor@@": make_array((2,))}}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / f"out.{format}", format=format)
    assert alike(load_whole(tmp_path / f"out.{format}"), state)


def test_complex_numbers_come_back(tmp_path: Path) -> None:
    save_alone({"extra": {"z": 1 - 2.5j}}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    assert load_whole(tmp_path / "out.pdparams") == {"extra": {"z": 1 - 2.5j}}


def test_values_of_numpy(tmp_path: Path) -> None:
    values = {
        "rate": np.float32(0.1),
        "step": np.int64(7),
        "flag": np.bool_(True),
        "text": np.str_("abc"),
        "time": np.datetime64("2026-01-02", "D"),
        "names": np.array(["ab", "c"]),
    }
    save_alone({"extra": values}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    assert alike(pickle.loads((tmp_path / "out.pdparams").read_bytes()), {"extra": values})


@pytest.mark.parametrize("format", ["paddle", "pdparams"])
def test_very_many_small_tensors_are_read_again(format: str, tmp_path: Path) -> None:
    """What is the same in all of them is written once: so the files are small enough, and cheap enough to be read."""
    state = {f"model.layers.{i}.self_attn.q_proj.weight": np.full(4, i, np.float32) for i in range(10_000)}
    save_alone(state, tmp_path / "ckpt")
    out = tmp_path / f"out.{format}"
    export(tmp_path / "ckpt", out, format=format)
    files = [out] if out.is_file() else list(out.iterdir())
    assert sum(path.stat().st_size for path in files) < 300 * len(state)
    assert alike(load_whole(out), state)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 65_536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**70, True])
def test_numbers_and_texts_of_all_lengths(n: int, tmp_path: Path) -> None:
    values = {
        "n": n,
        "shapes": [(n, 1), (n, True), (n, 1), (1,) * 4, ()],
        "x": "y" * (n % 300),
        "text": "\ud800ö",
        "half": n / 2,
    }
    save_alone({"values": values, "a": make_array((3,))}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    assert alike(pickle.loads((tmp_path / "out.pdparams").read_bytes())["values"], values)


def test_more_texts_than_one_byte_counts(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(600)]
    values = {"twice": texts + texts, "numpy": [np.float64(1.5), np.str_("text 1"), np.datetime64(1, "s")]}
    save_alone({"values": values, "a": make_array((3,))}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    content = (tmp_path / "out.pdparams").read_bytes()
    assert alike(pickle.loads(content)["values"], values)
    assert b"numpy._core" not in content  # which older versions of numpy do not have


def test_a_memo_has_a_limit_and_what_comes_behind_it_is_written_again() -> None:
    texts = [f"{i}" for i in range(1 << 16)]
    value = {"all": texts, "behind": [("a", "b")] * 2, "twice": [texts[0], texts[-1]]}
    content = b"".join(part for part in pickled(value) if isinstance(part, bytes))
    assert pickle.loads(content) == value
    assert content.count(pickle.SHORT_BINUNICODE + b"\x01a") == 2
    assert sum(code.name == "MEMOIZE" for code, _, _ in pickletools.genops(content)) == 1 << 16


@pytest.mark.parametrize(("before", "times"), [(0, 2), (1 << 16, 1)], ids=["from the memo", "when that is full"])
def test_a_template_is_made_a_few_times_and_written_each_time(before: int, times: int) -> None:
    made = Counter[int]()

    def make(n: int) -> dict[str, Any]:
        made[n] += 1
        return {"n": n, "of": (n, n), "text": f"text {n % 2}"}

    texts, numbers = [f"{i}" for i in range(before)], [*range(5000)] * 5
    alike = pickled([texts, [Template(f"{n}".encode(), functools.partial(make, n)) for n in numbers]])
    assert set(made.values()) == {times, 5}  # not many are remembered
    assert b"".join(alike) == b"".join(pickled([texts, [make(n) for n in numbers]]))  # type: ignore[arg-type]


def test_an_array_of_numpy_takes_no_place_in_the_memo(tmp_path: Path) -> None:
    """In pickles of such arrays one thing stands twice: numpy makes empty ones of ``b"b"``."""
    values = {"letters": np.array([b"b"]), "texts": ["a", "values", "letters", "texts"]}
    save_alone({"values": values, "a": make_array((3,))}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out.pdparams", format="pdparams")
    assert alike(pickle.loads((tmp_path / "out.pdparams").read_bytes())["values"], values)
