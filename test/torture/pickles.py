"""What pickles of others cost that somebody made to be as expensive as they can be.

    python -m test.torture.pickles [MIB]

Prints the processor time and the memory beyond its size that looking at each takes, of this many MiB (10), the worst
first. Each is one instruction, or a few, over and over.
"""

from __future__ import annotations

import pickle
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paddle_dist_ckpt import read_metadata

from .budgets import bytes_on_disk, cost_of

__all__ = ["PICKLES"]

_DICT = b"\x80\x04}"
_LIST = _DICT + b"\x8c\x01a]("
_FILE = "a.pdparams"


def _again(unit: bytes, start: bytes = _DICT, end: bytes = b".") -> Callable[[int], bytes]:
    return lambda size: start + unit * ((size - len(start) - len(end)) // len(unit)) + end


def _counted(unit: Callable[[int], bytes], start: bytes, end: bytes) -> Callable[[int], bytes]:
    return lambda size: start + b"".join(map(unit, range(size // len(unit(0))))) + end


def _number(i: int) -> bytes:
    return b"J" + struct.pack("<i", i)


PICKLES: dict[str, Callable[[int], bytes]] = {
    "short byte strings": _again(b"C\x0812345678", _LIST, b"es."),
    "texts of no characters": _again(b"X\0\0\0\0", _LIST, b"es."),
    "texts of four characters": _again(b"\x8c\x04abcd", _LIST, b"es."),
    "integers of no bytes": _again(b"\x8b\0\0\0\0", _LIST, b"es."),
    "an entry of a dict": _again(b"(NNu"),
    "keys that are tuples": _counted(lambda i: _number(i) + b"N\x86N", _DICT + b"(", b"u."),
    "keys that are texts": _counted(lambda i: b"\x8c\x06%06x}" % i, _DICT + b"(", b"u."),
    "numbers by name": _counted(lambda i: b"\x8c\x06%06xK\1" % i, _DICT + b"(", b"u."),
    "arrays of one byte": lambda size: pickle.dumps({f"{i:06x}": np.zeros(1, np.uint8) for i in range(size // 38)}, 4),
    "one half of a surrogate pair": _again(b"h\0", _LIST + b"\x8c\x03\xed\xa0\x80\x94", b"es."),
    "what is no number": _again(b"h\0", _LIST + b"G\x7f\xf8\0\0\0\0\0\0\x94", b"es."),
    "marks": _again(b"(1"),
    "what is dropped": _again(b"N0"),
}
"""By what they have of, what makes one of so many bytes."""


def _main(mebibytes: int) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        small, folder = Path(scratch, "small"), Path(scratch, "large")
        small.mkdir()
        folder.mkdir()
        (small / _FILE).write_bytes(pickle.dumps({"a": np.zeros(3)}, 4))
        for name, made in PICKLES.items():
            (folder / _FILE).write_bytes(made(mebibytes << 20))
            cost = cost_of(lambda path: len(read_metadata(path).table.paths), small, folder)
            rows.append((cost.seconds, cost.memory - bytes_on_disk(folder), name, cost.kinds[:1]))
    for seconds, beyond, name, kinds in sorted(rows, reverse=True):
        print(f"{seconds:6.2f} s {beyond / (1 << 20):7.1f} MiB beyond  {name}  {'; '.join(kinds) or 'read'}")


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
