"""What the coordinator sees in all ranks' requests of a save: whether they ask for the same, and where they write."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..errors import UnsupportedValueError
from ..storage.base import FolderIdentity
from ..tree.paths import plain_key
from .global_state import GlobalState, in_charge
from .messages import SaveRequest, ValueRecord
from .planned_save import PlannedSave

__all__ = ["check_arguments", "check_room", "folder_warnings", "leaders_of", "merge_contents", "replica_warnings"]


def check_arguments(requests: Mapping[int, SaveRequest], coordinator: int) -> None:
    """All ranks must have passed the same arguments.

    Raises:
        ValueError: they did not.
    """
    ours = requests[coordinator]
    for rank, request in sorted(requests.items()):
        if request.unique_id != ours.unique_id:
            raise ValueError(
                f"rank {rank} passed unique_id={request.unique_id}, rank {coordinator} unique_id={ours.unique_id}; "
                "all ranks must pass the same"
            )
        if request.block_bytes != ours.block_bytes:
            raise ValueError(
                f"rank {rank} passed block_bytes={request.block_bytes}, rank {coordinator} {ours.block_bytes}; "
                "all ranks must pass the same"
            )


def merge_contents(
    state: GlobalState, requests: Mapping[int, SaveRequest]
) -> tuple[dict[str, bytes], dict[str, list[int]]]:
    """What may be another in each save.

    Returns:
        The JSON of the small values that are kept, by path; and for each path whose replicas are not equal the ranks
        that differ from the one that is saved.
    """
    differing: dict[str, list[int]] = {}
    kept: dict[str, ValueRecord] = {}
    seen = np.zeros(len(state.paths), np.uint64)
    for i in in_charge(len(state.ranks), state.coordinator):
        rank = state.ranks[i]
        for path, value in zip(state.value_paths[i], requests[rank].values, strict=True):
            if kept.setdefault(path, value).digest != value.digest:
                differing.setdefault(path, []).append(rank)
        digests = np.frombuffer(requests[rank].digests, "<u8")
        if len(digests):  # none: that rank was not to compare
            tensor = state.compared[i]
            fresh = seen[tensor] == 0
            seen[tensor[fresh]] = digests[fresh]
            for t in tensor[seen[tensor] != digests].tolist():
                differing.setdefault(state.paths[t], []).append(rank)
    value_json = {path: json for path in state.value_owner if (json := kept[path].json) is not None}
    return value_json, differing


def replica_warnings(differing: Mapping[str, list[int]], check: str, doubtful: bool) -> list[str]:
    """Warnings of replicas that differ, by path those of which ranks. If ``doubtful``, ranks may be at different calls.

    Raises:
        UnsupportedValueError: some do, and it is not known that they may.
    """
    if check == "off" and not doubtful:
        return []
    warnings = [
        f"{plain_key(path)}: the plain tensors or values of ranks {', '.join(map(str, sorted(ranks)))} differ from "
        "the others'; the coordinator's is saved, or else that of the lowest rank that has one"
        for path, ranks in sorted(differing.items())
    ]
    if warnings and doubtful:
        raise UnsupportedValueError(
            "an earlier call was given up because ranks did not take part, and now their states differ: they may "
            "be at different calls. Let all ranks meet (a barrier will do) and save again, or pass the step as "
            "unique_id, so that it can be told what belongs together:\n" + "\n".join(warnings)
        )
    if warnings and check == "error":
        raise UnsupportedValueError("replicas differ:\n" + "\n".join(warnings))
    return warnings


def folder_warnings(folders: Mapping[int, FolderIdentity], coordinator: int) -> list[str]:
    """Two folders on one host are a mistake more often than not: a path with the time in it, say."""
    ours = folders[coordinator]
    others = sorted(rank for rank, folder in folders.items() if folder != ours and folder[0] == ours[0])
    if not others:
        return []
    return [
        f"ranks {', '.join(map(str, others))} are on the coordinator's host but save to other folders; the "
        "checkpoint is spread over them, and a load needs them all. Did all ranks pass the same path?"
    ]


def leaders_of(folders: Mapping[int, FolderIdentity], coordinator: int) -> frozenset[int]:
    """One rank for each folder: the coordinator for its own, the lowest rank for each other."""
    leaders = {folders[rank]: rank for rank in (*sorted(folders, reverse=True), coordinator)}
    return frozenset(leaders.values())


def check_room(planned: PlannedSave, requests: Mapping[int, SaveRequest]) -> None:
    """Raises OSError (ENOSPC): a filesystem has less room than the plan needs."""
    need = Counter[tuple[str, int]]()
    for rank, nbytes in zip(planned.state.ranks, planned.rank_bytes.tolist(), strict=True):
        need[requests[rank].folder.identity[:2]] += nbytes
    for rank in planned.state.ranks:
        folder = requests[rank].folder
        wanted = need[folder.identity[:2]]  # host and device
        if folder.free_bytes is not None and wanted > folder.free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {folder.free_bytes:,} bytes free, and {wanted:,} are to "
                "be written to it",
            )
