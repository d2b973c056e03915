"""Who takes part in a save or load: a connection that is made once, and used by one call after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.protocols import ControlHub, Transport
from .solo import NoTransport, SoloHub

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who takes part, and how they talk.

    Attributes:
        rank: This process's global rank.
        hub: For control messages.
        transport: For bulk data, by the group's own collectives.
        host_transport: For bulk data that are to stay in host memory.
        memory: Whatever the caller wants to keep with the connection.
    """

    rank: int
    hub: ControlHub
    transport: Transport
    host_transport: Transport
    memory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls, rank: int = 0) -> Ranks:
        """A rank that works alone."""
        return cls(rank, SoloHub(rank), NoTransport(), NoTransport())
