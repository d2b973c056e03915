"""Runs one rank's part of an exchange: reads its units, sends their parcels, receives what others read for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..control.verified import digest_of, digest_of_blocks
from ..core.box import flat_range
from ..core.buffers import Buffers
from ..core.device_memory import Copies
from ..core.dtypes import DTYPES
from ..core.memory import Bytes1D, address_of, bytes_at, fresh_pages
from ..core.protocols import ControlSession, Transfers
from ..core.threads import Beside, run_all
from ..errors import CollectiveError
from ..files.reader import Consumer, StoredEntry, entry_tasks
from ..planning.exchange_plan import ALL
from .exchange_messages import ALONE_BYTES, Address, Message, messages_of, needs_of
from .exchange_orders import ExchangeRound, ShardOrder
from .in_flight import note_in_flight
from .needs import Needs
from .small_items import SmallItems, batches_of
from .staging import RoundStaging

if TYPE_CHECKING:
    from .reading import DataFiles

__all__ = ["Exchange"]

_AHEAD = 8  # rounds that may be read before it is their turn
_LONGEST_READ = 5.0  # in seconds: the disk hangs if a part of a file takes longer
_RAW_OF = {dtype.itemsize: dtype.raw for dtype in DTYPES.values()}
_Outgoing = Mapping[Address, tuple[Bytes1D, int]]
"""The messages that a rank sends in a round, with their digests."""


@dataclass(slots=True)
class Exchange:
    """One rank's part.

    Attributes:
        staging_bytes: The most memory through which data go to tensors on a device; the transport may use as much of
            a device's.
        begun: Targets on a device for which earlier parts of the exchange have brought something.
        failure: The first error in reading. The exchange goes on all the same, with arbitrary bytes, so that no other
            rank waits for ever; whoever runs it raises the error afterwards.
    """

    session: ControlSession
    needs: Needs
    files: DataFiles
    copies: Copies
    staging_bytes: int
    progress: Callable[[int], None]
    begun: set[int]
    failure: Exception | None = None
    _on_host: bool = True
    _buffers: dict[object, Bytes1D] = field(default_factory=dict)
    _whole_targets: dict[Message, Bytes1D | None] = field(default_factory=dict)
    _given_up: bool = False
    _receiving: Bytes1D | None = None  # memory of a target into which a collective writes just now
    _reading: threading.Lock = field(default_factory=threading.Lock)  # held by whoever fills targets from files,
    _filling: threading.Lock = field(default_factory=threading.Lock)  # or from messages

    def give_up(self) -> None:
        """Have nothing more written to targets, though a collective hangs, or a disk. What may be written all the same
        is noted, see :mod:`.in_flight`."""
        self._given_up = True
        if self._reading.acquire(timeout=_LONGEST_READ):
            self._reading.release()
        else:
            note_in_flight(*self.needs.targets.stretches, self._reading.locked)
        with self._filling:
            memory = self._receiving
        if memory is not None:
            first = np.array([address_of(memory)])
            note_in_flight(first, first + len(memory), lambda: self._receiving is memory)

    def _check(self) -> None:
        self.session.check()
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._given_up:
            raise CollectiveError("the exchange was given up")

    def run(self, rounds: Sequence[ExchangeRound], transfers: Transfers) -> None:
        """Run all rounds. While the messages of one travel, the next one is read, and more if that takes no memory.

        Not so with tensors on a device: their rows are in host memory only in rounds that bring something for them.
        """
        rows = [self.needs.rows_on_device(needs_of(one)) for one in rounds]
        staging = RoundStaging(self.needs.targets, self.copies, rows, self.staging_bytes, self.begun)
        messages = [messages_of(one, self.session.rank) for one in rounds]
        self._on_host = not any(map(len, rows))
        ahead = _ReadingAhead([functools.partial(self._read, one, i) for i, one in enumerate(messages)])
        try:
            for i, one in enumerate(rounds):
                with self._filling:
                    self._check_wanted()
                    staging.begin(i)
                if self._on_host:
                    outgoing = ahead.read(i, lambda k: self._is_sent_in_place(messages[k]))
                else:
                    outgoing = self._read(messages[i], i)
                self._broadcast(transfers, messages[i], outgoing)
                self._exchange(transfers, one.senders, messages[i], outgoing)
                with self._filling:
                    self._check_wanted()
                    staging.end(i)
        finally:
            ahead.wait()
            self._whole_targets.clear()
            staging.finish()

    def _read(self, messages: Mapping[Address, Message], number: int) -> _Outgoing:
        """Read the units of a round; returns the messages with the bytes to be sent, and their digests."""
        me = self.session.rank
        outgoing: dict[Address, Bytes1D] = {}
        entries: dict[tuple[str, int], tuple[StoredEntry, list[Consumer]]] = {}
        items: list[SmallItems] = []
        for address, message in messages.items():
            source, destination, _ = address
            if source != me:
                continue
            is_sent, in_place, at = destination != me, None, 0
            if is_sent:
                in_place = self._whole_target(message)
                outgoing[address] = (
                    self._buffer((address, number % 2), message.nbytes(self.needs)) if in_place is None else in_place
                )
            for unit, parcel in message.parts:
                assert unit.shard is not None, "a reader is told what it reads"
                box, shard = parcel.box, unit.shard
                entry, consumers = entries.setdefault((shard.file, shard.start), (self._entry(shard), []))
                if parcel.row >= 0:
                    consumers.append(self.needs.consumer(parcel.row, box))
                if is_sent and in_place is None:
                    # A parcel may start anywhere in the message; numpy copies unaligned items as well.
                    packed = np.frombuffer(outgoing[address], entry.dtype.raw, box.size, at).reshape(box.shape)
                    consumers.append(Consumer(box, packed))
                    at += packed.nbytes
            if message.has_pack:
                items.append(
                    message.sent(address_of(outgoing[address]) + at) if is_sent else self.needs.items(message.kept)
                )
        try:
            with self._reading:
                if self.failure is None:
                    run_all(self._tasks(entries.values(), items), 1, self._check)
        except Exception as error:
            self.failure = error
        return {address: (data, self._digest(messages[address], data)) for address, data in outgoing.items()}

    def _tasks(
        self, entries: Iterable[tuple[StoredEntry, Sequence[Consumer]]], items: Sequence[SmallItems]
    ) -> Iterator[Callable[[], None]]:
        """Tasks that read entries and items, nothing between them: that may be what another rank reads."""
        buffers, block_bytes = Buffers(1), self.needs.block_bytes
        yield from entry_tasks(entries, block_bytes, buffers, self.progress, joined=False)
        for batch in batches_of(items, self.files.opened, block_bytes):
            yield from batch.tasks(buffers, self.progress, joined=False)

    def _digest(self, message: Message, data: Bytes1D) -> int:
        """The digest of a message to be sent: of what the file says of its blocks, if that is what was read."""
        block_bytes = self._blocks(message)
        if block_bytes and self.failure is None:
            unit, parcel = message.parts[0]
            assert unit.shard is not None, "a reader is told what it reads"
            hashes, start = self.files.opened[unit.shard.file].hashes, flat_range(parcel.box, unit.shard.shape)
            if hashes is not None and start is not None:
                first = unit.shard.first_block + start[0] * unit.itemsize // block_bytes
                return digest_of_blocks(hashes[first : first + -(-len(data) // block_bytes)])
        return digest_of(data, block_bytes)

    def _blocks(self, message: Message) -> int:
        """The size of the blocks of which a message for all consists; 0 if they are not whole, or of several units."""
        if message.has_pack:
            return 0
        unit, parcel = message.parts[0]
        whole = unit.whole and parcel.destination == ALL and message.parts[-1][0] is unit
        return self.needs.block_bytes if whole and message.parcel_bytes >= ALONE_BYTES else 0

    def _entry(self, shard: ShardOrder) -> StoredEntry:
        file = self.files.opened[shard.file]
        return StoredEntry(file, shard.start, shard.first_block, shard.shape, DTYPES[shard.dtype], shard.key)

    def _buffer(self, key: object, size: int) -> Bytes1D:
        """Memory for a message, its content arbitrary; the same for every round, since fresh pages are slow."""
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = fresh_pages(size)
        return buffer[:size]

    def _whole_target(self, message: Message) -> Bytes1D | None:
        """The target's memory if a message can be sent from it, or received in it, as it is.

        What was found stays right: a message belongs to one round, in which targets do not move.
        """
        if message not in self._whole_targets:
            self._whole_targets[message] = self._find_whole_target(message)
        return self._whole_targets[message]

    def _find_whole_target(self, message: Message) -> Bytes1D | None:
        start = stop = 0
        if message.has_pack:
            return None
        for i, (_, parcel) in enumerate(message.parts):
            if parcel.row < 0:
                return None
            consumer = self.needs.consumer(parcel.row, parcel.box)
            address = address_of(consumer.target)
            start, stop = (start, stop) if i else (address, address)
            if consumer.convert is not None or not consumer.target.flags.c_contiguous or address != stop:
                return None
            stop += consumer.target.nbytes
        return bytes_at(start, stop - start)

    def _is_sent_in_place(self, messages: Mapping[Address, Message]) -> bool:
        """Whether this rank needs no buffers for what it sends in a round."""
        me = self.session.rank
        sent = [message for (source, destination, _), message in messages.items() if source == me != destination]
        return all(self._whole_target(message) is not None for message in sent)

    def _broadcast(self, transfers: Transfers, messages: Mapping[Address, Message], outgoing: _Outgoing) -> None:
        """Send and receive what is for all."""
        for address in sorted(messages):
            source, destination, _ = address
            if destination != ALL:
                continue
            message, sends = messages[address], source == self.session.rank
            in_place, digest = outgoing[address] if sends else (self._whole_target(message), None)
            data = self._buffer("incoming", message.nbytes(self.needs)) if in_place is None else in_place
            what, kept = functools.partial(self._keys, message), self._on_host and in_place is not None
            with self._filling:
                self._check_wanted()
                self._receiving = None if sends else in_place
            try:
                transfers.broadcast(data, source, self.staging_bytes, what, digest, self._blocks(message), kept)
            finally:
                self._receiving = None
            if in_place is None:
                self._unpack(message, data)
            elif not sends:
                self.files.tally.bytes_received += len(data)

    def _exchange(
        self,
        transfers: Transfers,
        senders: Sequence[tuple[int, int]],
        messages: Mapping[Address, Message],
        outgoing: _Outgoing,
    ) -> None:
        """Send and receive what is for single ranks, packed in one message for each pair of them."""
        if not senders:
            return
        me = self.session.rank
        mine = {source: message for (source, to, _), message in messages.items() if to == me != source}
        incoming = {source: self._buffer(source, message.nbytes(self.needs)) for source, message in mine.items()}
        single = {to: data for (_, to, _), (data, _) in outgoing.items() if to != ALL}
        digests = {to: digest for (_, to, _), (_, digest) in outgoing.items() if to != ALL}
        most, what = self.staging_bytes, lambda source: self._keys(mine[source])
        transfers.exchange(single, incoming, senders, most, what, digests)
        for source, message in mine.items():
            self._unpack(message, incoming[source])

    def _keys(self, message: Message) -> str:
        """What a message has for this rank."""
        rows = [parcel.row for _, parcel in message.parts if parcel.row >= 0] + message.kept.tolist()
        return ", ".join(dict.fromkeys(map(self.needs.wanted_key, rows)))

    def _unpack(self, message: Message, data: Bytes1D) -> None:
        """Hand out what has come in a message; after a failure it means nothing."""
        with self._filling:
            self._check_wanted()
            try:
                if self.failure is None:
                    self._fill(message, data)
            except Exception as error:
                self.failure = error

    def _fill(self, message: Message, data: Bytes1D) -> None:
        at = 0
        for unit, parcel in message.parts:
            size, box = parcel.box.size * unit.itemsize, parcel.box
            if parcel.row >= 0:
                items = np.frombuffer(data[at : at + size], _RAW_OF[unit.itemsize]).reshape(box.shape)
                consumer = self.needs.consumer(parcel.row, box)
                if consumer.convert is not None:
                    consumer.convert(items, (slice(None),) * items.ndim)
                else:
                    consumer.target[...] = items
                self.files.tally.bytes_received += size
            at += size
        if len(kept := message.kept):
            self.needs.unpack(kept, data[at:])
            self.files.tally.bytes_received += self.needs.nbytes(kept)


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
        self._beside.finish()
