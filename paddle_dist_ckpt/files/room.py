"""How much memory the Python values of a checkpoint may take: 48 MiB, and as much as the checkpoint has on the disk.

A stranger has to send as many bytes as he wants to cost, and a job that has millions of Python numbers has tensors,
too. Small lists and dicts are up to 26 times as large as their JSON (:func:`..core.decoding.json_cost`), so those of
one checkpoint are counted together: each once that is an entry of a data file, and twice what `.metadata` holds, which
a load has in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress

import msgspec

from ..core.decoding import json_cost
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import Storage
from ..storage.capabilities import what_is_on_disk
from .names import parse_data_file

__all__ = ["Room", "bytes_on_disk", "check_values_fit", "is_too_much", "record_cost"]

_FREE = 48 << 20


class _Values(msgspec.Struct, frozen=True):
    """What may be anything in `.metadata`, and in the information that a data file has about itself."""

    user_metadata: msgspec.Raw = msgspec.Raw(b"")
    values: msgspec.Raw = msgspec.Raw(b"")


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_VALUES_DECODER = msgspec.json.Decoder(_Values)


def record_cost(json: bytes | memoryview) -> int:
    """What the objects of such a record take at the most: values twice, and what is said of tensors once."""
    values = _VALUES_DECODER.decode(json)
    return json_cost(json) + json_cost(memoryview(values.user_metadata)) + json_cost(memoryview(values.values))


def is_too_much(cost: int, on_disk: int) -> bool:
    """Whether values that cost so much are refused, of a checkpoint that has so many bytes on the disk."""
    return cost > _FREE + on_disk


def check_values_fit(cost: int, nbytes: int) -> None:
    """See before a save that its values will not be refused, whose files will have so many bytes or more.

    Raises:
        UnsupportedValueError: they would be.
    """
    if is_too_much(cost, nbytes):
        raise UnsupportedValueError(
            f"a great many small Python values: lists, tuples, dicts and numbers of some {cost >> 20:,} MiB in memory, "
            f"and {nbytes >> 20:,} MiB to be written in all; these are {(cost - nbytes) >> 20:,} MiB more, and "
            f"{_FREE >> 20} are possible. Store them as numpy arrays"
        )


class Room:
    """What is left for the values of one checkpoint while they are decoded, one after another.

    Args:
        on_disk: Tells how many bytes its data files have that are really there. Asked once at most, and only where
            it matters.
        cost: What has been decoded of it before takes more than that has bytes.
    """

    def __init__(self, on_disk: Callable[[], int] = lambda: 0, cost: int = 0) -> None:
        self._on_disk, self._known = on_disk, -1
        self._cost, self._read = cost, 0

    def take(self, json: bytes | memoryview) -> None:
        """Count a value that is decoded of an entry of a data file.

        Raises:
            CheckpointCorruptedError: that is too much; or there is a zero byte in it.
        """
        self.spend(json_cost(json), len(json))

    def spend(self, cost: int, nbytes: int) -> None:
        """Count objects that are made of so many bytes, which are among those on the disk.

        Raises:
            CheckpointCorruptedError: that is too much.
        """
        self._cost += cost
        self._read += nbytes
        if not is_too_much(self._cost, self._read):
            return
        if self._known < 0:
            self._known = self._on_disk()
        there = max(self._known, self._read)
        if is_too_much(self._cost, there):
            raise CheckpointCorruptedError(
                f"more objects than its size has room for: its small Python values take up to {self._cost >> 20:,} "
                f"MiB, and the data files that are there have {there >> 20:,} MiB on the disk"
            )


def bytes_on_disk(storage: Storage, save_id: str) -> int:
    """How many bytes of a save's data files in this folder are really on the disk, holes left out.

    Each file counts once, however many names it has, and what cannot be looked at not at all.
    """
    found: dict[object, int] = {}
    for name in storage.names():
        parsed = parse_data_file(name)
        if parsed is not None and parsed.save_id == save_id:
            with suppress(OSError), closing(storage.open(name)) as file:
                identity, nbytes = what_is_on_disk(file, name)
                found[identity] = nbytes
    return sum(found.values())
