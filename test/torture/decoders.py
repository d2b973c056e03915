"""Files in our own format with something changed in what they say, and checksums that are right again.

What is decoded is what anybody may have written. So of each mutant either nothing comes but a CheckpointError, or
something that does not contradict itself: what is decoded can be encoded, and is the same when it is decoded again.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_dist_ckpt import rebuild_metadata, verify
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.files.datafile import read_info
from paddle_dist_ckpt.tree.state_dict import PerRank
from paddle_dist_ckpt.tree.values import encode_value
from test.jobs import data_files, decode_value, files_in, load_whole, make_array, save_on, split_rows

from .crafting import digest_around, dumped, metadata_around, write_metadata

__all__ = ["NAME", "attempt"]

NAME = "fuzzed files"
BATCH = 200
_WHOLE = 3  # mutants of each batch are files that are loaded, verified and rebuilt
_ALL = 0.25
"""How often it is the checkpoint, or the value, with everything in it that is changed, and not a small one: of that a
change is sooner somewhere where it matters, and it takes less time."""
_MEMORY = 64 << 20
_SECONDS = 2.0
VALUE: dict[Any, Any] = {
    "none": None,
    "flags": [True, False],
    "ints": [0, -1, 2**63 - 1, 2**200],
    "floats": [0.5, float("nan"), float("-inf"), 1e300],
    "complex": 1.5 - 2j,
    "text": ["", "a/b~c", "\ud800", "\0"],
    "bytes": b"\0\xff",
    "nested": [[], (), {}, [[(1, [2])]], {1: {(2, 3): b"x"}}],
    "numpy": [np.float32(1), np.str_("ab"), np.datetime64(5, "s"), np.array(["x", "yz"]), np.zeros((0, 3), "<f2")],
}
_ODD: Sequence[Any] = (
    *(None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 1.5, 1e308, -0.0),
    *("", "a", "/", "\0", "~", "~2", "/~l0", "/~i5", "/~r0", "/a/b", "é", "\ud7ff", "x" * 300, "0x" + "f" * 50, "<u8"),
    *([], {}, [[]], [[], []], [None] * 20, {"tuple": []}, {"dict": [[[], 1]]}, {"int": "5"}, {"x": 1, "y": 2}),
    *({"array": ["|S0", [2**31], ""]}, {"array": ["<f4", [-1], "AAAA"]}, {"numpy": ["|S0", ""]}, {"float": 1}),
    *(["<u1", ""], ["<u1", "AA=="], ["<u8", "//////////8="], ["<i4", "AAAAAA=="], ["<u2", "AA=="]),
)


class _Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read_into(self, buffers: Sequence[np.ndarray], offset: int, once: bool = False) -> None:
        for buffer in buffers:
            part = self._data[offset : offset + len(buffer)]
            if len(part) < len(buffer):
                raise EOFError("it ends")
            buffer[:] = np.frombuffer(part, np.uint8)
            offset += len(part)

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Original(NamedTuple):
    """The files of a checkpoint, those that hold data, the id of its save, and the second line of its `.metadata`."""

    files: dict[str, bytes]
    data: tuple[str, ...]
    save: str
    body: bytes


@functools.cache
def _originals() -> tuple[_Original, ...]:
    """The checkpoint with everything in it, and small ones."""
    array, small = make_array((9, 7)), make_array((6,), "complex128")

    def everything(rank: int) -> dict[Any, Any]:
        return {
            "model": {
                "w": split_rows(array, 2)[rank],
                "empty": np.zeros((0, 2)),
                "list": [small, {"b": make_array((3, 3), "bfloat16")}],
            },
            "epoch": 3,
            5: "five",
            "large": list(range(2000)),
            "own": PerRank({"seed": rank}),
            "value": VALUE,
        }

    states: list[Callable[[int], dict[Any, Any]]] = [
        everything,
        lambda rank: {"w": split_rows(array, 2)[rank]},
        lambda rank: {"model": {"list": [small, {"b": make_array((3, 3), "bfloat16")}]}, "empty": np.zeros((0, 2))},
        lambda rank: {"epoch": 3, 5: "five", "own": PerRank({"seed": rank}), "w": small},
        lambda rank: {"large": list(range(2000)), "w": [split_rows(array, 2)[rank], split_rows(array, 2)[rank]]},
    ]
    return tuple(map(_saved, states))


def _saved(state_of: Callable[[int], dict[Any, Any]]) -> _Original:
    with tempfile.TemporaryDirectory() as name:
        save_on([state_of(rank) for rank in range(2)], Path(name))
        files = files_in(Path(name))
    head, body = files["0.metadata"].split(b"\n")[:2]
    data = tuple(name for name in files if name.endswith(".safetensors"))
    return _Original(files, data, str(json.loads(head)["save"]), body)


def _one_of(rng: random.Random) -> _Original:
    everything, *small = _originals()
    return everything if rng.random() < _ALL else rng.choice(small)


def _nodes(tree: Any, found: list[tuple[Any, Any]]) -> None:
    """Every place in a tree: the container, and the key or index."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], (dict, list)):
            _nodes(tree[key], found)


def _is_column(value: Any) -> bool:
    if type(value) is not list or len(value) != 2 or value[0] not in ("<u1", "<u2", "<u4") or type(value[1]) is not str:
        return False
    with suppress(ValueError):
        return len(base64.b64decode(value[1], validate=True)) % int(value[0][-1]) == 0
    return False


def mutated(rng: random.Random, tree: Any) -> Any:
    """The tree, which may be used up, with some places changed, moved, doubled or lost."""
    tree = [tree]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _nodes(tree, places)
        target, key = rng.choice(places)
        value, how = target[key], rng.random()
        if _is_column(value) and how < 0.6:
            numbers = np.frombuffer(base64.b64decode(value[1]), value[0]).copy()
            if len(numbers):
                numbers[rng.randrange(len(numbers))] = rng.choice((0, 1, 2, 200))
            numbers = np.resize(numbers, max(0, len(numbers) + rng.choice((-1, 0, 0, 0, 1))))
            target[key] = [value[0], base64.b64encode(numbers.tobytes()).decode()]
        elif how < 0.35:
            target[key] = copy.deepcopy(rng.choice(_ODD))
        elif how < 0.5:
            other, place = rng.choice(places)
            target[key] = copy.deepcopy(other[place])
        elif how < 0.6 and tree[0] is not value:
            del target[key]
        elif how < 0.7 and isinstance(target, list) and target is not tree:
            target.insert(key, copy.deepcopy(value))
        elif type(value) is int:
            target[key] = rng.choice((value + 1, value - 1, -value, value * 2, value ^ 1 << rng.randrange(64)))
        elif type(value) is str:
            at = rng.randrange(len(value) + 1)
            target[key] = (
                value[:at] + rng.choice(("", "a", "/", "~", ".", "0", "=", "\n")) + value[at + rng.randrange(2) :]
            )
        elif type(value) is list:
            rng.shuffle(value)
    return tree[0]


def _blurred(rng: random.Random, text: bytes) -> bytes:
    """Some bytes of a text changed, without a thought of what they mean."""
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.choice((b"", b"0", b'"', b"[", b"]", b"{", b",", b"\xff", b"e9", b"\\u"))
    return bytes(data)


def _mutant(rng: random.Random, text: bytes) -> bytes:
    if rng.random() < 0.15:
        return _blurred(rng, text)
    return dumped(mutated(rng, json.loads(text)))


def _metadata(rng: random.Random, folder: Path) -> None:
    """A `.metadata` is decoded."""
    original = _one_of(rng)
    metadata = decode_metadata(metadata_around(_mutant(rng, original.body), original.save), "0.metadata", 0)
    _ = metadata.values, metadata.user_metadata, metadata.flat_mapping
    text = encode_metadata(metadata)
    assert encode_metadata(decode_metadata(text, "0.metadata", 0)) == text, "it is another one when it is decoded again"
    sizes = metadata.table.file_bytes(len(metadata.files)).tolist()
    assert all(info.size > size for info, size in zip(metadata.files, sizes, strict=True)), "larger than its file"


def _header(rng: random.Random, folder: Path) -> None:
    """A data file's header is decoded."""
    original = _one_of(rng)
    name = rng.choice(original.data)
    read_info(_Bytes(_with_header(original.files[name], functools.partial(_changed_header, rng))), name)


def _value(rng: random.Random, folder: Path) -> None:
    """A value is decoded."""
    keys = list(VALUE) if rng.random() < _ALL else rng.sample(list(VALUE), 2)
    value = decode_value(_mutant(rng, encode_value({key: VALUE[key] for key in keys}, "v")))
    try:
        text = encode_value(value, "v")
    except CheckpointError as error:
        if "cannot be stored" not in str(error):
            raise AssertionError("it was decoded, and cannot be encoded") from error
        return
    assert encode_value(decode_value(text), "v") == text, "it is another value when it is decoded again"


def _files(rng: random.Random, folder: Path) -> None:
    """A checkpoint is loaded, verified and rebuilt."""
    original = _one_of(rng)
    folder.mkdir()
    for name in original.data:
        (folder / name).write_bytes(original.files[name])
    if rng.random() < 0.5:
        write_metadata(folder, _mutant(rng, original.body), original.save)
        calls: list[Callable[[], Any]] = [lambda: verify(folder), lambda: load_whole(folder)]
    else:
        file = rng.choice(data_files(folder))
        file.write_bytes(_with_header(file.read_bytes(), functools.partial(_changed_header, rng)))
        calls = [lambda: rebuild_metadata(folder), lambda: verify(folder), lambda: load_whole(folder)]
    refused = 0
    for call in calls:
        try:
            call()
        except CheckpointError:
            refused += 1
    if refused == len(calls):
        raise CheckpointCorruptedError("by all")


def _changed_header(rng: random.Random, header: dict[str, Any]) -> bytes:
    """The text of a header of which the information for rebuilding was changed, or anything."""
    if rng.random() < 0.8:
        header["__metadata__"]["info"] = _mutant(rng, header["__metadata__"]["info"].encode()).decode(errors="replace")
        return dumped(header)
    text = dumped(dict(mutated(rng, header).items()))
    start = b'{"__metadata__":{"xxh3_64":"'
    return text if text.startswith(start) else start + b"0" * 16 + b'"}}'


def _with_header(data: bytes, change: Callable[[dict[str, Any]], bytes]) -> bytes:
    """A data file with a changed header, whose digest is right."""
    size = 8 + int.from_bytes(data[:8], "little")
    try:
        text = change(json.loads(data[8:size]))
    except AttributeError:  # it is no object any more
        text = b"[]"
    at, header = 8 + len('{"__metadata__":{"xxh3_64":"'), bytearray(len(text).to_bytes(8, "little") + text)
    if len(header) > at + 16:
        header[at : at + 16] = digest_around(bytes(header), at).encode()
    return bytes(header) + data[size:]


def attempt(seed: int, folder: Path) -> Counter[str]:
    """A batch of mutants, each as little different from the original as can be."""
    rng, outcomes = random.Random(seed), Counter[str]()
    _originals()
    for number in range(BATCH):
        kind = _files if number < _WHOLE else rng.choice((_metadata, _metadata, _header, _value))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            kind(rng, folder / f"{number}")
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}, {kind.__doc__}: {error!r}") from error
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10
        assert memory <= _MEMORY, f"mutant {number} of seed {seed} took {memory} bytes of memory"
        seconds = time.process_time() - start
        assert seconds <= _SECONDS, f"mutant {number} of seed {seed} took {seconds} s"
    return outcomes
