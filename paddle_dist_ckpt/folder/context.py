"""What a save and a load have in common on one rank: a folder, the other ranks, and the framework's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..core.messages import decode, encode
from ..core.protocols import ControlSession, Transport
from ..storage.base import Folder, Storage
from ..tree.state_dict import Adapter

__all__ = ["Context", "Messages", "ask", "only_on"]

C = TypeVar("C")
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)
Messages = Mapping[int, bytes]
"""By rank."""


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's surroundings.

    Attributes:
        storage: The folder.
        session: For control messages among the ranks.
        transport: For bulk data among them.
        adapter: Makes the framework's tensors and objects accessible.
    """

    storage: Storage
    session: ControlSession
    transport: Transport
    adapter: Adapter

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.session.rank == self.session.coordinator

    def folder(self) -> Folder:
        """Which folder this rank sees."""
        host, device, inode = self.storage.identity()
        return Folder(host, device, inode, self.storage.free_bytes())


def only_on(coordinator: C | None, answer: Callable[[C, Messages], Messages]) -> Callable[[Messages], Messages]:
    """How a round is answered.

    Args:
        coordinator: The object whose method answers; there is one on the coordinator alone.
        answer: The method.
    """
    return _never if coordinator is None else functools.partial(answer, coordinator)


def _never(messages: Messages) -> Messages:
    raise AssertionError("only the coordinator answers")


def ask(
    session: ControlSession,
    name: str,
    local: Callable[[], tuple[T, msgspec.Struct]],
    kind: type[A],
    answer: Callable[[Messages], Messages],
) -> tuple[T, A]:
    """A round of a session, in typed messages.

    Args:
        session: The session.
        name: The round's name.
        local: Does this rank's part; returns what came of it for this rank, and what the coordinator is asked.
        kind: The type of the coordinator's answer.
        answer: Answers all ranks, on the coordinator.

    Returns:
        What came of this rank's part, and the coordinator's answer.
    """
    results: list[T] = []

    def request() -> bytes:
        result, message = local()
        results.append(result)
        return encode(message)

    reply = session.gather_scatter(name, request, answer)
    return results[0], decode(reply, kind)
