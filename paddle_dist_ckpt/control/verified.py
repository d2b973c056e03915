"""What collectives deliver, compared with what was sent, where it has landed.

A broken backend may say that an operation has succeeded which has moved nothing, or something else.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..core.memory import Bytes1D
from ..core.messages import decode, encode, prepare
from ..core.protocols import ControlSession, Operations, Transport
from ..core.threads import Beside
from ..errors import CollectiveError

__all__ = ["ADVICE", "WITHOUT", "VerifiedTransfers", "agree_on_collectives", "digest_of", "digest_of_blocks"]

_MOST_NAMES = 20  # in an error
_ALL = -1  # the destination of a broadcast
WITHOUT = (
    "a load can do without it, with offload=True if it is a device's, or with LoadOptions(exchange='never') if every "
    "rank reaches all files"
)
ADVICE = f"the process group's communicator is not used any more: restart the job; {WITHOUT}"
Digests = npt.NDArray[np.uint64]


class _Failing(msgspec.Struct, frozen=True, array_like=True):
    """Round ``collectives``: what fails on a rank, with that rank; or on any, with all these ranks."""

    ranks: dict[str, list[int]]


prepare([_Failing])


def agree_on_collectives(
    session: ControlSession, transport: Transport, get_ready: Callable[[], object] = lambda: None
) -> None:
    """Round ``collectives``: let a transport use what works on all ranks. It is held again if that must be tried first.

    Args:
        session: The ranks.
        transport: How the bytes travel.
        get_ready: What this rank does before anything. If it raises, all ranks hear of it, and none has begun.

    Raises:
        CollectiveError: too little works, on all ranks.
    """

    def is_untried() -> bytes:
        get_ready()
        if transport.tried:
            return b""
        transport.get_ready()
        return b"1"

    def untried(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        return dict.fromkeys(messages, b"1" if any(messages.values()) else b"")

    # What one rank has tried another may not have, which was lost or interrupted then, or whose other thread is late.
    if not session.gather_scatter("collectives", is_untried, untried):
        return

    def attempt() -> bytes:
        failing = session.run_collectives(transport, lambda transfers: transfers.try_out())
        return encode(_Failing({name: [session.rank] for name in failing}))

    def combine(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        failing: dict[str, list[int]] = {}
        for _, data in sorted(messages.items()):
            for name, ranks in decode(data, _Failing).ranks.items():
                failing.setdefault(name, []).extend(ranks)
        return dict.fromkeys(messages, encode(_Failing(failing)))

    failing = decode(session.gather_scatter("collectives", attempt, combine), _Failing)
    transport.rely_on_others(failing.ranks)


def digest_of(data: Bytes1D, block_bytes: int = 0) -> int:
    """The digest of a message; with ``block_bytes``, of the digests of its blocks."""
    if not block_bytes:
        return xxhash.xxh3_64_intdigest(data.data)
    # Backwards: the cache still has what was written last.
    starts = reversed(range(0, data.size, block_bytes))
    return digest_of_blocks([xxhash.xxh3_64_intdigest(data.data[at : at + block_bytes]) for at in starts][::-1])


def digest_of_blocks(digests: Digests | Sequence[int]) -> int:
    """The digest of a message of blocks whose digests are known."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests, "<u8").view(np.uint8).data)


class _Arrival(NamedTuple):
    """A message that has come: which of those of its source it is, in which operation it came, its digest, or where
    that will be, and what it is."""

    place: int
    operation: int
    digest: int | Future[int]
    what: Callable[[], str]


class VerifiedTransfers:
    """Implements :class:`..core.protocols.Transfers` by operations that are not trusted.

    A message is hashed where it has landed, beside what follows if its memory stays as it is, and where it is sent,
    unless the sender knows its digest. The senders' digests follow when all is done, each hashed with the nonce, the
    number of the operation, and the ranks that it goes from and to: neither memory that nothing was moved to can pass,
    nor what another operation has left there or what another rank should have got, each with its digest.

    Args:
        operations: Move the bytes.
        rank: This rank.
        nonce: The same on all ranks, and another one for each piece of work.
    """

    def __init__(self, operations: Operations, rank: int, nonce: str) -> None:
        self._by, self._rank = operations, rank
        self._seed = xxhash.xxh3_64_intdigest(nonce.encode())
        self._number = 0
        self._most = 1
        self._broadcasts: defaultdict[int, list[_Arrival]] = defaultdict(list)  # by source, on the source as well
        self._operations: Counter[int] = Counter()  # exchanges in which each source has sent
        self._sent: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # places and digests, by destination
        self._came: defaultdict[int, list[_Arrival]] = defaultdict(list)  # in exchanges, by source
        self._beside = Beside("hashes")

    def broadcast(
        self,
        data: Bytes1D,
        source: int,
        most: int,
        what: Callable[[], str],
        digest: int | None = None,
        block_bytes: int = 0,
        kept: bool = False,
    ) -> None:
        """See :class:`..core.protocols.Transfers`."""
        self._begin(most)
        if source == self._rank and digest is None:  # before something else could get into the memory
            digest = digest_of(data, block_bytes)
        self._by.broadcast(data, source, most)
        if data.size:
            hashed: int | Future[int] | None = digest
            if hashed is None:
                hash_it = functools.partial(digest_of, data, block_bytes)
                hashed = self._beside.start(hash_it) if kept else hash_it()
            messages = self._broadcasts[source]
            messages.append(_Arrival(len(messages), self._number, hashed, what))

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
        what: Callable[[int], str],
        digests: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """See :class:`..core.protocols.Transfers`."""
        self._begin(most)
        for to, data in outgoing.items():
            if data.size and to != self._rank:
                digest = digests[to] if to in digests else digest_of(data)
                sealed = self._sealed(digest, self._number, self._rank, to)
                self._sent[to].append((self._operations[self._rank], sealed))
        self._by.exchange(outgoing, incoming, senders, most)
        for source, data in incoming.items():
            if data.size and source != self._rank:
                place, named = self._operations[source], functools.partial(what, source)
                self._came[source].append(_Arrival(place, self._number, digest_of(data), named))
        self._operations.update([source for source, _ in senders])

    def finish(self) -> None:
        """After the work, whether it has failed or not: wait until nothing is hashed any more, as its memory may go."""
        self._beside.finish()

    def try_out(self) -> list[str]:
        """See :class:`..core.protocols.Transfers`."""
        return self._by.try_out()

    def settle(self) -> None:
        """After the last operation, on all ranks: find out whether what has come is what was sent.

        Raises:
            CollectiveError: it is not, for this rank.
        """
        wrong: list[str] = []
        for source, messages in sorted(self._broadcasts.items()):
            digests = _no_digests(len(messages))
            if source == self._rank:
                digests[:] = [self._sealed(one.digest, one.operation, source, _ALL) for one in messages]
            self._by.broadcast(digests.view(np.uint8), source, self._most)
            wrong += self._compare("broadcast", source, _ALL, messages, digests)
        if self._operations:
            outgoing = {to: _no_digests(self._operations[self._rank]) for to in self._sent}
            for to, sent in self._sent.items():
                outgoing[to][[place for place, _ in sent]] = np.array([digest for _, digest in sent], np.uint64)
            incoming = {source: _no_digests(self._operations[source]) for source in self._came}
            senders = [(source, 8 * count) for source, count in sorted(self._operations.items())]
            self._by.exchange(_as_bytes(outgoing), _as_bytes(incoming), senders, self._most)
            for source, messages in sorted(self._came.items()):
                wrong += self._compare("exchange", source, self._rank, messages, incoming[source])
        if wrong:
            shown = wrong[:_MOST_NAMES] + ["..."] * (len(wrong) > _MOST_NAMES)
            raise CollectiveError(f"collectives delivered other bytes than were sent: {'; '.join(shown)}; {ADVICE}")

    def _begin(self, most: int) -> None:
        self._number += 1
        self._most = max(self._most, most)

    def _sealed(self, digest: int | Future[int], operation: int, source: int, destination: int) -> int:
        """What is sent of a digest, and compared: it holds for one message of one operation alone."""
        told = struct.pack("<Qqq", digest if isinstance(digest, int) else digest.result(), source, destination)
        return xxhash.xxh3_64_intdigest(told, (self._seed + operation) % (1 << 64))

    def _compare(
        self, operation: str, source: int, destination: int, messages: Sequence[_Arrival], sent: Digests
    ) -> list[str]:
        """A line if some messages are not as they were sent."""
        if source == self._rank:
            return []
        sealed = [self._sealed(one.digest, one.operation, source, destination) for one in messages]
        wrong = [one for one, seal in zip(messages, sealed, strict=True) if seal != int(sent[one.place])]
        names = dict.fromkeys(name for message in wrong if (name := message.what()))
        shown = ", ".join(list(names)[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        return [f"{operation} from rank {source} to rank {self._rank}" + f" ({shown})" * bool(shown)] if wrong else []


def _no_digests(count: int) -> Digests:
    return np.zeros(count, np.uint64)


def _as_bytes(digests: Mapping[int, Digests]) -> dict[int, Bytes1D]:
    return {rank: column.view(np.uint8) for rank, column in digests.items()}
