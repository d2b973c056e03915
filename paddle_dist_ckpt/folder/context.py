"""What a save and a load have in common on one rank: a folder, the other ranks, and the framework's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..core.protocols import ControlSession, Transport
from ..core.text import ranks_text
from ..errors import CheckpointError
from ..storage.base import Folder, FolderIdentity, Storage
from ..tree.state_dict import Adapter

__all__ = ["Context", "check_folders", "folders_text"]


def check_folders(
    folders: Mapping[int, FolderIdentity],
    locations: Mapping[int, str],
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Ranks of one host must see one folder: a path that has the time in it, say, may differ without anybody's wish.

    Args:
        folders: Which folder each rank sees; not of those that see none.
        locations: What each calls it.
        hosts: The hosts of those that see none.

    Raises:
        ValueError: ranks of one host see several; or some see none, under another path than those that see one.
        CheckpointError: they see several on one disk under one path, as if one had been made anew.
    """
    if len(set(folders.values())) == 1 and not hosts:
        return  # as nearly always
    seen: dict[str, dict[FolderIdentity | str, list[int]]] = {}
    for rank, folder in sorted(folders.items()):
        seen.setdefault(folder.host, {}).setdefault(folder, []).append(rank)
    called = {(folder.host, locations[rank]) for rank, folder in folders.items()}
    for rank, host in sorted(hosts.items()):
        # Under one path ranks may see several, or none: in containers, say, that mount other disks.
        if host in seen and (host, locations[rank]) not in called:
            seen[host].setdefault(locations[rank], []).append(rank)
    lines = [
        f"  on {host.partition('/')[0]}: "
        + "; ".join(
            f"{ranks_text(ranks)}: {locations[ranks[0]]}" + (" (is not there)" if isinstance(folder, str) else "")
            for folder, ranks in of_host.items()
        )
        for host, of_host in seen.items()
        if len(of_host) > 1
    ]
    if not lines:
        return
    if len(set(locations.values())) == len({(folder.host, folder.device) for folder in folders.values()}) == 1:
        raise CheckpointError(
            f"ranks see different folders at {locations[min(locations)]}, on one disk: somebody has removed the folder "
            "meanwhile, and it was made anew; try again (or containers mount several there; separate_folders=True in "
            "the options says that it is meant so)"
        )
    advice = "pass the same path on all ranks"
    if len(set(locations.values())) == 1:
        advice = "the path is the same, and is mounted several times, as in containers, be it one folder or several"
    raise ValueError(
        "\n".join(
            [
                "ranks of one host have different folders:",
                *lines,
                f"({advice}; separate_folders=True in the options says that it is meant so)",
            ]
        )
    )


def folders_text(folders: Mapping[int, FolderIdentity], locations: Mapping[int, str]) -> str:
    """What is to be said of an error if ranks do not see one folder; empty if all do.

    Args:
        folders: Which folder each rank sees; not of those that see none.
        locations: What each calls it.
    """
    seen: dict[FolderIdentity | None, list[int]] = {}
    for rank in sorted(locations):
        seen.setdefault(folders.get(rank), []).append(rank)
    if len(seen) == 1:
        return ""
    parts = (
        f"{ranks_text(ranks)}: {'no' if folder is None else 'a'} folder {locations[ranks[0]]}"
        + ("" if folder is None else f" on {folder.host.partition('/')[0]}")
        for folder, ranks in seen.items()
    )
    return f"\nThe ranks do not see one folder: {'; '.join(parts)}. Is the path one of a shared filesystem?"


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
