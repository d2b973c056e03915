"""What a save or a load works with on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.protocols import ControlSession, Transport
from ..storage.base import Storage
from ..tree.state_dict import Adapter
from .messages import Folder
from .save_memory import SaveMemory

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's surroundings.

    Attributes:
        storage: The folder.
        session: For control messages among the ranks.
        transport: For bulk data among them.
        adapter: Makes the framework's tensors accessible.
        memory: What is remembered from one save to the next.
        threads: How many threads a load reads with; None for its part of the host's cores.
        replace_newest: Whether a save without an id replaces the newest checkpoint.
        offload: Whether a load's transport was chosen for host memory.
    """

    storage: Storage
    session: ControlSession
    transport: Transport
    adapter: Adapter
    memory: SaveMemory = field(default_factory=SaveMemory)
    threads: int | None = None
    replace_newest: bool = False
    offload: bool = False

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.session.rank == self.session.coordinator

    def folder(self) -> Folder:
        """Which folder this rank sees."""
        host, device, inode = self.storage.identity()
        return Folder(host, device, inode, self.storage.free_bytes())
