"""Values come back equal and of the same type; what cannot is refused by name; what is hostile is refused."""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import random
import tracemalloc
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.tree.values import are_same, encode_value, from_jsonable, to_jsonable
from test.jobs import decode_value
from test.strategies import equal, examples

LISTED = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)],
    "beyond 64 bits": [2**63, -(2**63) - 1, 2**64, -(2**200)],
    "ten thousand digits": [10**10_000 + 7, -(10**10_000)],
    "floats": [0.0, -0.0, 1.0, 0.1, 1e22, 5e-324, 1.7976931348623157e308],
    "no numbers": [math.nan, math.inf, -math.inf],
    "complex": [1 + 2j, complex(-0.0, -0.0), complex(math.nan, math.inf), complex(1, math.nan)],
    "strings": ["", "a", "\0", "\u00e9\U0001f600", '"\\\n', "\u2028"],
    "lone surrogates": ["\ud800", "a\udfff", "\udc80\ud800"],
    "bytes": [b"", b"\0", bytes(range(256))],
    "tuples": [(), (1,), ((), (1, (2.0,)))],
    "empty containers": [[], {}, (), [[]], {"a": {}}, [()]],
    "int keys": {0: "a", -5: "b", 2**70: "c"},
    "keys that are alike": {"1": "str", 1: "int", (1,): "tuple", b"1": "bytes", None: "none"},
    "more keys": {1.5: "float", math.inf: "inf", 2j: "complex", True: "bool", ("a", (1, b"x")): "nested"},
    "our own words": {"int": "0x1", "tuple": [1], "dict": [["a", 1]], "array": 1, "numpy": 2, "float": "nan"},
    "one tag": {"float": "nan"},
    "numpy scalars": [
        *(np.dtype(code).type(1) for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")),
        np.float32(-0.0),
        np.float64("nan"),
        np.complex64(1 - 2j),
        np.complex128(complex(math.nan, 1)),
        np.str_("\u00e9"),
        np.str_(""),
        np.bytes_(b"abc"),
        np.datetime64("2024-05-06T07:08:09", "s"),
        np.datetime64("NaT"),
        np.timedelta64(5, "D"),
    ],
    "numpy scalars as keys": {np.int64(3): 1, np.str_("k"): 2},
    "odd arrays": [
        np.array(["a", "b\u00e9c"]),
        np.array(["\U0010ffff"]),
        np.array([b"x", b"yz"]),
        np.array(["2020-01-01", "NaT"], "M8[ns]"),
        np.array([[1, 2]], "m8[s]"),
        np.arange(3, dtype=">f4"),
        np.array(5, ">i2"),
        np.zeros((0, 3), ">f8"),
        np.array([], "U3"),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
    ],
}


@pytest.mark.parametrize("name", LISTED)
def test_listed_values_come_back(name: str) -> None:
    value = LISTED[name]
    assert equal(decode_value(encode_value(value, name)), value)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs", "L"]), max_size=3),
    st.binary(max_size=5),
    st.sampled_from([np.float32(1.5), np.int8(-1), np.bool_(True), np.str_("x"), np.datetime64(5, "s")]),
)
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2))
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@examples(40)
@given(values)
def test_drawn_values_come_back(value: Any) -> None:
    assert equal(decode_value(encode_value(value, "key")), value)


@pytest.mark.parametrize("value", [np.str_("a\0"), np.bytes_(b"a\0\0")])
def test_zeros_at_the_end_of_a_numpy_string_stay(value: np.generic) -> None:
    assert equal(decode_value(encode_value(value, "key")), value)


@pytest.mark.parametrize("text", ["1e300", "-5e-324", "1.7976931348623157e308", "0.1", "1E5", "-0.0", "1e-400"])
def test_numbers_however_large_and_small(text: str) -> None:
    value = decode_value(f"[{text}]".encode())
    assert are_same(value, [float(text)])
    assert decode_value(encode_value(value, "key")) == value


@pytest.mark.parametrize("text", ["1e309", "-1e400", "1.8e308"])
def test_numbers_that_are_no_floats_are_refused(text: str) -> None:
    with pytest.raises(CheckpointCorruptedError, match="Number out of range"):
        decode_value(f"[{text}]".encode())


def test_the_lists_of_a_tree_that_is_not_kept_become_those_of_the_value() -> None:
    tree = to_jsonable([[1, (2,)], {"a": [3]}], "key")
    value = from_jsonable(tree, kept=False)
    assert value == [[1, (2,)], {"a": [3]}]
    assert value is tree


def test_an_int_key_may_have_any_size() -> None:
    value = {10**10_000: {-(10**5_000): 1}}
    assert decode_value(encode_value(value, "key")) == value


def test_dicts_of_very_many_keys_of_one_hash_are_neither_stored_nor_read() -> None:
    """To make such a dict takes quadratic time."""
    few, many = ({complex(-1000003 * i, i): 0 for i in range(count)} for count in (60, 70))
    assert decode_value(encode_value(few, "key")) == few
    with pytest.raises(UnsupportedValueError, match="key: more than 64 keys of the dict have one hash"):
        encode_value(many, "key")
    pairs = [pair for part in (few, {k: 1 for k in many if k not in few}) for pair in to_jsonable(part, "")["dict"]]
    with pytest.raises(CheckpointCorruptedError, match="keys of one hash"):
        decode_value(msgspec.json.encode({"dict": pairs}))


@examples(40)
@given(values, values)
def test_two_values_are_the_same_if_they_are_written_alike(value: Any, other: Any) -> None:
    assert are_same(value, other) == (encode_value(value, "key") == encode_value(other, "key"))
    assert are_same(value, decode_value(encode_value(value, "key")))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({1: 0}, {True: 0}),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(2), -np.zeros(2)),
        ((np.zeros(2000),), (np.where(np.arange(2000) == 1000, 1, 0.0),)),
        ("a", b"a"),
        (np.str_("a"), "a"),
    ],
)
def test_values_that_are_not_the_same(value: Any, other: Any) -> None:
    assert not are_same(value, other)
    assert are_same(value, value)


def test_what_is_not_a_number_is_the_same() -> None:
    assert are_same({"a": [float("nan")]}, {"a": [float("nan")]})
    assert are_same(np.array([np.nan]), np.array([np.nan]))


def test_a_decoded_array_can_be_written_to() -> None:
    array = decode_value(encode_value(np.array(["ab", "c"]), "key"))
    array[0] = "x"
    assert array.tolist() == ["x", "c"]


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        object(),
        Colour.RED,
        Point(1),
        Text("x"),
        int,
        len,
        (1).__add__,
        bytearray(b"x"),
        memoryview(b"x"),
        range(3),
        decimal.Decimal(1),
        collections.deque([1]),
        np.array([object()]),
        np.array([(1, 2.0)], "i4,f8"),
        np.zeros(3, [("text", "U0"), ("number", "i4")])["text"],
        np.void(b"abc"),
        np.longdouble(1),
        np.clongdouble(1),
        np.ma.masked_array([1], [True]),
        {Colour.RED: 1},
        {frozenset(): 1},
        {(1, Colour.RED): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_name(value: object) -> None:
    for nested, place in ((value, "state"), ([0, value], r"state\[1\]"), ({"a": (value,)}, r"state\['a'\]\[0\]")):
        with pytest.raises(UnsupportedValueError, match=f"^{place}"):
            encode_value(nested, "state")


class Point(NamedTuple):
    x: int


class LikeAnArray:
    """As the tensors of static-graph programs are."""

    def __array__(self) -> np.ndarray[Any, Any]:
        return np.ones(3)


@dataclasses.dataclass
class Config:
    rate: float = 0.1


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Point(1), "tuple(x)"),
        (enum.IntEnum("Color", "RED")(1), "x.value"),
        (enum.Enum("Color", "RED")(1), "x.value"),
        (enum.Enum("Metric", "LOSS")(1), "x.value"),
        ({1}, "sorted(x)"),
        (frozenset(), "sorted(x)"),
        (pathlib.Path("/x"), "str(x)"),
        (datetime.datetime(2026, 1, 1), "x.isoformat()"),
        (datetime.date(2026, 1, 1), "x.isoformat()"),
        (datetime.timedelta(1), "x.total_seconds()"),
        (bytearray(b"x"), "bytes(x)"),
        (Config(), "dataclasses.asdict(x)"),
        (LikeAnArray(), "numpy.asarray(x)"),
        (np.ma.MaskedArray([1.0], mask=[True]), "x.data and numpy.ma.getmaskarray(x)"),
        (type("Accuracy", (type("Metric", (), {}),), {})(), "vars(x)"),
        (type("GeneratorState", (), {})(), "PerRank(paddle_dist_ckpt.rng_state())"),
        (collections.deque([1]), "list(x)"),
        (range(3), "list(x)"),
        (decimal.Decimal("1.5"), "str(x)"),
        (Config().__init__, "x()"),
        (random.Random(1), "x.getstate()"),
        (np.random.default_rng(1), "x.bit_generator.state"),
        (np.random.RandomState(1), "x.get_state()"),
        (type("DataLoader", (), {})(), "its epoch and number of used batches"),
        (type("DistributedBatchSampler", (), {})(), "its epoch and number of used batches"),
        (Config, None),
        (object(), None),
    ],
)
def test_what_to_store_instead_is_said(value: object, advice: str | None) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode_value(value, "k")
    said = str(caught.value).partition("; store ")[2]
    assert said.startswith("numbers, " if advice is None else f"{advice}, or numbers, ")


def test_a_value_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedValueError, match=r"^state.*deeper"):
        encode_value(endless, "state")


@pytest.mark.parametrize("bad", [False, True])
def test_long_keys_above_an_item_are_neither_copied_for_it_nor_shown_in_full(bad: bool) -> None:
    key = "k" * 10_000
    value: Any = [1, object()] if bad else [1, 2]
    for _ in range(100):
        value = {key: value}
    tracemalloc.start()
    try:
        if bad:
            with pytest.raises(UnsupportedValueError, match=r"^state\['kkk.*: an object cannot be stored") as caught:
                to_jsonable(value, "state")
            assert len(str(caught.value)) < 2000
        else:
            to_jsonable(value, "state")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_deepest_value_that_is_stored_can_be_read() -> None:
    value: Any = 1
    for i in range(199):
        value = ({"k": value}, [value], (value,))[i % 3]
    assert equal(decode_value(encode_value(value, "key")), value)


def numpy_tag(name: object, data: bytes = b"") -> dict[str, Any]:
    return {"numpy": [name, base64.b64encode(data).decode()]}


def array_tag(name: object, shape: object, data: bytes = b"") -> dict[str, Any]:
    return {"array": [name, shape, base64.b64encode(data).decode()]}


HOSTILE = [
    {},
    {"int": 5},
    {"int": "x"},
    {"int": None},
    {"int": ["0x1"]},
    {"nope": 1},
    {"int": "0x1", "float": "nan"},
    {"float": "1.5"},
    {"float": 1},
    {"float": []},
    {"complex": [1.0]},
    {"complex": [1.0, 2.0, 3.0]},
    {"complex": ["1", "2"]},
    {"complex": [1, 2.0]},
    {"complex": [1.0, 2]},
    {"complex": [{"int": "0x1" + "0" * 400}, 1.0]},
    {"complex": 7},
    {"bytes": "!"},
    {"bytes": "AAA"},
    {"bytes": "\u00e9"},
    {"bytes": 5},
    {"str": "/w=="},
    {"tuple": 5},
    {"tuple": None},
    {"dict": 5},
    {"dict": [1]},
    {"dict": [["a"]]},
    {"dict": [["a", 1, 2]]},
    {"dict": [[[], 1]]},
    {"dict": [[{"dict": []}, 1]]},
    numpy_tag("O", bytes(8)),
    numpy_tag("|O", bytes(8)),
    numpy_tag("V4", bytes(4)),
    numpy_tag("i4,f8", bytes(12)),
    numpy_tag("(,2)f4"),
    numpy_tag("(,2)f4,f4"),
    numpy_tag("{'a': 1}"),
    numpy_tag("f4", bytes(4)),
    numpy_tag("<f4", bytes(5)),
    numpy_tag("<f4", bytes(8)),
    numpy_tag("|S3", bytes(5)),
    numpy_tag("<f4"),
    numpy_tag("<U1", b"\xff\xff\xff\xff"),
    numpy_tag("<U99999999999"),
    numpy_tag("<M8[7/0s]"),
    numpy_tag(None),
    numpy_tag(["<f4"]),
    numpy_tag(""),
    {"numpy": ["<f4"]},
    {"numpy": "<f"},
    array_tag("<f4", [10**9] * 3),
    array_tag("<f4", [0, 10**30]),
    array_tag("<f4", [0, 2**62, 2**62]),
    array_tag("<f4", [3]),
    array_tag("<f4", [3], bytes(8)),
    array_tag("<f4", [0], bytes(4)),
    {"array": ["|S4", [], "AAAA===="]},
    array_tag("|S0", [1 << 20]),
    array_tag("<f4", [-1], bytes(4)),
    array_tag("<f4", [-1, -1], bytes(4)),
    array_tag("<f4", [0, -1]),
    array_tag("<f4", [1.0], bytes(4)),
    array_tag("<f4", ["1"], bytes(4)),
    array_tag("<f4", None),
    array_tag("<f4", [1] * 70, bytes(4)),
    array_tag("<O", [0]),
    {"array": []},
    {"array": "abc"},
    {"array": ["<U1", [1], "/////w=="]},
    {"array": [">U1", [1], "AP///w=="]},
    {"array": ["<M8[0s]", [1], "AAAAAAAAAAA="]},
    {"numpy": ["<m8[0s]", "AAAAAAAAAAA="]},
]


@pytest.mark.parametrize(
    "shape", [[1 << 26, "~2"], [1 << 26, [0]], {"a": 1 << 26}, [0, True], [-1, 0], [2**60] * 20_000, None, "12"]
)
def test_a_shape_that_is_none_takes_no_memory(shape: Any) -> None:
    """A text or a list times a number is as large as somebody likes."""
    data = msgspec.json.encode({"array": ["<f2", shape, ""]})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptedError):
            decode_value(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda tree: str(tree)[:40])
def test_hostile_trees_are_refused(tree: Any) -> None:
    for whole in (tree, [tree], {"tuple": [1, tree]}, {"dict": [["k", tree]]}):
        with pytest.raises(CheckpointCorruptedError):
            decode_value(msgspec.json.encode(whole))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"nan",
        b"[1,]",
        b"[" * 100_000,
        b'{"tuple":[' * 5_000 + b"]}" * 5_000,
        b"1" * 10_000,
        b"1e999",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptedError):
        decode_value(data)


def test_deep_trees_are_refused_without_an_end_of_the_stack() -> None:
    tree: Any = 1
    for _ in range(600):
        tree = {"tuple": [tree]}
    with pytest.raises(CheckpointCorruptedError):
        from_jsonable(tree)


json_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(
        ["nan", "0x1f", "-0x1", "AAAA", "AAAAAA==", "<f4", "<i8", "|b1", "<U1", "|S2", "<M8[s]", "(1,)f4", "O"]
    ),
)
tags = st.one_of(
    st.sampled_from(["int", "float", "complex", "bytes", "str", "tuple", "dict", "numpy", "array"]), st.text(max_size=3)
)
json_trees = st.recursive(
    json_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(tags, inner, min_size=1, max_size=1),
        st.dictionaries(tags, inner, max_size=2),
        st.tuples(
            st.sampled_from(["<f4", "|b1", "<U1", "<M8[s]"]), st.lists(st.integers(-2, 3), max_size=3), inner
        ).map(lambda content: {"array": list(content)}),
    ),
    max_leaves=10,
)


@examples(100)
@given(json_trees)
def test_any_json_is_decoded_or_refused(tree: Any) -> None:
    try:
        value = decode_value(msgspec.json.encode(tree))
    except CheckpointCorruptedError:
        return
    assert equal(decode_value(encode_value(value, "key")), value)


@examples(40)
@given(st.text(st.sampled_from("<>|=biufcSUMmOV(),0123456789[]snD'/-{}: "), max_size=8), st.binary(max_size=8))
def test_any_dtype_string_is_decoded_or_refused(name: str, data: bytes) -> None:
    for tree in (numpy_tag(name, data), array_tag(name, [1], data), array_tag(name, [0])):
        try:
            from_jsonable(tree)
        except CheckpointCorruptedError:
            continue


@pytest.mark.parametrize(
    "tree", [{"tuple": "abc"}, {"dict": ["ab"]}, {"dict": {"ab": 1}}, {"int": "1_0"}, {"int": " 0x1"}]
)
def test_what_no_writer_writes_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointCorruptedError):
        from_jsonable(tree)


@pytest.mark.parametrize("more", [-1, 0, 1, 2, 3, 4, 3 << 18])
def test_long_bytes_are_decoded_in_pieces(more: int) -> None:
    """Beside the text and the result nothing takes as much memory as these."""
    value = np.random.default_rng(more % 100).bytes((3 << 20) + more)
    data = encode_value([value], "x")
    tracemalloc.start()
    try:
        assert decode_value(data) == [value]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) + len(value) + (3 << 20)


@pytest.mark.parametrize("at", [(1 << 20) - 1, 1 << 20, (2 << 20) - 4])
@pytest.mark.parametrize("wrong", ["=", "!", "\u00e9"])
def test_long_bytes_that_are_no_base64(at: int, wrong: str) -> None:
    text = "A" * (3 << 20)
    for damaged in (text[:at] + wrong + text[at + 1 :], text[:at] + wrong * 4 + text[at + 4 :], text[:-1]):
        with pytest.raises(CheckpointCorruptedError):
            decode_value(msgspec.json.encode({"bytes": damaged}))


def test_keys_of_one_hash_are_neither_saved_nor_read() -> None:
    number = 2**61 - 1  # whose multiples have the hash 0
    few, many = {i * number: i for i in range(64)}, {i * number: i for i in range(65)}
    tree = to_jsonable([few], "v")
    assert from_jsonable(tree) == [few]
    with pytest.raises(UnsupportedValueError, match="more than 64 keys of the dict have one hash"):
        to_jsonable([many], "v")
    tree[0]["dict"].append([64 * number, 64])
    with pytest.raises(CheckpointCorruptedError, match="keys of one hash"):
        from_jsonable(tree)
