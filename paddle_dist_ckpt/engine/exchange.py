"""Runs one rank's part of an exchange: reads its units, sends their pieces, receives what others read for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.dtypes import DTYPES
from ..core.ports import Bytes1D, Transport
from .messages import Incoming, Round, UnitRead
from .reader import Consumer, OpenFile, StoredEntry, read_entries

__all__ = ["Exchange"]

Array = npt.NDArray[Any]
_ALL = -1


@dataclass(slots=True)
class Exchange:
    """One rank's part.

    Attributes:
        ranks: The global rank at each position.
        place: This rank's position.
        files: The files that this rank reads, by name.
        consumer: Makes a consumer for (need, box in the shard), for this rank's own needs.
        transport: How bytes travel.
        block_bytes, threads, check, progress: See :func:`.reader.read_entries`.
        failure: The first error in reading. The exchange goes on all the same, with arbitrary bytes, so that no other
            rank waits for ever; whoever runs it raises the error afterwards.
        received: Bytes that came from other ranks.
    """

    ranks: Sequence[int]
    place: int
    files: Mapping[str, OpenFile]
    consumer: Callable[[int, Box], Consumer]
    transport: Transport
    block_bytes: int
    threads: int
    check: Callable[[], None]
    progress: Callable[[int], None]
    failure: Exception | None = None
    received: int = field(default=0)

    def run(self, rounds: Sequence[Round]) -> None:
        """Run all rounds."""
        for one in rounds:
            outgoing = self._read(one.reads)
            self._broadcast(one.broadcasts, outgoing)
            self._scatter(one, outgoing)

    def _read(self, units: Sequence[UnitRead]) -> dict[int, Bytes1D]:
        """Read this round's units; returns for each destination the bytes that go there."""
        outgoing = {dest: np.empty(size, np.uint8) for dest, size in self._outgoing_sizes(units).items()}
        at = dict.fromkeys(outgoing, 0)
        entries: dict[tuple[str, int], tuple[StoredEntry, list[Consumer]]] = {}
        for unit in units:
            entry, consumers = entries.setdefault((unit.file, unit.start), (self._entry(unit), []))
            for piece in unit.pieces:
                box = Box(*piece.box)
                if piece.destination != self.place and piece.destination != _ALL:
                    consumers.append(self._packed(entry, box, outgoing, at, piece.destination))
                    continue
                if piece.destination == _ALL:
                    consumers.append(self._packed(entry, box, outgoing, at, _ALL))
                if piece.row >= 0:
                    consumers.append(self.consumer(piece.row, box))
        try:
            if self.failure is None:
                # A gap may be what another rank reads.
                read_entries(entries.values(), self.block_bytes, self.threads, self.check, self.progress, gap=0)
        except Exception as error:
            self.failure = error
        return outgoing

    def _outgoing_sizes(self, units: Sequence[UnitRead]) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for unit in units:
            for piece in unit.pieces:
                if piece.destination != self.place:
                    nbytes = Box(*piece.box).size * DTYPES[unit.dtype].itemsize
                    sizes[piece.destination] = sizes.get(piece.destination, 0) + nbytes
        return sizes

    def _entry(self, unit: UnitRead) -> StoredEntry:
        file = self.files[unit.file]
        return StoredEntry(file, unit.start, unit.first_block, unit.shape, DTYPES[unit.dtype], unit.key)

    @staticmethod
    def _packed(
        entry: StoredEntry, box: Box, outgoing: Mapping[int, Bytes1D], at: dict[int, int], destination: int
    ) -> Consumer:
        start = at[destination]
        at[destination] = start + box.size * entry.dtype.itemsize
        # A piece may start anywhere in the message; numpy copies unaligned items as well.
        target = np.frombuffer(outgoing[destination], entry.dtype.raw, box.size, start).reshape(box.shape)
        return Consumer(box, target)

    def _broadcast(self, incoming: Sequence[Incoming], outgoing: dict[int, Bytes1D]) -> None:
        for message in incoming:
            source = self.ranks[message.source]
            if message.source == self.place:
                self.transport.broadcast(outgoing.pop(_ALL), source)
                continue
            data = np.empty(sum(message.sizes), np.uint8)
            self.transport.broadcast(data, source)
            self._unpack(message, data)

    def _scatter(self, one: Round, outgoing: Mapping[int, Bytes1D]) -> None:
        """Send and receive what is for single ranks. All ranks take part in each operation, in the plan's order."""
        incoming = {message.source: message for message in one.receives}
        parts = {self.ranks[destination]: data for destination, data in outgoing.items()}
        for source, size in one.scatters:
            message = incoming.get(source)
            data = np.empty(sum(message.sizes) if message is not None else 0, np.uint8)
            self.transport.scatter(parts if source == self.place else {}, data, size, self.ranks[source])
            if message is not None:
                self._unpack(message, data)

    def _unpack(self, message: Incoming, data: Bytes1D) -> None:
        at = 0
        for row, corners, size in zip(message.rows, message.boxes, message.sizes, strict=True):
            if row >= 0 and self.failure is None:
                box = Box(*corners)
                self._put(self.consumer(row, box), data[at : at + size])
                self.received += size
            at += size

    def _put(self, consumer: Consumer, data: Bytes1D) -> None:
        count = consumer.box.size
        raw = np.dtype(_RAW_OF[len(data) // count])
        items = np.frombuffer(data, raw).reshape(consumer.box.shape)
        try:
            if consumer.convert is not None:
                consumer.convert(items, (slice(None),) * items.ndim)
            else:
                consumer.target[...] = items
        except Exception as error:
            self.failure = error


_RAW_OF = {dtype.itemsize: dtype.raw for dtype in DTYPES.values()}
