"""The zip files that ``torch.save`` writes, one behind the other in a file: where their members lie.

A zip file is read from its end: there a record says where its directory is, which says of each member its size, its
CRC-32 and where its local header stands, behind which are its bytes. torch compresses nothing.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from typing import NamedTuple

from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import Storage
from .budget import Budget
from .checks import shown
from .others import LOOK, check_downloaded
from .window import WindowedFile

__all__ = ["AheadFile", "TorchZip", "ZipMember"]

_AHEAD = 8 << 10  # more than what a zip of one tensor has before and behind the tensor's data
_HEAD = 1 << 10
_CHUNK = 1 << 20
_VERIFIED_BY_STEP = 64  # bytes
# What is asked for of each record; x are bytes that do not matter.
_END = struct.Struct("<4s6xH2LH")  # signature, entries, size and place of the directory, length of a comment
_LOCATOR = struct.Struct("<4s4xQL")  # signature, place of the end of 64 bits, number of disks
_END_64 = struct.Struct("<4s28x3Q")  # signature, entries, size and place of the directory
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")  # signature, flags, method, CRC-32, sizes, lengths of texts, local header
_LOCAL = struct.Struct("<4s2x2H16x2H")  # signature, flags, method, lengths of texts
_ENCRYPTED = 1
_UNKNOWN_32 = 0xFFFFFFFF


class AheadFile(WindowedFile):
    """A file that is read in blocks, of which the last two are kept: the end of one zip is by the start of the next."""

    def __init__(self, storage: Storage, name: str, budget: Budget) -> None:
        super().__init__(storage, name, budget)
        self._blocks: list[tuple[int, bytes]] = []

    def __enter__(self) -> AheadFile:
        return self

    def read(self, position: int, nbytes: int) -> bytes:
        """See :meth:`WindowedFile.read`."""
        for start, data in self._blocks:
            if start <= position and position + nbytes <= start + len(data):
                return data[position - start : position - start + nbytes]
        ahead = min(_AHEAD, self.size - position)
        if nbytes > ahead:
            return super().read(position, nbytes)
        self._blocks = [(position, super().read(position, ahead)), *self._blocks[:1]]
        return self._blocks[0][1][:nbytes]


class ZipMember(NamedTuple):
    """Where a member's bytes lie in the file, how many there are, and their CRC-32; None if none was computed."""

    position: int
    nbytes: int
    crc32: int | None


class _Listed(NamedTuple):
    """A member as the directory has it: where its local header is in the file, its size and CRC-32."""

    header: int
    nbytes: int
    crc32: int


class TorchZip:
    """One zip in a file.

    Args:
        file: The file.
        start: Where in it the zip starts.
        stop: Where it ends.
        most: How large its directory may be, in bytes.

    Raises:
        CheckpointCorruptedError: no such zip is there, or it is damaged.
        UnsupportedValueError: a member is compressed or encrypted, or the data are of another byte order.
    """

    def __init__(self, file: AheadFile, start: int, stop: int, most: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        if not 0 <= start <= stop - _END.size <= file.size - _END.size:
            check_downloaded(file.name, file.read(0, min(LOOK, file.size)))
            raise self._damaged(f"the file has {file.size} bytes")
        file.read(start, min(_HEAD, stop - start))  # what comes before the data: one look in a remote storage
        at, nbytes, count = self._directory()
        if not (start <= at <= at + nbytes <= stop and nbytes <= most and count * _ENTRY.size <= nbytes):
            raise self._damaged(f"its directory of {count} members has {nbytes} bytes at byte {at}")
        self._data_stop = at
        self._members = self._listed(file.read(at, nbytes), count)
        self._headers = sorted(member.header for member in self._members.values())
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._damaged("it has no data.pkl")
        self._archive = pickles[0].removesuffix("data.pkl")
        if self._archive + "byteorder" in self._members:
            self._check_byte_order(self.member("byteorder"))

    @property
    def where(self) -> str:
        """What to call it in messages."""
        return f"{self.file.name}, bytes {self.start} to {self.stop}"

    def member(self, name: str) -> ZipMember:
        """Where a member lies; its name without the archive's before it."""
        full = self._archive + name
        if full not in self._members:
            raise self._damaged(f"it has no member {shown(name)}")
        header, nbytes, crc32 = self._members[full]
        after = bisect.bisect_right(self._headers, header)
        stop = self._headers[after] if after < len(self._headers) else self._data_stop
        if not self.start <= header <= stop - _LOCAL.size:
            raise self._damaged(f"its member {shown(name)} would be outside")
        signature, flags, method, name_size, extra_size = _LOCAL.unpack(self.file.read(header, _LOCAL.size))
        position = header + _LOCAL.size + name_size + extra_size
        if signature != b"PK\3\4" or position + nbytes > stop:
            raise self._damaged(f"its member {shown(name)} is not where its directory says")
        if method or flags & _ENCRYPTED:
            raise self._damaged(f"its member {shown(name)} is compressed, and not as its directory says")
        if self.file.read(header + _LOCAL.size, name_size) != full.encode():
            raise self._damaged(f"another member is where {shown(name)} should be")
        # torch leaves the CRC-32 out by writing 0
        return ZipMember(position, nbytes, crc32 if crc32 or not nbytes else None)

    def content(self, member: ZipMember) -> bytes:
        """A small member's bytes."""
        return self.file.read(member.position, member.nbytes)

    def verify(self, member: ZipMember) -> None:
        """Compare a member with its CRC-32.

        Raises:
            CheckpointCorruptedError: they differ, or there is too much of it for what is on the disk.
        """
        if member.crc32 is None:
            return
        self.file.budget.spend(member.nbytes // _VERIFIED_BY_STEP, self.where)
        crc32 = 0
        for position in range(member.position, member.position + member.nbytes, _CHUNK):
            left = member.position + member.nbytes - position
            crc32 = zlib.crc32(self.file.read(position, min(_CHUNK, left)), crc32)
        if crc32 != member.crc32:
            raise self._damaged(f"what is at byte {member.position} has another CRC-32 than was written")

    def _check_byte_order(self, member: ZipMember) -> None:
        order = self.content(member) if member.nbytes == len(b"little") else b""
        if order == b"little":
            return
        self.verify(member)
        raise UnsupportedValueError(f"{self.where} has data of another byte order than little-endian")

    def _damaged(self, reason: str) -> CheckpointCorruptedError:
        return CheckpointCorruptedError(f"{self.where}: no zip of torch.save, or a damaged one: {reason}")

    def _directory(self) -> tuple[int, int, int]:
        """Where in the file the directory starts, its size, and how many members it has."""
        end_at = self.stop - _END.size
        locator_at = end_at - _LOCATOR.size
        tail_at = max(self.start, locator_at - _END_64.size - (_AHEAD >> 2))  # the directory is most often in it too
        tail = self.file.read(tail_at, self.stop - tail_at)
        signature, count, nbytes, offset, comment = _END.unpack(tail[-_END.size :])
        if signature != b"PK\5\6" or comment:
            raise self._damaged("it does not end like one")
        if locator_at >= self.start and tail[locator_at - tail_at :].startswith(b"PK\6\7"):
            _, offset_64, disks = _LOCATOR.unpack_from(tail, locator_at - tail_at)
            at = self.start + offset_64
            if disks > 1 or at + _END_64.size > locator_at:
                raise self._damaged("it is divided, or its end is not where it says")
            signature, count, nbytes, offset = _END_64.unpack(self.file.read(at, _END_64.size))
            if signature != b"PK\6\6":
                raise self._damaged("its end is not where it says")
        return self.start + offset, nbytes, count

    def _listed(self, directory: bytes, count: int) -> dict[str, _Listed]:
        members: dict[str, _Listed] = {}
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > len(directory):
                raise self._damaged("its directory is cut short")
            signature, flags, method, crc32, packed, nbytes, *lengths, header = _ENTRY.unpack_from(directory, at)
            name_size, extra_size, _ = lengths
            name_at = at + _ENTRY.size
            at = name_at + sum(lengths)
            name = directory[name_at : name_at + name_size].decode("utf-8", "replace")
            if signature != b"PK\1\2" or at > len(directory) or name in members:
                raise self._damaged("its directory is damaged")
            if method or flags & _ENCRYPTED:
                raise UnsupportedValueError(f"{self.where}: {shown(name)} is compressed")
            if _UNKNOWN_32 in (nbytes, packed, header):
                extra = directory[name_at + name_size : name_at + name_size + extra_size]
                nbytes, packed, header = self._large(extra, nbytes, packed, header)
            if nbytes != packed or nbytes < 0:
                raise self._damaged(f"its member {shown(name)} has two sizes")
            members[name] = _Listed(self.start + header, nbytes, crc32)
        return members

    def _large(self, extra: bytes, *fields: int) -> list[int]:
        """Sizes and places of more than 32 bits, which stand apart in the order of those that they replace."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                numbers = iter(
                    struct.unpack_from(f"<{size // 8}Q", extra, at + 4) if at + 4 + size <= len(extra) else ()
                )
                return [next(numbers, -1) if field == _UNKNOWN_32 else field for field in fields]
            at += 4 + size
        raise self._damaged("a size is missing in its directory")
