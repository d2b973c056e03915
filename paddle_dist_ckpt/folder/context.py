"""What a save and a load have in common on one rank: a folder, the other ranks, and the framework's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.protocols import ControlSession, Transport
from ..storage.base import Folder, Storage
from ..tree.state_dict import Adapter

__all__ = ["Context"]


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
        return Folder(self.storage.identity(), self.storage.free_bytes())
