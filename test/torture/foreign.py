"""Checkpoints that other libraries wrote, damaged with a knowledge of their formats, and read.

Each is refused by an error of this library, or read as what keeps every promise of a catalog, in little time and
memory.
"""

from __future__ import annotations

import math
import os
import pickletools
import random
import re
import resource
import struct
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    LoadOptions,
    LoadReport,
    StateDictMismatchError,
    UnsupportedValueError,
    read_metadata,
    verify,
)
from paddle_dist_ckpt.core.dtypes import arithmetic_dtype
from paddle_dist_ckpt.folder.catalogs import read_foreign
from paddle_dist_ckpt.readers import READERS
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.reader_conformance import check_catalog, mutations
from paddle_dist_ckpt.tree.paths import parse_path
from test.jobs import try_load

__all__ = ["NAME", "attempt"]

NAME = "fuzzed foreign checkpoints"

_GOLDEN = Path(__file__).parents[1] / "golden"
_REFUSED = (CheckpointNotFoundError, CheckpointCorruptedError, UnsupportedValueError)
_MUTANTS = 40  # of an attempt
_MOST_ELEMENTS = 1 << 20
_WHOLE_EVERY = 8  # mutants that are loaded and verified besides
_MOST_MEMORY = 64 << 20
_MOST_SECONDS = 5.0  # of the processor
_MOST_MESSAGE = 4096  # characters
_NUMBERS = (0, 1, 2, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**58, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_TOKENS = (
    *(b"%d" % n for n in _NUMBERS),
    *(b"-1", b"0.5", b"1e999999", b"-0", b"9" * 5000, b"null", b"true", b"{}", b"[]", b"[" * 3000, b'""', b'"BF16"'),
    *(
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'"\\u0000"',
        b'"../x"',
        b'"/etc/passwd"',
        b'"__metadata__"',
        b'"' + b"k" * 5000 + b'"',
    ),
)
_TOKEN = re.compile(rb'"[^"]*"|-?\d+|[{}\[\],:]')
_MODULES = (
    b"builtins\neval\n",
    b"builtins\ntuple\n",
    b"os\nsystem\n",
    b"numpy\ndtype\n",
    b"collections\nOrderedDict\n",
)
_PUSHES = (b"N", b"K\x00", b"K\x01", b"(", b")", b"]", b"}", b"0", b"1", b"2", b"t", b"l", b"d", b"u", b"e", b"s", b"a")
_RECORDS = {b"PK\1\2": 46, b"PK\3\4": 30, b"PK\5\6": 22, b"PK\6\6": 56, b"PK\6\7": 20}  # how long each is at least


@cache
def _checkpoints() -> list[dict[str, bytes]]:
    """The files of the checkpoints, but for those that are no part of them."""
    left_out = ("expected.npz", "rank_mapping.csv")
    folders = sorted(path for path in _GOLDEN.iterdir() if path.is_dir() and not path.name.startswith(("native", "_")))
    return [
        {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name not in left_out}
        for folder in folders
    ]


@lru_cache(64)
def _edges(data: bytes) -> list[int]:
    """Where the instructions of a pickle start, and its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in what has been damaged before
        return [*(position or 0 for _, _, position in pickletools.genops(data)), len(data)]


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Read some damaged checkpoints; how many were refused, and how many read."""
    generator = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for i in range(_MUTANTS):
        files = _checkpoints()[generator.randrange(len(_checkpoints()))]
        name = generator.choice(sorted(files))
        path = folder / f"{i}"
        path.mkdir()
        for other, content in files.items():
            (path / other).write_bytes(content)
        damaged = files[name]
        for _ in range(generator.choice((1, 1, 1, 2, 5))):
            damaged = _damage(damaged, generator)
        (path / name).write_bytes(damaged)
        if generator.randrange(20) == 0:
            _misplace(path, name, generator)
        try:
            outcomes[_outcome(path, whole=i % _WHOLE_EVERY == 0)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutant {i} of {name}: {type(error).__name__}: {error}") from error
    return outcomes


def _outcome(path: Path, whole: bool) -> str:
    """Read a checkpoint: "refused" or "read"."""
    message = "none"
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        found = _read(path)
        if whole:
            found = _loaded(path)
    except _REFUSED as error:
        found, message = "refused", str(error)
    assert 0 < len(message) < _MOST_MESSAGE, f"a message of {len(message)} characters"
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    assert taken < _MOST_MEMORY, f"it takes {taken} bytes of memory"
    seconds = time.process_time() - start
    assert seconds < _MOST_SECONDS, f"it takes {seconds} s"
    return found


def _read(path: Path) -> str:
    storage = LocalStorage(path)
    metadata = read_foreign(storage, None)
    if metadata is None:
        return "refused"
    _ = metadata.values
    names = storage.names()
    reader, ids = next((reader, ids) for reader in READERS if (ids := reader.found(names)))
    check_catalog(storage, reader.read(storage, names, ids[-1]))
    return "read"


def _loaded(path: Path) -> str:
    """Verify a checkpoint that can be read, and load its tensors."""
    verify(path, options=LoadOptions(progress=False))
    table = read_metadata(path).table
    state: dict[Any, Any] = {}
    for number, (text, dtype) in enumerate(zip(table.paths, table.dtypes, strict=True)):
        shape = table.layouts[table.layout_of[number]].shape
        parts = parse_path(text)
        if math.prod(shape) < _MOST_ELEMENTS and all(isinstance(part, str) for part in parts):
            inner = state
            for part in parts[:-1]:
                inner = inner.setdefault(part, {})
            inner[parts[-1]] = np.zeros(shape, arithmetic_dtype(dtype))
    for outcome in try_load([state], path, options=LoadOptions(strict=False)) if state else ():
        if isinstance(outcome, _REFUSED):
            raise outcome
        assert isinstance(outcome, (LoadReport, StateDictMismatchError)), repr(outcome)
    return "loaded"


# -- damage


def _damage(data: bytes, generator: random.Random) -> bytes:
    """What has become of a file's content."""
    if not data:
        return generator.randbytes(8)
    kinds: list[Callable[[bytes, random.Random], bytes]] = [_any_damage]
    if data[:1] == b"\x80":
        kinds += [_damage_of_pickle] * 4
    elif data[:2] == b"PK":
        kinds += [_damage_of_zips] * 4
    elif data:
        kinds += [_damage_of_json] * 4
    try:
        return generator.choice(kinds)(data, generator)
    except (ValueError, IndexError, struct.error):  # it is too damaged already to be damaged with skill
        return _any_damage(data, generator)


def _any_damage(data: bytes, generator: random.Random) -> bytes:
    every = mutations(data, generator)
    for _ in range(generator.randrange(8)):
        next(every)
    return next(every)


def _damage_of_pickle(data: bytes, generator: random.Random) -> bytes:
    """Instructions left out, repeated, exchanged, put in, or with other arguments."""
    edges = _edges(data)
    at = generator.randrange(len(edges) - 1)
    other = generator.randrange(len(edges) - 1)
    until = min(len(edges) - 1, at + generator.choice((1, 1, 2, 5, 20)))
    before, these, after = data[: edges[at]], data[edges[at] : edges[until]], data[edges[until] :]
    kind = generator.randrange(7)
    if kind == 0:
        return before + after
    if kind == 1:
        return before + these * generator.choice((2, 3, 1000)) + after
    if kind == 2:
        return before + data[edges[other] : edges[min(len(edges) - 1, other + 3)]] + after
    if kind == 3:
        return before + generator.choice(_PUSHES) * generator.choice((1, 2, 100)) + these + after
    if kind == 4:
        number = generator.choice(_NUMBERS)
        size = max(1, number.bit_length() // 8 + 1)
        return before + b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True) + after
    if kind == 5:
        return (
            before + b"c" + generator.choice(_MODULES) + generator.choice((b"", b")R", b"(N", b"\x85R")) + these + after
        )
    argument = generator.choice((b"\x00", b"\xff", generator.randbytes(1), b"\x7f"))
    return before + these[:1] + argument * len(these[1:9]) + these[9:] + after


def _damage_of_zips(data: bytes, generator: random.Random) -> bytes:
    """A field of a record with another number; or a member's content changed, and its CRC-32 with it."""
    starts = [match.start() for match in re.finditer(rb"PK[\1\3\5\6][\2\4\6\7]", data)]
    at = generator.choice(starts)
    changed = bytearray(data)
    if generator.randrange(3) and data[at : at + 4] in _RECORDS:
        size = generator.choice((2, 4, 8))
        place = at + 4 + generator.randrange(0, _RECORDS[data[at : at + 4]] - 4 - 1, 2)
        number = generator.choice(_NUMBERS) & ((1 << 8 * size) - 1)
        changed[place : place + size] = number.to_bytes(size, "little")
        return bytes(changed)
    entry = data.index(b"PK\1\2", at)
    crc_at = entry + 16
    nbytes, name_size = struct.unpack_from("<LH", data, entry + 24)
    name = data[entry + 46 : entry + 46 + name_size]
    header = data.rindex(b"PK\3\4", 0, data.rindex(name, 0, entry))
    local_name, extra = struct.unpack_from("<2H", data, header + 26)
    content_at = header + 30 + local_name + extra
    content = bytearray(data[content_at : content_at + nbytes])
    for _ in range(generator.choice((1, 1, 2, 8))):
        content[generator.randrange(len(content))] = generator.choice(
            (0, 1, 0x30, 0x4E, 0x28, generator.randrange(256))
        )
    changed[content_at : content_at + nbytes] = content
    struct.pack_into("<L", changed, crc_at, zlib.crc32(content))
    return bytes(changed)


def _damage_of_json(data: bytes, generator: random.Random) -> bytes:
    """A token of a header, or of an index, left out, repeated, exchanged for another of it, or for a bad one."""
    is_header = data[:1] != b"{"
    nbytes = int.from_bytes(data[:8], "little") if is_header else len(data)
    text, rest = (data[8 : 8 + nbytes], data[8 + nbytes :]) if is_header else (data, b"")
    tokens = [match.span() for match in _TOKEN.finditer(text)]
    start, stop = generator.choice(tokens)
    other = text[slice(*generator.choice(tokens))]
    replacement = generator.choice(
        (b"", text[start:stop] * 2, other, generator.choice(_TOKENS), generator.choice(_TOKENS), b" " * 100)
    )
    text = text[:start] + replacement + text[stop:]
    if not is_header:
        return text
    size = len(text) if generator.randrange(5) else generator.choice(_NUMBERS) % 2**64
    return struct.pack("<Q", size) + text + rest


def _misplace(folder: Path, name: str, generator: random.Random) -> None:
    """Something else where a file was."""
    path = folder / name
    kind = generator.randrange(6)
    if kind == 0:
        path.rename(folder / f"{generator.randrange(10)}_{name}")
        return
    path.unlink()
    if kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to("/etc/hostname")
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.symlink_to(generator.choice(sorted(os.listdir(folder)) or ["x"]))
    else:
        path.write_bytes(generator.choice(list(_checkpoints()[0].values())))
