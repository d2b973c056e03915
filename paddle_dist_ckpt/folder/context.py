"""What a save and a load have in common on one rank: a folder, the other ranks, and the framework's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.protocols import ControlSession, Transport
from ..storage.base import Folder, FolderIdentity, Storage
from ..tree.state_dict import Adapter

__all__ = ["Context", "check_folders"]


def check_folders(folders: Mapping[int, FolderIdentity], locations: Mapping[int, str]) -> None:
    """Ranks of one host must see one folder: a path that has the time in it, say, may differ without anybody's wish.

    Args:
        folders: Which folder each rank sees.
        locations: What each calls it.

    Raises:
        ValueError: ranks of one host see several.
    """
    if len(set(folders.values())) == 1:
        return  # as nearly always
    hosts: dict[str, dict[FolderIdentity, list[int]]] = {}
    for rank, folder in sorted(folders.items()):
        hosts.setdefault(folder.host, {}).setdefault(folder, []).append(rank)
    lines = [
        f"  on {host.partition('/')[0]}: "
        + "; ".join(f"rank {', '.join(map(str, ranks))}: {locations[ranks[0]]}" for ranks in seen.values())
        for host, seen in hosts.items()
        if len(seen) > 1
    ]
    if lines:
        raise ValueError(
            "\n".join(
                [
                    "ranks of one host have different folders:",
                    *lines,
                    "(pass the same path on all ranks; separate_folders=True in the options says that it is meant so)",
                ]
            )
        )


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
