"""What paddle.save writes is read: state_dicts of layers and optimizers, in files of their own."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from paddle_dist_ckpt.readers.catalog import Catalog
from paddle_dist_ckpt.readers.pdparams import PdparamsReader
from paddle_dist_ckpt.readers.safetensors import SafetensorsReader
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.catalogs import read_catalog
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests, check_catalog
from paddle_dist_ckpt.tree.paths import ListIndex, TupleIndex

READER = PdparamsReader()
WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)


def read(path: Path, names: list[str] | None = None) -> Catalog:
    """The catalog, checked."""
    storage = LocalStorage(path)
    catalog = READER.read(storage, storage.names() if names is None else names, 0)
    check_catalog(storage, catalog)
    return catalog


def read_one(path: Path, content: Any, protocol: int = 4) -> Catalog:
    """The catalog of one file that holds this."""
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    (path / "model.pdparams").write_bytes(data)
    return read(path, ["model.pdparams"])


def described(catalog: Catalog) -> dict[tuple[Any, ...], tuple[str, tuple[int, ...], str | None]]:
    """Type, shape and name of each tensor."""
    return {tensor.path: (tensor.dtype.name, tensor.shape, tensor.name) for tensor in catalog.tensors}


class TestOfNumpy(ReaderTests):
    """A state_dict of a layer and an optimizer in one file."""

    @pytest.fixture
    def reader(self) -> PdparamsReader:
        return READER

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        bits = np.arange(6, dtype=np.uint16)
        state = {
            "w": WEIGHT,
            "b": bits,
            "w_moment1_0": ("linear_0.w_0_moment1_0", WEIGHT),
            "master_weights": {"linear_0.w_0": ("linear_0.w_0_fp32", WEIGHT)},
            "LR_Scheduler": {"last_epoch": 3, "last_lr": np.float64(0.5)},
            "StructuredToParameterName@@": {"w": "linear_0.w_0", "b": "linear_0.b_0"},
        }
        return ForeignCheckpoint(
            {"m.pdparams": pickle.dumps(state, 4)},
            arrays={"w": WEIGHT, "b": bits, "w_moment1_0": WEIGHT, "master_weights.linear_0.w_0": WEIGHT},
            values={"LR_Scheduler.last_epoch": 3, "LR_Scheduler.last_lr": 0.5},
        )


@pytest.fixture(scope="module")
def paddle() -> Any:
    return pytest.importorskip("paddle")


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_layer_and_its_optimizer_are_read(protocol: int, paddle: Any, tmp_path: Path) -> None:
    layer = paddle.nn.Linear(3, 4)
    layer.register_buffer("steps", paddle.to_tensor([7]))
    layer.register_buffer("small", paddle.ones([5], "bfloat16"))
    scheduler = paddle.optimizer.lr.NoamDecay(d_model=100, warmup_steps=100)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=layer.parameters())
    layer(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    scheduler.step()
    state = optimizer.state_dict()
    state["master_weights"] = {layer.weight.name: layer.weight.astype("float32")}
    paddle.save(layer.state_dict(), str(tmp_path / "model.pdparams"), protocol=protocol)
    paddle.save(state, str(tmp_path / "model.pdopt"), protocol=protocol)

    catalog = read(tmp_path, ["model.pdparams"])
    name = layer.weight.name
    found = described(catalog)
    assert found[("weight",)] == ("float32", (3, 4), name)
    assert found[("small",)][:2] == ("bfloat16", (5,))
    assert found[("steps",)][:2] == ("int64", (1,))
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert arrays.keys() == layer.state_dict().keys()
    for key, tensor in layer.state_dict().items():
        assert arrays[key].tobytes() == tensor.numpy().tobytes(), key

    catalog = read(tmp_path, ["model.pdopt"])
    found = described(catalog)
    assert found[("master_weights", name)][:2] == ("float32", (3, 4))
    assert all(variable for _, _, variable in found.values())
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert arrays[f"master_weights.{name}"].tobytes() == state["master_weights"][name].numpy().tobytes()
    moments = [key for key in state if "moment" in key]
    assert moments
    for key in moments:
        assert arrays[key].tobytes() == state[key].numpy().tobytes()
    assert dict(catalog.values)[("LR_Scheduler", "last_epoch")] == state["LR_Scheduler"]["last_epoch"]
    assert dict(catalog.values)[("LR_Scheduler", "last_lr")] == state["LR_Scheduler"]["last_lr"]

    both = read(tmp_path)
    assert ("model.pdparams", "weight") in described(both)
    assert ("model.pdopt", "master_weights", name) in described(both)
    assert [file.name for file in both.files] == ["model.pdopt", "model.pdparams"]


def test_nested_state_dicts_are_read(paddle: Any, tmp_path: Path) -> None:
    tensor = paddle.arange(6).reshape([2, 3])
    state = {"model": OrderedDict(w=tensor), "list": [tensor, 1], "epoch": 3, "pair": (1, "a"), "none": None}
    paddle.save(state, str(tmp_path / "all.pdparams"))
    catalog = read(tmp_path)
    assert set(described(catalog)) == {("model", "w"), ("list", ListIndex(0))}
    assert dict(catalog.values) == {("list", ListIndex(1)): 1, ("epoch",): 3, ("pair",): (1, "a"), ("none",): None}
    assert np.array_equal(read_catalog(LocalStorage(tmp_path), catalog)["model.w"].view(np.int64), tensor.numpy())


def test_variables_of_static_programs_are_read(paddle: Any, tmp_path: Path) -> None:
    core = paddle.base.core
    tensor = (core.DenseTensor if hasattr(core, "DenseTensor") else core.LoDTensor)()  # the name in Paddle 2.6
    tensor.set(WEIGHT, paddle.CPUPlace())
    paddle.save({"fc.w_0": tensor, "step": 3}, str(tmp_path / "static.pdparams"))
    catalog = read(tmp_path)
    assert described(catalog) == {("fc.w_0",): ("float32", (6, 4), None)}
    assert np.array_equal(read_catalog(LocalStorage(tmp_path), catalog)["fc.w_0"].view(np.float32), WEIGHT)


def test_uint16_is_what_paddle_takes_it_for(paddle: Any, tmp_path: Path) -> None:
    paddle.save({"w": paddle.ones([2], "bfloat16")}, str(tmp_path / "w.pdparams"))
    assert paddle.load(str(tmp_path / "w.pdparams"))["w"].dtype == paddle.bfloat16
    assert described(read(tmp_path))[("w",)][0] == "bfloat16"


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"t": "tensor"},
        {"scheduler": {"counts": "array"}, "t": "tensor"},
        {"model": {"t": "tensor"}, "counts": "array", "list": ["array", 3]},
    ],
)
def test_uint16_of_numpy_is_that_where_paddle_says_what_tensors_are(paddle: Any, tmp_path: Path, beside: Any) -> None:
    """Numbers of tokens, say: where nothing tells them from tensors, `paddle.load` takes them for some as well."""
    made = {"tensor": lambda: paddle.ones([2], "bfloat16"), "array": lambda: np.arange(3, dtype=np.uint16)}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(part) for key, part in value.items()}
        return [filled(part) for part in value] if isinstance(value, list) else made.get(value, lambda: value)()

    def dtypes(value: Any) -> Any:
        if isinstance(value, (dict, list)):
            parts = value.values() if isinstance(value, dict) else value
            return [name for part in parts for name in dtypes(part)]
        return [str(value.dtype).removeprefix("paddle.")] if hasattr(value, "dtype") else []

    paddle.save(filled({**beside, "more": {"counts": "array"}}), str(tmp_path / "all.pdparams"))
    by_paddle = dtypes(paddle.load(str(tmp_path / "all.pdparams")))
    assert sorted(tensor.dtype.name for tensor in read(tmp_path).tensors) == sorted(by_paddle)
    assert "uint16" in by_paddle


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_of_every_type_and_shape_are_read(protocol: int, tmp_path: Path) -> None:
    names = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")
    state = {name: np.ones((2, 0, 3) if i % 3 == 0 else (2,) * (i % 3), name) for i, name in enumerate(names)}
    state["long"] = np.arange(5000, dtype=np.float64)
    catalog = read_one(tmp_path, state, protocol)
    assert described(catalog) == {(key,): (array.dtype.name, array.shape, None) for key, array in state.items()}
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert all(arrays[key].tobytes() == array.tobytes() for key, array in state.items())


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_whose_axes_are_permuted_are_read(protocol: int, tmp_path: Path) -> None:
    """Newer versions of numpy write them by protocol 5 as they lie in memory."""
    cube = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    state = {str(axes): cube.transpose(axes) for axes in itertools.permutations(range(3))}
    arrays = read_catalog(LocalStorage(tmp_path), read_one(tmp_path, state, protocol))
    for key, array in state.items():
        assert arrays[key].shape == array.shape
        assert (arrays[key].view("<f4") == array).all(), key


@pytest.mark.parametrize(
    "more", [("A",), ("C", (0, 1)), ("K",), ("K", (0, 0)), ("K", (1,)), ("K", [1, 0]), ("K", (1, 0, 2)), ("F", (1, 0))]
)
def test_arrays_of_an_order_that_is_not_known_are_refused(tmp_path: Path, more: tuple[Any, ...]) -> None:
    class Made:
        def __reduce__(self) -> tuple[Any, ...]:
            return WEIGHT.__reduce_ex__(5)[0], (WEIGHT.tobytes(), WEIGHT.dtype, WEIGHT.shape, *more)

    with pytest.raises(UnsupportedValueError, match=r"model\.pdparams.*an array (in the order|whose axes)"):
        read_one(tmp_path, {"w": Made()}, 5)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_are_plain_and_equal(protocol: int, tmp_path: Path) -> None:
    values = {
        "none": None,
        "flag": True,
        "text": "ä",
        "long text": "text" * 30_000,
        "complex": 1 - 2.5j,
        "bytes": b"\x00\xff",
        "long bytes": b"\x00\xff" * 30_000,
        "list": [1, [2.5, {"a": (None,)}]],
        "empty": {},
        "odd keys": {None: 1, (1, "a"): 2, True: 3},
    }
    scalars = {"f": np.float32(0.5), "i": np.int64(-3), "b": np.bool_(True), "h": np.float16(2)}
    nested = {"d": {"e": 1, 5: "x"}}
    catalog = read_one(tmp_path, {**values, **scalars, **nested}, protocol)
    expected = {(key,): value for key, value in {**values, "f": 0.5, "i": -3, "b": True, "h": 2.0}.items()}
    assert dict(catalog.values) == {**expected, ("d", "e"): 1, ("d", 5): "x"}
    assert {path: type(value) for path, value in catalog.values}[("b",)] is bool


def test_arrays_of_protocol_2_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match="model.pdparams: 'w' was written with pickle protocol 2.*again"):
        read_one(tmp_path, {"w": WEIGHT}, 2)


def test_arrays_of_python_2_are_read(tmp_path: Path) -> None:
    """Which has byte strings where Python 3 has text."""

    def old(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    for data in (WEIGHT[:2].tobytes(), WEIGHT.repeat(100).tobytes()):
        pickled = (
            b"\x80\x02}q\x01(" + old(b"w") + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
            + old(b"b") + b"\x87R(K\x01M" + (len(data) // 4).to_bytes(2, "little") + b"\x85cnumpy\ndtype\n"
            + old(b"f4") + b"K\x00K\x01\x87R(K\x03" + old(b"<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            + b"T" + len(data).to_bytes(4, "little") + data + b"tbu."
        )  # fmt: skip
        catalog = read_one(tmp_path, pickled)
        assert described(catalog) == {("w",): ("float32", (len(data) // 4,), None)}
        assert read_catalog(LocalStorage(tmp_path), catalog)["w"].tobytes() == data
    loaded = pickle.loads(pickled, encoding="latin1")
    assert loaded["w"].tobytes() == data


def test_slices_of_a_big_tensor_are_one_tensor(tmp_path: Path) -> None:
    """As paddle.save has tensors of more than a GiB under protocols 2 and 3."""
    flat = WEIGHT.reshape(-1)
    state = {
        "a": WEIGHT,
        "w@@.0": flat[:10],
        "w@@.1": flat[10:20],
        "w@@.2": flat[20:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (6, 4), "slices": ["w@@.0", "w@@.1", "w@@.2"]}},
        "StructuredToParameterName@@": {"a": "a_0", "w": "w_0"},
    }
    catalog = read_one(tmp_path, state, 3)
    assert described(catalog) == {("a",): ("float32", (6, 4), "a_0"), ("w",): ("float32", (6, 4), "w_0")}
    arrays = read_catalog(LocalStorage(tmp_path), catalog)
    assert np.array_equal(arrays["w"].view(np.float32), WEIGHT)
    (tensor,) = (tensor for tensor in catalog.tensors if tensor.path == ("w",))
    assert tensor.pieces[0].box == Box((0, 0), (2, 4))
    for change in (
        {"w@@.1": flat[10:19]},
        {"w@@.1": flat[10:21]},
        {"w@@.1": flat[10:20].astype(np.int32)},
        {"w@@.1": flat[10:20].reshape(2, 5, order="F")},  # its elements would come to other places
        {"w@@.1": 3},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": (6, -4), "slices": []}}},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": ("6", 4), "slices": []}}},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": (2**61, 2**61), "slices": ["w@@.0"]}}},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": (6, 0), "slices": ["w@@.0", "w@@.1", "w@@.2"]}}},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": (6, 4), "slices": 3}}},
        {"UnpackBigParamInfor@@": {"w": {}}},
        {"UnpackBigParamInfor@@": 3},
    ):
        with pytest.raises(CheckpointCorruptedError, match="model.pdparams: "):
            read_one(tmp_path, {**state, **change})
    unnamed = read_one(tmp_path, {**state, "StructuredToParameterName@@": {"a": "a_0", "w": 5}}, 3)
    assert described(unnamed)[("w",)] == ("float32", (6, 4), None)


def write_parts(path: Path, index: str = "model_state.pdparams.index.json", **changes: Any) -> None:
    """A model of PaddleNLP's in two files with an index, in which other things may be said."""
    files = {"model_state-00001-of-00002.pdparams": ["a", "tied"], "model_state-00002-of-00002.pdparams": ["b"]}
    (path / "model_state-00001-of-00002.pdparams").write_bytes(pickle.dumps({"a": WEIGHT, "tied": WEIGHT}))
    second = {
        "b": WEIGHT.T,
        "tied": WEIGHT + 1,
        "more": np.ones(2),
        "StructuredToParameterName@@": {"b": "linear_0.w_0"},
    }
    (path / "model_state-00002-of-00002.pdparams").write_bytes(pickle.dumps(second))
    weight_map = {key: name for name, keys in files.items() for key in keys} | changes
    (path / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


class TestOfPaddleNLP(ReaderTests):
    """A model in several files with an index."""

    @pytest.fixture
    def reader(self) -> PdparamsReader:
        return READER

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> ForeignCheckpoint:
        write_parts(tmp_path)
        arrays = {"a": WEIGHT, "tied": WEIGHT, "b": WEIGHT.T, "more": np.ones(2)}
        return ForeignCheckpoint.of_folder(tmp_path, arrays=arrays)


def test_an_index_makes_one_state_dict_of_several_files(tmp_path: Path) -> None:
    write_parts(tmp_path)
    catalog = read(tmp_path)
    found = described(catalog)
    assert sorted(found) == [("a",), ("b",), ("more",), ("tied",)]
    assert found["b",] == ("float32", (4, 6), "linear_0.w_0")
    assert np.array_equal(read_catalog(LocalStorage(tmp_path), catalog)["tied"].view(np.float32), WEIGHT)
    (tmp_path / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 3}))
    catalog = read(tmp_path)
    assert {tensor.path[0] for tensor in catalog.tensors} == {"model_state.pdparams"}
    assert catalog.values == [(("scheduler.pdparams", "last_epoch"), 3)]
    assert sorted(described(read(tmp_path, ["model_state-00001-of-00002.pdparams"]))) == [("a",), ("tied",)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c": "model_state-00003-of-00002.pdparams"}, "names 'model_state-00003-of-00002.pdparams', which is missing"),
        ({"c": "../model.pdparams"}, "no name of a file"),
        ({"c": 5}, "model_state.pdparams.index.json: no index, or a damaged one"),
    ],
)
def test_an_index_that_is_wrong_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_parts(tmp_path, **changes)
    with pytest.raises(CheckpointCorruptedError, match=message):
        read(tmp_path)


def test_a_key_that_an_index_alone_has_is_left_out(tmp_path: Path) -> None:
    """But not all that it says of a file, which may be any file then."""
    first, second = "model_state-00001-of-00002.pdparams", "model_state-00002-of-00002.pdparams"
    write_parts(tmp_path, c=first)
    catalog = read(tmp_path)
    assert ("a",) in described(catalog)
    ((path, reason),) = catalog.left_out
    assert [path] == catalog.lost == [("c",)]
    assert reason == f"{first} has no 'c', which an index says is in it"
    write_parts(tmp_path, c=first, a=second, tied=second)
    with pytest.raises(CheckpointCorruptedError, match=re.escape(reason)):
        read(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_of_a_single_file_and_an_index_the_one_that_is_whole_is_taken(
    whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parts(tmp_path)
    (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps({"single": WEIGHT}))
    if not whole:
        (tmp_path / "model_state-00001-of-00002.pdparams").unlink()
    keys = {tensor.path[-1] for tensor in read(tmp_path).tensors}
    assert keys == ({"a", "b", "more", "tied"} if whole else {"single"})
    taken = "model_state.pdparams.index.json" if whole else "model_state.pdparams"
    assert caplog.text.rstrip().endswith(f"which names other files; {taken} is taken")


def test_names_of_files_are_those_of_state_dicts() -> None:
    for names in (["a.pdparams"], ["a.pdopt"], ["a b.pdparams", "x"], ["m_dist0.pdparams"]):
        assert READER.found(names) == [0]
    for names in (
        ["pdparams"],
        [".pdparams"],
        ["a.pdmodel"],
        ["a.pdparams.tmp"],
        ["m_dist0.pdparams", "m_dist0.pdattr"],
    ):
        assert READER.found(names) == []


class _Reduced:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def _bomb() -> Any:
    part: Any = [1]
    for _ in range(60):
        part = [part, part]
    return part


def _cycle() -> Any:
    part: Any = [WEIGHT]
    part.append(part)
    return part


def _deep() -> Any:
    part: Any = WEIGHT
    for _ in range(100):
        part = {"a": part}
    return part


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_bomb(), "model.pdparams: what has been read so far takes more time and memory"),
        (_cycle(), "levels deep, or contains itself"),
        (_deep(), "levels deep, or contains itself"),
        ({1.5: WEIGHT}, "'x' has a key above an array that is neither str nor int"),
        ({float("nan"): 1}, "a key that is float"),
        ({2.0**61: 1}, "a key that is float"),
        ({(1.5,): 1}, "a key that is float"),
        ({None: WEIGHT}, "'x' has a key above an array that is neither str nor int"),
        ({1, 2}, "has a set"),
        (slice(1), "builtins.slice"),
        (Path("x"), "asks for pathlib"),
        (_Reduced(bytes, [1, 2]), "makes bytes of other things"),
        (_Reduced(OrderedDict, [("a", 1, "b"), (2,)]), "model.pdparams: no pickle, or a damaged one"),
        (np.datetime64("2020-01-01"), "dtype"),
        (np.array(["a"]), "model.pdparams: 'x' has elements of numpy's dtype 'U1'"),
        ("\ud800", None),
        ({"\ud800": 1}, "has a key that is no text"),
        ((1, {"a": [np.float32(1), WEIGHT]}), None),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_held_is_refused_by_name(value: Any, message: str | None, tmp_path: Path) -> None:
    if message is None:
        catalog = read_one(tmp_path, {"x": value})
        assert len(catalog.tensors) + len(catalog.values) >= 1
    else:
        with pytest.raises((UnsupportedValueError, CheckpointCorruptedError), match=message):
            read_one(tmp_path, {"x": value})


@pytest.mark.parametrize("state", [{None: 1}, {(1, 2): 3, "a": 4}, {True: WEIGHT}, {0.5: 1}])
def test_keys_that_cannot_be_held_are_refused_at_the_top_as_well(state: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match="^model.pdparams is a dict with a key that is neither"):
        read_one(tmp_path, state)


def test_a_value_may_have_floats_for_keys(tmp_path: Path) -> None:
    value = {0.0: "zero", -1e-18: 1, 0.5: [2], 1e18: {0.1: None}}
    catalog = read_one(tmp_path, {"w": WEIGHT, "x": value})
    assert catalog.values == [(("x",), value)]


def test_a_scalar_of_another_size_than_its_type_is_damage(tmp_path: Path) -> None:
    function, (dtype, data) = np.float32(1.5).__reduce__()  # type: ignore[misc]
    assert read_one(tmp_path, {"x": _Reduced(function, dtype, data)}).values == [(("x",), 1.5)]
    for other in (data * 2, data[:2]):
        with pytest.raises(CheckpointCorruptedError, match="model.pdparams: no pickle, or a damaged one"):
            read_one(tmp_path, {"x": _Reduced(function, dtype, other)})


@pytest.mark.parametrize(("value", "kind"), [((1, WEIGHT), TupleIndex), ([1, WEIGHT], ListIndex)])
def test_tuples_and_lists_of_arrays_have_paths(value: Any, kind: type, tmp_path: Path) -> None:
    catalog = read_one(tmp_path, {"x": value})
    assert described(catalog) == {("x", kind(1)): ("float32", (6, 4), None)}
    assert type(catalog.tensors[0].path[1]) is kind
    assert type(catalog.values[0][0][1]) is kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([WEIGHT], "holds no state_dict, but list"),
        (WEIGHT, "holds no state_dict"),
        (b"", "model.pdparams: it is empty; download or copy it again"),
        (b"PK\x03\x04 no pickle", "model.pdparams is a zip file, as torch.save writes it"),
        (b"\xff no pickle", "no pickle, or a damaged one"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x031+1\x85R.", "asks for an evaluation"),
        (b"\x80\x02c__builtin__\neval\nX\x03\x00\x00\x001+1}\x86R.", "model.pdparams: asks for an evaluation"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00echo\x85R.", "model.pdparams: asks for os.system, which is not read"),
    ],
)
def test_what_is_no_state_dict_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedValueError, CheckpointCorruptedError), match=message):
        read_one(tmp_path, content)


def test_a_file_of_safetensors_is_no_damaged_one(tmp_path: Path) -> None:
    """`paddle.save(state_dict, "model.pdparams", safetensors=True)` writes one under whatever name it is given."""
    with pytest.raises(UnsupportedValueError, match=r"model.pdparams is of safetensors, .* call it .safetensors"):
        read_one(tmp_path, save({"w": WEIGHT}))
    (tmp_path / "model.pdparams").rename(tmp_path / "model.safetensors")
    assert SafetensorsReader().found([path.name for path in tmp_path.iterdir()]) == [0]


def test_what_is_shared_by_many_entries_takes_little_time(tmp_path: Path) -> None:
    key, shape = "ä" * 300, (1,) * 10_000
    array = np.zeros(3, np.float32)
    deep: Any = array
    for _ in range(60):
        deep = {key: deep}
    start = time.process_time()
    assert len(read_one(tmp_path, {f"w{i}": {key: array} for i in range(2000)}).tensors) == 2000
    for value, message in (
        ({f"w{i}": deep for i in range(2000)}, "a path of more than 4096 characters"),
        ({f"w{i}": _Shaped(shape) for i in range(2000)}, "'w0' is a damaged array: no list of at most 64 sizes"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_one(tmp_path, value)
    assert time.process_time() - start < 10


class _Shaped:
    """Pickled as an array of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        function, args, state = np.zeros(3, np.float32).__reduce__()  # type: ignore[misc]
        return function, args, (state[0], self.shape, *state[2:])
