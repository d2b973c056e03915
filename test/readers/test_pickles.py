"""Pickles are read without being executed: the same values as pickle.loads gives, and nothing but values."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.readers import pickles
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.pickle_machine import Machine
from paddle_dist_ckpt.readers.pickled_values import Built, Latin1, Lying, Refused
from paddle_dist_ckpt.readers.pickles import walk
from paddle_dist_ckpt.readers.window import WindowedFile
from paddle_dist_ckpt.storage import LocalStorage
from test.strategies import some
from test.torture.budgets import Cost, cost_of
from test.torture.hostile_files import problem_of

Walk = Callable[..., Any]


@pytest.fixture
def walked(tmp_path: Path) -> Walk:
    """The value of a pickle that stands in a file, between other bytes."""

    def walk_bytes(data: bytes, allowed: dict[str, Any] | None = None, before: bytes = b"", **more: Any) -> Any:
        (tmp_path / "file").write_bytes(before + data)
        with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
            return walk(file.window(len(before)), allowed or {}, **more)

    return walk_bytes


VALUES = [
    None,
    True,
    False,
    0,
    255,
    256,
    70_000,
    -1,
    2**31,
    -(2**63),
    2**2000,
    0.5,
    float("inf"),
    "",
    "text",
    "鸭\ud800\n'",
    "long" * 500,
    [],
    [1, [2, []]],
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    tuple(range(10)),
    {},
    {"a": 1, 2: "b", None: 3, True: {}, (1, "x"): []},
    list(range(3000)),
    {str(i): i for i in range(3000)},
]


@pytest.mark.parametrize(
    ("value", "protocol"), some(itertools.product(VALUES, range(6)), 84), ids=lambda value: repr(value)[:20]
)
def test_values_are_those_that_were_pickled(value: Any, protocol: int, walked: Walk) -> None:
    for data in (pickle.dumps(value, protocol), pickle._dumps(value, protocol)):  # type: ignore[attr-defined]
        found = walked(data)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("protocol", some([4, 2, 5], 2))
def test_it_does_not_matter_what_has_been_read_ahead(protocol: int, walked: Walk) -> None:
    parts = [{"name": f"tensor {i}", "offset": (i % 256, 7), "none": None, "no": False, "e": ()} for i in range(400)]
    for length in range(60):  # so that each instruction once lies over the end of what has been read
        value = ["x" * length, parts, parts[:9]]
        assert walked(pickle.dumps(value, protocol)) == value


def test_objects_may_be_many_as_they_are_in_the_metadata_of_many_shards(walked: Walk) -> None:
    """One for four bytes: only steps bound them, which a checkpoint has more of the larger its files are."""
    value = [(i % 256,) for i in range(400_000)]
    assert walked(pickle.dumps(value, 4)) == value


def test_what_is_one_object_stays_one(walked: Walk) -> None:
    part: list[Any] = [1]
    part.append(part)
    first, second = walked(pickle.dumps([part, part]))
    assert first is second
    assert first[1] is first


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 4096, 4097, 100_000])
def test_byte_strings_are_where_they_are_said_to_lie(nbytes: int, protocol: int, walked: Walk, tmp_path: Path) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    before, lying, after = walked(pickle.dumps(["before", data, "after"], protocol), before=b"header")
    assert (before, after) == ("before", "after")
    assert isinstance(lying, Lying)
    assert (lying.nbytes, lying.form) == (nbytes, "bytes")
    assert (tmp_path / "file").read_bytes()[lying.position :][:nbytes] == data
    assert lying.data == (data if nbytes <= 4096 else None)


def test_long_texts_are_not_read(walked: Walk, tmp_path: Path) -> None:
    text = "ä" * 100_000
    lying = walked(pickle.dumps(text))
    assert (lying.nbytes, lying.form, lying.data) == (200_000, "text", None)
    assert (tmp_path / "file").read_bytes()[lying.position :][:200_000].decode() == text


def test_strings_of_python_2_are_texts_that_lie_somewhere(walked: Walk, tmp_path: Path) -> None:
    long = b"\xff" * 5000
    short, lying = walked(b"\x80\x02]q\x00(U\x03a\xe4bT" + len(long).to_bytes(4, "little") + long + b"e.")
    assert (short, type(short)) == ("aäb", Latin1)
    assert (tmp_path / "file").read_bytes()[short.position :][:3] == b"a\xe4b"
    assert (lying.nbytes, lying.form) == (5000, "bytes")
    assert walked(b"\x80\x02}U\x01aK\x01s.") == {"a": 1}


@pytest.mark.parametrize("nbytes", [-1, -5, -6])
def test_no_string_leads_back_to_what_has_been_read(nbytes: int, walked: Walk) -> None:
    data = b"T" + nbytes.to_bytes(4, "little", signed=True) + b"."
    with pytest.raises(CheckpointCorruptedError, match=f"^file: it ends at byte 6, before {nbytes} bytes"):
        walked(data)


class _Thing(Built):
    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def build(self, state: Any) -> None:
        self.state = state


class Pickled:
    """Pickled by name, arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return (Pickled, self.args, {"state": 1})


@pytest.mark.parametrize("protocol", range(6))
def test_only_what_the_table_has_is_called(protocol: int, walked: Walk) -> None:
    data = pickle.dumps(Pickled(1, "x"), protocol)
    name = f"{Pickled.__module__}.Pickled"
    found = walked(data, {name: _Thing})
    assert (type(found), found.args, found.state) == (_Thing, (1, "x"), {"state": 1})
    with pytest.raises(UnsupportedValueError, match=f"file: asks for {name}, which is not read"):
        walked(data)


def test_what_functions_refuse_or_cannot_take_names_the_file(walked: Walk) -> None:
    data = pickle.dumps(Pickled(1, "x"))
    name = f"{Pickled.__module__}.Pickled"

    def refuse(*args: Any) -> None:
        raise Refused("has a thing")

    with pytest.raises(UnsupportedValueError, match="^file: has a thing$"):
        walked(data, {name: refuse})
    for function in (lambda: None, lambda a, b: a + b, lambda *args: 3, 3):
        with pytest.raises(CheckpointCorruptedError, match="^file: no pickle, or a damaged one, at byte"):
            walked(data, {name: function})


def test_objects_outside_are_asked_for(walked: Walk) -> None:
    data = b"\x80\x02X\x01\x00\x00\x00aQ."
    assert walked(data, persistent=lambda token: token * 2) == "aa"
    with pytest.raises(UnsupportedValueError, match="not in it"):
        walked(data)


HOSTILE = {
    "os.system": b"cos\nsystem\n(S'echo'\ntR.",
    "os.system, protocol 4": pickle.dumps(os.system),
    "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
    "inst": b"(S'x'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'x'\no.",
    "newobj": b"\x80\x02cos\nsystem\n)\x81.",
    "newobj_ex": b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.",
    "a name with newlines": b"\x80\x04\x8c\x02o\n\x8c\x06s\x1b[31m\x93.",
    "a call of a value": b"\x80\x02K\x01)R.",
    "a state for a value": b"\x80\x02}}b.",
    "extension": b"\x82\x01.",
    "out-of-band buffer": b"\x97.",
    "set": b"\x80\x04\x8f.",
    "protocol 9": b"\x80\x09N.",
    "huge bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "huge bytes, beyond 64 bits": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "huge text": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00.",
    "huge integer": b"\x80\x02\x8b\xff\xff\xff\x7f" + bytes(9),
    "negative integer": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "negative integer that leads to the end": b"\x8b\xfa\xff\xff\xff.",
    "negative string": b"T\xff\xff\xff\xff.",
    "huge decimal": b"I" + b"9" * 60_000 + b"\n.",
    "huge frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "memo out of range": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo not there": b"\x80\x02h\x05.",
    "memo negative": b"Np0\ng-1\n.",
    "memo negative, where there is something": b"Np0\n0I5\np-1\n0g0\n.",
    "memo gap": b"\x80\x02Nq\x030h\x02.",
    "memo gap, before much else": b"\x80\x02Nq\x030h\x02." + bytes(9),
    "memo gap, by a long number, before much else": b"\x80\x02Nq\x030j\x02\x00\x00\x00." + bytes(9),
    "a tuple of more than there is": b"\x80\x02N\x87.",
    "a string without quotes": b"Sab\n.",
    "a string with an escape": b"S'\\n'\n.",
    "empty": b"",
    "no pickle": b"PK\x03\x04",
    "two values": b"NN.",
    "nothing": b".",
    "open mark": b"(N.",
    "no mark": b"\x80\x02u.",
    "append to a tuple": b")Na.",
    "odd items": b"}(Nu.",
    "a dict as a key": b"}}Ns.",
    "a nested tuple as a key": b"})\x85\x85\x85Ns.",
    "bad utf-8": b"\x80\x04\x8c\x01\xff.",
    "line without end": b"I" + b"1" * 100_000,
    "collisions": b"}("
    + b"".join(b"\x8a\x0f" + (k * (2**61 - 1)).to_bytes(15, "little") + b"N" for k in range(9))
    + b"u.",
}


def cost_to_walk(walked: Walk, data: bytes, allowed: dict[str, Any] | None = None) -> Cost:
    """What it takes to walk a pickle, which is within what its size allows."""

    def walk_it(which: bytes) -> None:
        walked(which, allowed)

    cost = cost_of(walk_it, b"N.", data)
    assert problem_of(cost, len(data)) is None
    return cost


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, walked: Walk) -> None:
    with pytest.raises((CheckpointCorruptedError, UnsupportedValueError), match="^file: ") as caught:
        walked(HOSTILE[name])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", some(HOSTILE, len(HOSTILE) // 2))
def test_hostile_pickles_take_little_time_and_memory(name: str, walked: Walk) -> None:
    cost_to_walk(walked, HOSTILE[name])


_SIZE = 256 << 10
BOMBS = {
    "dicts": b"(" + b"}" * _SIZE,
    "marks": b"(" * _SIZE,
    "memos": b"N" + b"\x94" * _SIZE,
    "values": b"(" + b"N" * _SIZE,
    "byte strings": b"(" + b"C\x00" * (_SIZE // 2),
    "nested": b"]" * (_SIZE // 2) + b"a" * (_SIZE // 2) + b".",
    "tuples of twice the same": b")" + b"\x942\x86" * (_SIZE // 3) + b".",
    "copies": b"\x80\x04\x8c\x01c\x8c\x01c\x93\x94(" + b"N" * 60_000 + b"t\x94" + b"h\x00h\x01\x85R0" * 50_000 + b"N.",
    "states": b"\x80\x04\x8c\x01c\x8c\x01c\x93)R\x94(" + b"N" * 60_000 + b"t\x940" + b"h\x00h\x01b0" * 50_000 + b".",
}


@pytest.mark.parametrize("name", some(BOMBS, 5))
def test_bombs_take_little_time_and_memory(name: str, walked: Walk) -> None:
    cost_to_walk(walked, BOMBS[name], {"c.c": _Thing})


def test_damage_anywhere_is_endured(walked: Walk) -> None:
    value = {"a": [np.float64(1), (1, 2.5, None)], "b": {"c": b"bytes", "d": 2**70, "e": "text" * 30}}
    draw = random.Random(1)
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        for turn in range(400):
            damaged = bytearray(data[: draw.randrange(len(data))] if turn % 4 == 0 else data)
            for _ in range(draw.randrange(1, 4) if damaged else 0):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            with suppress(CheckpointCorruptedError, UnsupportedValueError):
                walked(bytes(damaged), {"numpy._core.multiarray.scalar": _Thing, "numpy.dtype": _Thing})


def test_numbers_take_no_call_each(walked: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()

    def counting(code: int) -> Callable[[Machine], object]:
        step = pickles._STEPS[code]
        assert step is not None
        return lambda machine: (calls.update([code]), step(machine))

    steps = [counting(code) if step else None for code, step in enumerate(pickles._STEPS)]
    monkeypatch.setattr(pickles, "_STEPS", steps)
    value = [[1000 + i, -70_000 - i, i / 3] for i in range(3_000)]
    assert walked(pickle.dumps(value, 4)) == value
    assert sum(calls[ord(code)] for code in "MJG") < 100, "those that lie where what has been read ahead ends"
