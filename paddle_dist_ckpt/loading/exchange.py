"""Runs one rank's part of an exchange: reads its units, sends their parcels, receives what others read for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.dtypes import DTYPES
from ..core.memory import Bytes1D, fresh_pages
from ..core.protocols import Transport
from ..files.reader import Consumer, StoredEntry, read_entries
from ..files.runs import OpenFile
from .messages import ExchangeRound, Incoming, UnitRead

__all__ = ["Exchange"]

Array = npt.NDArray[Any]
_ALL = -1
_Address = tuple[int, int]
"""A message: the position it goes to, or all of them, and which of several."""


@dataclass(slots=True)
class Exchange:
    """One rank's part.

    Attributes:
        ranks: The global rank at each position.
        place: This rank's position.
        files: The files that this rank reads, by name.
        consumer: Makes a consumer for (need, box in the shard), for this rank's own needs.
        transport: How bytes travel.
        within: Around each round, by its number: makes the memory of its targets accessible.
        staging_bytes: The most memory of a device that the transport may use.
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
    within: Callable[[int], AbstractContextManager[None]]
    staging_bytes: int
    block_bytes: int
    threads: int
    check: Callable[[], None]
    progress: Callable[[int], None]
    failure: Exception | None = None
    received: int = field(default=0)
    _buffers: dict[object, Bytes1D] = field(default_factory=dict)

    def run(self, rounds: Sequence[ExchangeRound]) -> None:
        """Run all rounds."""
        for i, one in enumerate(rounds):
            with self.within(i):
                outgoing = self._read(one.reads)
                self._broadcast(one.broadcasts, outgoing)
                self._exchange(one, outgoing)

    def _read(self, units: Sequence[UnitRead]) -> dict[_Address, Bytes1D]:
        """Read this round's units; returns the messages with the bytes to be sent."""
        sizes = self._outgoing_sizes(units)
        outgoing: dict[_Address, Bytes1D] = {}
        at: dict[_Address, int] = {}
        entries: dict[tuple[str, int], tuple[StoredEntry, list[Consumer]]] = {}
        for unit in units:
            entry, consumers = entries.setdefault((unit.file, unit.start), (self._entry(unit), []))
            for parcel in unit.parcels:
                box, address = Box(*parcel.box), (parcel.destination, parcel.message)
                mine = (
                    self.consumer(parcel.row, box)
                    if parcel.row >= 0 and parcel.destination in (_ALL, self.place)
                    else None
                )
                if mine is not None:
                    consumers.append(mine)
                if parcel.destination == self.place:
                    continue
                memory = _whole_memory(mine) if parcel.message else None
                if memory is not None:
                    outgoing[address] = memory
                    continue
                if address not in outgoing:
                    outgoing[address] = self._buffer(address, sizes[address])
                consumers.append(self._packed(entry, box, outgoing, at, address))
        try:
            if self.failure is None:
                # What lies between may be what another rank reads.
                read_entries(entries.values(), self.block_bytes, self.threads, self.check, self.progress, joined=False)
        except Exception as error:
            self.failure = error
        return outgoing

    def _buffer(self, address: object, size: int) -> Bytes1D:
        """Memory for a message, its content arbitrary; the same for every round, since fresh pages are slow."""
        buffer = self._buffers.get(address)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[address] = fresh_pages(size)
        return buffer[:size]

    def _outgoing_sizes(self, units: Sequence[UnitRead]) -> dict[_Address, int]:
        sizes: dict[_Address, int] = {}
        for unit in units:
            for parcel in unit.parcels:
                if parcel.destination != self.place:
                    nbytes = Box(*parcel.box).size * DTYPES[unit.dtype].itemsize
                    address = (parcel.destination, parcel.message)
                    sizes[address] = sizes.get(address, 0) + nbytes
        return sizes

    def _entry(self, unit: UnitRead) -> StoredEntry:
        file = self.files[unit.file]
        return StoredEntry(file, unit.start, unit.first_block, unit.shape, DTYPES[unit.dtype], unit.key)

    @staticmethod
    def _packed(
        entry: StoredEntry, box: Box, outgoing: Mapping[_Address, Bytes1D], at: dict[_Address, int], address: _Address
    ) -> Consumer:
        start = at.get(address, 0)
        at[address] = start + box.size * entry.dtype.itemsize
        # A parcel may start anywhere in the message; numpy copies unaligned items as well.
        target = np.frombuffer(outgoing[address], entry.dtype.raw, box.size, start).reshape(box.shape)
        return Consumer(box, target)

    def _broadcast(self, incoming: Sequence[Incoming], outgoing: Mapping[_Address, Bytes1D]) -> None:
        number: dict[int, int] = {}
        for message in incoming:
            source = self.ranks[message.source]
            k = number[message.source] = number.get(message.source, -1) + 1
            if not message.sizes:
                continue
            if message.source == self.place:
                self.transport.broadcast(outgoing[_ALL, k], source, self.staging_bytes)
                continue
            alone = len(message.rows) == 1 and message.rows[0] >= 0
            memory = _whole_memory(self.consumer(message.rows[0], Box(*message.boxes[0]))) if alone else None
            if memory is not None:
                self.transport.broadcast(memory, source, self.staging_bytes)
                self.received += len(memory)
                continue
            data = self._buffer("incoming", sum(message.sizes))
            self.transport.broadcast(data, source, self.staging_bytes)
            self._unpack(message, data)

    def _exchange(self, one: ExchangeRound, outgoing: Mapping[_Address, Bytes1D]) -> None:
        """Send and receive what is for single ranks, packed in one message for each pair of them."""
        outgoing_parts = {self.ranks[to]: data for (to, _), data in outgoing.items() if to != _ALL}
        incoming = {
            self.ranks[message.source]: self._buffer(("incoming", message.source), sum(message.sizes))
            for message in one.receives
        }
        senders = [(self.ranks[source], size) for source, size in one.scatters]
        if senders:
            self.transport.exchange(outgoing_parts, incoming, senders, self.staging_bytes)
        for message in one.receives:
            self._unpack(message, incoming[self.ranks[message.source]])

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


def _whole_memory(consumer: Consumer | None) -> Bytes1D | None:
    """A consumer's target as bytes if a message can be sent from it, or received in it, as it is."""
    if consumer is None or consumer.convert is not None or not consumer.target.flags.c_contiguous:
        return None
    return consumer.target.reshape(-1).view(np.uint8)


_RAW_OF = {dtype.itemsize: dtype.raw for dtype in DTYPES.values()}
