"""Runs one rank's part of an exchange: reads its units, sends their parcels, receives what others read for it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..control.verified import digest_of, digest_of_blocks
from ..core.box import flat_range
from ..core.columns import IntArray
from ..core.device_memory import Copies
from ..core.dtypes import DTYPES
from ..core.memory import Bytes1D, address_of, bytes_at, fresh_pages
from ..core.protocols import ControlSession, Transfers
from ..core.threads import Beside
from ..files.reader import Consumer, StoredEntry, read_entries
from ..planning.exchange_plan import ALL
from .fit import Fit
from .messages import ExchangeRound, ParcelOrder, ShardOrder, UnitOrder
from .staging import RoundStaging

if TYPE_CHECKING:
    from .reading import DataFiles

__all__ = ["Exchange"]

_ALONE_BYTES = 256 << 10
_AHEAD = 8  # rounds that may be read before it is their turn
_RAW_OF = {dtype.itemsize: dtype.raw for dtype in DTYPES.values()}
_Address = tuple[int, int, int]
"""A message: the rank that sends it, the one that it goes to, or ALL, and which of several."""
_Part = tuple[UnitOrder, ParcelOrder]
_Outgoing = Mapping[_Address, tuple[Bytes1D, int]]
"""The messages that a rank sends in a round, with their digests."""


@dataclass(slots=True)
class Exchange:
    """One rank's part.

    Attributes:
        staging_bytes: The most memory through which data go to tensors on a device; the transport may use as much of
            a device's.
        failure: The first error in reading. The exchange goes on all the same, with arbitrary bytes, so that no other
            rank waits for ever; whoever runs it raises the error afterwards.
    """

    session: ControlSession
    fit: Fit
    files: DataFiles
    transfers: Transfers
    copies: Copies
    staging_bytes: int
    progress: Callable[[int], None]
    failure: Exception | None = None
    _on_host: bool = True
    _buffers: dict[object, Bytes1D] = field(default_factory=dict)

    def run(self, rounds: Sequence[ExchangeRound]) -> None:
        """Run all rounds. While the messages of one travel, the next one is read, and more if that takes no memory.

        Not so with tensors on a device: their rows are in host memory only in rounds that bring something for them.
        """
        rows = [self.fit.rows_on_device(_needs_of(one)) for one in rounds]
        staging = RoundStaging(self.fit.targets, self.copies, rows, self.staging_bytes)
        messages = [_messages(one.units) for one in rounds]
        self._on_host = not any(map(len, rows))
        ahead = _ReadingAhead([functools.partial(self._read, one, i) for i, one in enumerate(messages)])
        try:
            for i, one in enumerate(rounds):
                with staging.round(i):
                    if self._on_host:
                        outgoing = ahead.read(i, lambda k: self._is_sent_in_place(messages[k]))
                    else:
                        outgoing = self._read(messages[i], i)
                    self._broadcast(messages[i], outgoing)
                    self._exchange(one.senders, messages[i], outgoing)
        finally:
            ahead.wait()
            staging.finish()

    def _read(self, messages: Mapping[_Address, Sequence[_Part]], number: int) -> _Outgoing:
        """Read the units of a round; returns the messages with the bytes to be sent, and their digests."""
        me = self.session.rank
        outgoing: dict[_Address, Bytes1D] = {}
        entries: dict[tuple[str, int], tuple[StoredEntry, list[Consumer]]] = {}
        for address, parts in messages.items():
            source, destination, _ = address
            if source != me:
                continue
            is_sent, in_place, at = destination != me, None, 0
            if is_sent:
                in_place = self._whole_target(parts)
                outgoing[address] = (
                    self._buffer((address, number % 2), _nbytes(parts)) if in_place is None else in_place
                )
            for unit, parcel in parts:
                assert unit.shard is not None, "a reader is told what it reads"
                box, shard = parcel.box, unit.shard
                entry, consumers = entries.setdefault((shard.file, shard.start), (self._entry(shard), []))
                if parcel.row >= 0:
                    consumers.append(self.fit.consumer(parcel.row, box))
                if is_sent and in_place is None:
                    # A parcel may start anywhere in the message; numpy copies unaligned items as well.
                    packed = np.frombuffer(outgoing[address], entry.dtype.raw, box.size, at).reshape(box.shape)
                    consumers.append(Consumer(box, packed))
                    at += packed.nbytes
        try:
            if self.failure is None:
                # What lies between may be what another rank reads.
                check = self.session.check
                read_entries(entries.values(), self.fit.answer.block_bytes, 1, check, self.progress, joined=False)
        except Exception as error:
            self.failure = error
        return {address: (data, self._digest(messages[address], data)) for address, data in outgoing.items()}

    def _digest(self, parts: Sequence[_Part], data: Bytes1D) -> int:
        """The digest of a message to be sent: of what the file says of its blocks, if that is what was read."""
        block_bytes, (unit, parcel) = self._blocks(parts), parts[0]
        if block_bytes and self.failure is None:
            assert unit.shard is not None, "a reader is told what it reads"
            hashes, start = self.files.opened[unit.shard.file].hashes, flat_range(parcel.box, unit.shard.shape)
            if hashes is not None and start is not None:
                first = unit.shard.first_block + start[0] * unit.itemsize // block_bytes
                return digest_of_blocks(hashes[first : first + -(-len(data) // block_bytes)])
        return digest_of(data, block_bytes)

    def _blocks(self, parts: Sequence[_Part]) -> int:
        """The size of the blocks of which a message for all consists; 0 if they are not whole, or of several units."""
        unit, parcel = parts[0]
        whole = unit.whole and parcel.destination == ALL and parts[-1][0] is unit
        return self.fit.answer.block_bytes if whole and _nbytes(parts) >= _ALONE_BYTES else 0

    def _entry(self, shard: ShardOrder) -> StoredEntry:
        file = self.files.opened[shard.file]
        return StoredEntry(file, shard.start, shard.first_block, shard.shape, DTYPES[shard.dtype], shard.key)

    def _buffer(self, key: object, size: int) -> Bytes1D:
        """Memory for a message, its content arbitrary; the same for every round, since fresh pages are slow."""
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = fresh_pages(size)
        return buffer[:size]

    def _whole_target(self, parts: Sequence[_Part]) -> Bytes1D | None:
        """The target's memory if a message can be sent from it, or received in it, as it is."""
        start = stop = 0
        for i, (_, parcel) in enumerate(parts):
            if parcel.row < 0:
                return None
            consumer = self.fit.consumer(parcel.row, parcel.box)
            address = address_of(consumer.target)
            start, stop = (start, stop) if i else (address, address)
            if consumer.convert is not None or not consumer.target.flags.c_contiguous or address != stop:
                return None
            stop += consumer.target.nbytes
        return bytes_at(start, stop - start)

    def _is_sent_in_place(self, messages: Mapping[_Address, Sequence[_Part]]) -> bool:
        """Whether this rank needs no buffers for what it sends in a round."""
        me = self.session.rank
        sent = [parts for (source, destination, _), parts in messages.items() if source == me != destination]
        return all(self._whole_target(parts) is not None for parts in sent)

    def _broadcast(self, messages: Mapping[_Address, Sequence[_Part]], outgoing: _Outgoing) -> None:
        """Send and receive what is for all."""
        for address in sorted(messages):
            source, destination, _ = address
            if destination != ALL:
                continue
            parts, sends = messages[address], source == self.session.rank
            in_place, digest = outgoing[address] if sends else (self._whole_target(parts), None)
            data = self._buffer("incoming", _nbytes(parts)) if in_place is None else in_place
            what, kept = functools.partial(self._keys, parts), self._on_host and in_place is not None
            self.transfers.broadcast(data, source, self.staging_bytes, what, digest, self._blocks(parts), kept)
            if in_place is None:
                self._unpack(parts, data)
            elif not sends:
                self.files.tally.bytes_received += len(data)

    def _exchange(
        self,
        senders: Sequence[tuple[int, int]],
        messages: Mapping[_Address, Sequence[_Part]],
        outgoing: _Outgoing,
    ) -> None:
        """Send and receive what is for single ranks, packed in one message for each pair of them."""
        if not senders:
            return
        me = self.session.rank
        mine = {source: parts for (source, to, _), parts in messages.items() if to == me != source}
        incoming = {source: self._buffer(source, _nbytes(parts)) for source, parts in mine.items()}
        single = {to: data for (_, to, _), (data, _) in outgoing.items() if to != ALL}
        digests = {to: digest for (_, to, _), (_, digest) in outgoing.items() if to != ALL}
        most, what = self.staging_bytes, lambda source: self._keys(mine[source])
        self.transfers.exchange(single, incoming, senders, most, what, digests)
        for source, parts in mine.items():
            self._unpack(parts, incoming[source])

    def _keys(self, parts: Sequence[_Part]) -> str:
        """What a message has for this rank."""
        return ", ".join(dict.fromkeys(self.fit.wanted_key(parcel.row) for _, parcel in parts if parcel.row >= 0))

    def _unpack(self, parts: Sequence[_Part], data: Bytes1D) -> None:
        """Hand out what has come in a message; after a failure it means nothing."""
        at = 0
        try:
            for unit, parcel in parts if self.failure is None else ():
                size, box = parcel.box.size * unit.itemsize, parcel.box
                if parcel.row >= 0:
                    items = np.frombuffer(data[at : at + size], _RAW_OF[unit.itemsize]).reshape(box.shape)
                    consumer = self.fit.consumer(parcel.row, box)
                    if consumer.convert is not None:
                        consumer.convert(items, (slice(None),) * items.ndim)
                    else:
                        consumer.target[...] = items
                    self.files.tally.bytes_received += size
                at += size
        except Exception as error:
            self.failure = error


class _ReadingAhead:
    """Reads rounds before it is their turn, in order, beside their owner. ``tasks`` read a round each."""

    def __init__(self, tasks: Sequence[Callable[[], _Outgoing]]) -> None:
        self._tasks = tasks
        self._begun: list[Future[_Outgoing]] = []
        self._beside = Beside("reads ahead")

    def read(self, number: int, takes_no_memory: Callable[[int], bool]) -> _Outgoing:
        """What a round has to be sent, when those before it have been sent. Reading goes on with the next one, and with
        those that follow as long as they take no memory."""
        end = min(number + _AHEAD, len(self._tasks))
        while (k := len(self._begun)) < end and (k <= number + 1 or takes_no_memory(k)):
            self._begun.append(self._beside.start(self._tasks[k]))
        return self._begun[number].result()

    def wait(self) -> None:
        """Wait until nothing is read any more."""
        wait(self._begun)


def _messages(units: Sequence[UnitOrder]) -> dict[_Address, list[_Part]]:
    """What is sent together in a round, as far as this rank has a part in it.

    What a unit has for all is sent alone if it is large, so that it can be sent from its target and received in its
    target.
    """
    messages: dict[_Address, list[_Part]] = {}
    large: Counter[int] = Counter()
    for unit in units:
        size = sum(parcel.box.size for parcel in unit.parcels if parcel.destination == ALL) * unit.itemsize
        large[unit.reader] += size >= _ALONE_BYTES
        for parcel in unit.parcels:
            number = large[unit.reader] if parcel.destination == ALL and size >= _ALONE_BYTES else 0
            messages.setdefault((unit.reader, parcel.destination, number), []).append((unit, parcel))
    return messages


def _needs_of(one: ExchangeRound) -> IntArray:
    """The needs that a round brings something for."""
    rows = [parcel.row for unit in one.units for parcel in unit.parcels if parcel.row >= 0]
    return np.array(rows, np.int64)


def _nbytes(parts: Sequence[_Part]) -> int:
    return sum(parcel.box.size * unit.itemsize for unit, parcel in parts)
