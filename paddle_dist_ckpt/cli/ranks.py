"""A command as one process, or as the ranks of a launched job that share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from ..core.protocols import ControlSession
from ..errors import CheckpointError
from ..files.metadata import Metadata
from ..folder.checkpoint import read_checkpoint
from ..options import LoadOptions
from ..storage.base import Storage

__all__ = ["gathered", "is_first", "joined", "print_once", "same_checkpoint", "told"]

T = TypeVar("T")


@contextmanager
def joined(command: str) -> Iterator[ControlSession]:
    """A session of all processes that :mod:`paddle.distributed.launch` has started; of this one alone without it."""
    from ..wiring import members

    options = LoadOptions()
    with members(None, options).session(command, options.timeout) as made, made as session:
        yield session


def is_first(session: ControlSession) -> bool:
    """Whether this is the process that prints."""
    return session.rank == session.coordinator


def told(session: ControlSession, name: str, find: Callable[[], T], kind: type[T]) -> T:
    """What the coordinator, and it alone, finds out; the same on every rank."""

    def answer(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        return dict.fromkeys(messages, msgspec.msgpack.encode(find()))

    return msgspec.msgpack.decode(session.gather_scatter(name, lambda: b"", answer), type=kind)


def same_checkpoint(session: ControlSession, storage: Storage, unique_id: int | None) -> Metadata:
    """Read a checkpoint's `.metadata`: the same one on every rank, even if others are saved meanwhile.

    Raises:
        CheckpointError: it was replaced meanwhile, or this rank sees another folder.
    """
    mine: list[Metadata] = []

    def choose() -> tuple[int, str]:
        mine.append(read_checkpoint(storage, unique_id))
        return mine[0].unique_id, mine[0].save_id

    number, save = told(session, "checkpoint", choose, tuple[int, str])
    metadata = mine[0] if mine else read_checkpoint(storage, number)
    if metadata.save_id != save:
        raise CheckpointError(f"checkpoint {number} in {storage.location} is not the one that the other ranks see")
    return metadata


def gathered(session: ControlSession, name: str, work: Callable[[], T], kind: type[T]) -> list[T]:
    """Do this rank's part of some work; returns what came of all parts, on the coordinator alone."""
    found: list[T] = []

    def collect(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        found.extend(msgspec.msgpack.decode(data, type=kind) for _, data in sorted(messages.items()))
        return dict.fromkeys(messages, b"")

    session.gather_scatter(name, lambda: msgspec.msgpack.encode(work()), collect)
    return found


def print_once(session: ControlSession, show: Callable[[], int]) -> int:
    """Print on the coordinator alone; returns its exit code there, and elsewhere 0, when it has printed.

    A launcher that sees another process end with a code that is not 0 ends the coordinator by a signal, and with that
    the code would be another one.
    """
    code = 0

    def local() -> bytes:
        nonlocal code
        if is_first(session):
            code = show()
        return b""

    session.gather_scatter("print", local, lambda messages: dict.fromkeys(messages, b""))
    return code
