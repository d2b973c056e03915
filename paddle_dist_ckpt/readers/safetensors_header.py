"""The header of a safetensors file: eight bytes of length, JSON, and behind it the tensors' data without a gap."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import numpy as np

from ..core.dtypes import DTYPES
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..tree.values import DECODE_ERRORS
from .checks import AtPath, check_shape, shown
from .orders import LyingArray
from .others import LOOK, check_downloaded, what_it_is
from .window import WindowedFile

__all__ = ["SafetensorsHeader", "member_count", "read_safetensors_header", "spend_on_json"]

_MOST_BYTES = 100_000_000  # of a header: what the safetensors library accepts
_FIRST_READ = 16 << 10
_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.view_items == 1}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}  # of types not held
_METADATA = "__metadata__"
_STRING = re.compile(rb'"[^"]*"([ \t\n\r]*:)?')  # where nothing is escaped
_SIGN = re.compile(rb'(\\.|")([ \t\n\r]*:)?', re.DOTALL)
_ESCAPE = re.compile(rb"\\")
_STEPS = {b":": 20, b",": 5, b"\\": 3}  # of decoding a text, for each of these signs
_STEPS_OF_BYTES = 3, 10  # three for ten bytes: of long names there are three copies, and long numbers are as large
_WIDE, _WIDEST = 0xC4, 0xF0  # with which characters begin of which one makes all of its text two or four bytes each


class SafetensorsHeader(NamedTuple):
    """What a file has.

    Attributes:
        entries: Its tensors by their names.
        metadata: The strings that its writer has put beside them.
        refused: The names of tensors that cannot be held, with the reason.
    """

    entries: dict[str, LyingArray]
    metadata: dict[str, str]
    refused: dict[str, str]


class _TensorInfo(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_HEADER_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INFO_DECODER = msgspec.json.Decoder(_TensorInfo)
_METADATA_DECODER = msgspec.json.Decoder(dict[str, str] | None)


def read_safetensors_header(file: WindowedFile) -> SafetensorsHeader:
    """The header of an open file.

    Raises:
        CheckpointCorruptedError: the safetensors library would refuse it, or it names something twice.
        UnsupportedValueError: a tensor is of a type that nobody knows, or of a shape that no array has; or it is a file
            of another format.
    """
    name = file.name
    text = _text(file)
    spend_on_json(file, text)
    try:
        members = _HEADER_DECODER.decode(text)
        told = {key: _METADATA_DECODER.decode(members.pop(key)) or {} for key in (_METADATA,) if key in members}
        infos = {key: _INFO_DECODER.decode(member) for key, member in members.items()}
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its header cannot be read: {str(error)[:200]}") from error
    due = len(infos) * (1 + len(_TensorInfo.__struct_fields__)) + sum(1 + len(strings) for strings in told.values())
    if member_count(text) != due:
        raise CheckpointCorruptedError(f"{name}: its header has a name twice")
    entries, refused = _entries(infos, name, 8 + len(text), file.size)
    return SafetensorsHeader(entries, told.get(_METADATA, {}), refused)


def spend_on_json(file: WindowedFile, text: bytes | bytearray) -> None:
    """Count what it takes to decode a JSON text, before that is done; see :meth:`.Budget.spend`.

    That is what its signs take, or what its strings do, each as wide as if it had the text's widest character in it:
    short names take little beside their entries.
    """
    of_signs = sum(steps * text.count(sign) for sign, steps in _STEPS.items())
    steps, nbytes = _STEPS_OF_BYTES
    file.budget.spend(max(of_signs, len(text) * _width(text) * steps // nbytes), file.name)


def _width(text: bytes | bytearray) -> int:
    """How many bytes a character takes in the strings of a JSON text, at most."""
    highest = int(np.frombuffer(text, np.uint8).max(initial=0))
    return 4 if highest >= _WIDEST or rb"\u" in text else 2 if highest >= _WIDE else 1


def member_count(text: bytes | bytearray | msgspec.Raw) -> int:
    """How many members all objects of a JSON text have, those of one name counted each. It must be valid JSON."""
    view = memoryview(text)
    if not _ESCAPE.search(view):
        return sum(match[1] is not None for match in _STRING.finditer(view))
    count, within = 0, False
    for match in _SIGN.finditer(view):
        if match[1] == b'"':
            count += within and match[2] is not None
            within = not within
    return count


def _text(file: WindowedFile) -> bytes | bytearray:
    start = file.read(0, min(file.size, _FIRST_READ))
    nbytes = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= nbytes <= min(_MOST_BYTES, file.size - 8):
        check_downloaded(file.name, start[:LOOK])
        kind = what_it_is(start[:LOOK])
        if kind is not None:
            raise UnsupportedValueError(f"{file.name} is {kind}")
        raise CheckpointCorruptedError(
            f"{file.name} is no whole safetensors file: it has {file.size} bytes and a header of {nbytes}, of which at "
            f"most {_MOST_BYTES} are possible"
        )
    text = start[8 : 8 + nbytes]
    return text if len(text) == nbytes else file.read_large(8, nbytes)


def _entries(
    infos: dict[str, _TensorInfo], name: str, data_start: int, size: int
) -> tuple[dict[str, LyingArray], dict[str, str]]:
    """The entries, and what cannot be held, checked: their data fill what is behind the header, each once."""
    entries, refused, end = {}, {}, 0
    for key, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        where = AtPath(name, (key,))
        begin, stop = info.data_offsets
        if begin != end or stop < begin:
            raise CheckpointCorruptedError(
                f"{where} has bytes {shown(begin)} to {shown(stop)} of the data, where {end} comes next"
            )
        dtype = _DTYPES.get(info.dtype)
        bits = _BITS.get(info.dtype) if dtype is None else 8 * dtype.itemsize
        reason = f"{where} has the dtype {shown(info.dtype)}, which cannot be held" if dtype is None else ""
        if bits is None:
            raise UnsupportedValueError(reason)
        if min(info.shape, default=0) < 0 or check_shape(info.shape, bits, where) != 8 * (stop - begin):
            raise CheckpointCorruptedError(
                f"{where} has {shown(stop - begin)} bytes; {info.dtype}{shown(list(info.shape))} has others"
            )
        if dtype is None:
            refused[key] = reason
        else:
            entries[key] = LyingArray(dtype, info.shape, data_start + begin)
        end = stop
    if data_start + end != size:
        raise CheckpointCorruptedError(f"{name} has {size} bytes; its header speaks of {data_start + end}")
    return entries, refused
