"""The coordinator's side of a save: from every rank's request to every rank's order, from the results to the commit."""

from __future__ import annotations

import datetime
import errno
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from ..core.box import Box
from ..core.metadata import FileInfo, Metadata
from ..core.paths import plain_key
from ..core.ports import ControlSession
from ..core.shards import IntArray, LayoutCollection, ShardTable, pack_column
from ..core.values import decode_value
from ..errors import CheckpointError, UnsupportedValueError
from ..options import SaveOptions
from ..planning.save_plan import SavePlan, Tensors, plan_save
from ..storage.base import Storage
from .commit import Claim
from .fileinfo import LIBRARY
from .global_state import GlobalState, merge_requests
from .messages import SaveOrder, SaveRequest, SaveResult, Transfer, WriteAnswer, Written, decode, encode, pack_signed

__all__ = ["SaveCoordinator", "seal"]

_logger = logging.getLogger("paddle_dist_ckpt")
FolderKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the coordinator keeps between rounds."""

    state: GlobalState
    plan: SavePlan
    claim: Claim
    user_metadata: bytes | None
    folders: dict[int, FolderKey]
    leaders: frozenset[int]

    @property
    def one_folder(self) -> bool:
        """Whether all ranks see the same folder."""
        return len(set(self.folders.values())) == 1


class SaveCoordinator:
    """The coordinator's answers, round by round. Other ranks have one too and never use it."""

    def __init__(
        self, storage: Storage, session: ControlSession, framework_version: str | None, options: SaveOptions
    ) -> None:
        self._storage, self._session, self._options = storage, session, options
        self._framework_version = framework_version
        self._created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._claim: Claim | None = None
        self._planned: _Planned | None = None
        self._written: dict[int, Written] = {}
        self._warnings: list[str] = []
        self._settled = True  # whether no rank can have files of this save, now or later, that nobody would remove

    def plan(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``plan``: an order for every rank."""
        requests = {rank: decode(data, SaveRequest) for rank, data in messages.items()}
        state = merge_requests(requests, self._session.coordinator)
        self._check_replicas(state)
        plan = _plan(state)
        ours = requests[self._session.coordinator]
        claim = self._claim = Claim.make(self._storage, ours.unique_id)
        folders = {rank: request.folder.key for rank, request in requests.items()}
        self._warn_of_folders(folders)
        self._planned = _Planned(state, plan, claim, ours.user_metadata, folders, _leaders(state, folders))
        orders = _make_orders(state, plan, requests, claim, self._created, self._planned.leaders)
        self._settled = False
        return {rank: encode(order) for rank, order in orders.items()}

    def _check_replicas(self, state: GlobalState) -> None:
        if self._options.check_replicas == "off" and not self._session.doubtful:
            return
        self._warnings = [
            f"{plain_key(path)}: the plain tensors or values of ranks {', '.join(map(str, sorted(ranks)))} differ from "
            "the others'; the coordinator's is saved, or else that of the lowest rank that has one"
            for path, ranks in sorted(state.differing.items())
        ]
        if self._warnings and self._session.doubtful:
            raise UnsupportedValueError(
                "an earlier call was given up because ranks did not take part, and now their states differ: they may "
                "be at different calls. Let all ranks meet (a barrier will do) and save again, or pass the step as "
                "unique_id, so that it can be told what belongs together:\n" + "\n".join(self._warnings)
            )
        if self._warnings and self._options.check_replicas == "error":
            raise UnsupportedValueError("replicas differ:\n" + "\n".join(self._warnings))
        for warning in self._warnings:
            _logger.warning("%s", warning)

    def _warn_of_folders(self, folders: Mapping[int, FolderKey]) -> None:
        """Two folders on one host are a mistake more often than not: a path with the time in it, say."""
        ours = folders[self._session.coordinator]
        others = sorted(rank for rank, folder in folders.items() if folder != ours and folder[0] == ours[0])
        if others:
            self._warnings.append(
                f"ranks {', '.join(map(str, others))} are on the coordinator's host but save to other folders; the "
                "checkpoint is spread over them, and a load needs them all. Did all ranks pass the same path?"
            )
            _logger.warning("%s", self._warnings[-1])

    def written(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``write``: abort if a rank failed, commit if there is one folder, else have each folder sealed."""
        planned = self._planned
        assert planned is not None
        aborted = not all(messages.values())
        self._settled = aborted or planned.one_folder
        if aborted:
            return dict.fromkeys(messages, encode(WriteAnswer(True, [], None)))
        self._written = {rank: decode(data, Written) for rank, data in messages.items()}
        _check_written(planned.state, planned.plan, self._written)
        files: dict[FolderKey, list[FileInfo]] = {}
        for rank, written in self._written.items():
            files.setdefault(planned.folders[rank], []).extend(written.files)
        if planned.one_folder:
            seal(self._storage, [info for infos in files.values() for info in infos])
            return dict.fromkeys(messages, encode(WriteAnswer(False, [], self._publish())))
        return {
            rank: encode(WriteAnswer(False, files[planned.folders[rank]] if rank in planned.leaders else [], None))
            for rank in messages
        }

    def commit(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``commit``: all folders are sealed."""
        return dict.fromkeys(messages, encode(self._publish()))

    def cleaned(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``clean``: the replaced save's files are gone from all other folders."""
        assert self._planned is not None
        self._planned.claim.end()
        return dict.fromkeys(messages, b"")

    def aborted(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``abort`` never ends well: the rank that failed raises in it."""
        raise CheckpointError("the save was aborted, but no rank says why")

    def _publish(self) -> SaveResult:
        planned = self._planned
        assert planned is not None
        metadata = _build_metadata(planned, self._written, self._framework_version, self._created)
        user = msgspec.json.decode(planned.user_metadata) if planned.user_metadata is not None else None
        unique_id = planned.claim.publish(metadata, user)
        replaced = self._replaced(planned)
        total = sum(written.nbytes for written in self._written.values())
        return SaveResult(unique_id, len(metadata.files), total, self._warnings, replaced, sorted(planned.leaders))

    def _replaced(self, planned: _Planned) -> str | None:
        """After the commit: the replaced save if it has files in other folders; else the claim is ended.

        What goes wrong here does not undo the commit, so it is left to a later save.
        """
        try:
            replaced = None if planned.one_folder else planned.claim.replaced_save()
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: files of the replaced save are left to a later one: %s", self._storage.location, error)
            planned.claim.leave()
            return None
        if replaced is None:
            planned.claim.end()
        return replaced

    def leave(self) -> None:
        """After the commit, leave what is left to do to a later save."""
        if self._claim is not None:
            self._claim.leave()

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """Around the whole save: when it fails, clean up, or let the claim expire if files may still be about."""
        try:
            yield
        except BaseException:
            if self._claim is not None:
                self._claim.failed(self._settled)
            raise


def _plan(state: GlobalState) -> SavePlan:
    """Who writes what of a merged state."""
    assert state.shards is not None
    dimensions = state.shards.offset.shape[1]
    padded = {shape: (*shape, *(1,) * (dimensions - len(shape))) for shape in set(state.shapes)}
    shapes = np.array([padded[shape] for shape in state.shapes], np.int64).reshape(-1, dimensions)
    tensors = Tensors(
        [state.keys[path] for path in state.paths],
        np.array([dtype.itemsize for dtype in state.dtypes], np.int64),
        np.array([len(shape) for shape in state.shapes], np.int64),
        shapes,
    )
    return plan_save(tensors, state.shards, len(state.ranks), state.coordinator)


def _make_orders(
    state: GlobalState,
    plan: SavePlan,
    requests: Mapping[int, SaveRequest],
    claim: Claim,
    created: str,
    leaders: frozenset[int],
) -> dict[int, SaveOrder]:
    """Each rank's order, by global rank.

    Raises:
        CheckpointError: a filesystem has less room than the plan needs.
    """
    nbytes = _plan_bytes(state, plan)
    _check_room(state, plan, nbytes, requests)
    hosts = Counter(request.folder.host for request in requests.values())
    plain_keys = {path: key for path, key in state.keys.items() if key != plain_key(path)}
    transfers = [_transfer(state, *transfer) for transfer in plan.transfers]
    values: dict[int, list[str]] = {}
    for path in sorted(state.value_json):
        values.setdefault(state.value_owner[path], []).append(path)
    writers = sorted({*np.unique(plan.rank).tolist(), state.coordinator, *values})
    bounds = np.searchsorted(plan.rank, np.arange(len(state.ranks) + 1))
    orders = {}
    for i, rank in enumerate(state.ranks):
        mine = slice(int(bounds[i]), int(bounds[i + 1]))
        orders[rank] = SaveOrder(
            unique_id=claim.unique_id,
            save_id=claim.save_id,
            created=created,
            row=pack_column(plan.row[mine]),
            dimensions=plan.offset.shape[1],
            boxes=pack_signed(np.hstack([plan.offset[mine], plan.shape[mine]])),
            keys=plain_keys,
            values=values.get(i, []),
            transfers=transfers,
            ranks_on_host=hosts[requests[rank].folder.host],
            clean=claim.doomed if rank in leaders else [],
            total_bytes=int(nbytes.sum()),
            writers=[state.ranks[w] for w in writers] if i == state.coordinator else None,
        )
    return orders


def _transfer(state: GlobalState, source: int, source_row: int, writer: int, writer_row: int, box: Box) -> Transfer:
    assert state.shards is not None
    held = (state.shards.rank == source) & (state.shards.row == source_row)
    itemsize = state.dtypes[state.shards.tensor[held][0]].itemsize
    corners = (box.offset, box.shape)
    return Transfer(state.ranks[source], source_row, state.ranks[writer], writer_row, corners, box.size * itemsize)


def _leaders(state: GlobalState, folders: Mapping[int, FolderKey]) -> frozenset[int]:
    """One rank for each folder: the coordinator for its own, the lowest rank for each other."""
    leaders: dict[FolderKey, int] = {}
    for rank in (state.ranks[state.coordinator], *state.ranks):
        leaders.setdefault(folders[rank], rank)
    return frozenset(leaders.values())


def _plan_bytes(state: GlobalState, plan: SavePlan) -> IntArray:
    itemsizes = np.array([dtype.itemsize for dtype in state.dtypes], np.int64)
    sizes: IntArray = np.prod(plan.shape, axis=1, dtype=np.int64) * itemsizes[plan.tensor]
    return sizes


def _check_room(state: GlobalState, plan: SavePlan, nbytes: IntArray, requests: Mapping[int, SaveRequest]) -> None:
    need: dict[tuple[str, int], int] = {}
    per_rank = np.bincount(plan.rank, nbytes, minlength=len(state.ranks))
    for i, rank in enumerate(state.ranks):
        folder = requests[rank].folder
        need[folder.host, folder.device] = need.get((folder.host, folder.device), 0) + int(per_rank[i])
    for rank in state.ranks:
        folder = requests[rank].folder
        wanted = need[folder.host, folder.device]
        if folder.free_bytes is not None and wanted > folder.free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {folder.free_bytes:,} bytes free, and {wanted:,} are to "
                "be written to it",
            )


def _check_written(state: GlobalState, plan: SavePlan, written: Mapping[int, Written]) -> None:
    """Compare what the ranks say they wrote with what they were to write.

    Raises:
        CheckpointError: something is missing.
    """
    counts = np.bincount(plan.rank, minlength=len(state.ranks))
    sizes = np.bincount(plan.rank, _plan_bytes(state, plan), minlength=len(state.ranks))
    for i, rank in enumerate(state.ranks):
        result = written[rank]
        if sum(result.entries) != counts[i] or result.nbytes != int(sizes[i]):
            raise CheckpointError(
                f"rank {rank} wrote {sum(result.entries)} shards of {result.nbytes} bytes; {counts[i]} of "
                f"{int(sizes[i])} bytes were planned"
            )


def _build_metadata(
    planned: _Planned, written: Mapping[int, Written], framework_version: str | None, created: str
) -> Metadata:
    """What `.metadata` will say."""
    state = planned.state
    files: list[FileInfo] = []
    file_of_row: list[IntArray] = []
    for rank in state.ranks:
        for info, entries in zip(written[rank].files, written[rank].entries, strict=True):
            file_of_row.append(np.full(entries, len(files), np.int64))
            files.append(info)
    file = np.concatenate([*file_of_row, np.zeros(0, np.int64)])
    values = [(path, msgspec.json.decode(json)) for path, json in sorted(state.value_json.items())]
    return Metadata(
        unique_id=planned.claim.unique_id,
        save_id=planned.claim.save_id,
        world_size=len(state.ranks),
        block_bytes=state.block_bytes,
        created=created,
        library=LIBRARY,
        paddle_version=framework_version,
        files=files,
        table=_build_table(state, planned.plan, file),
        value_records=values,
        user_metadata=decode_value(planned.user_metadata) if planned.user_metadata is not None else {},
    )


def _build_table(state: GlobalState, plan: SavePlan, file: IntArray) -> ShardTable:
    keys = [plan.offset[:, d] for d in range(plan.offset.shape[1] - 1, -1, -1)]
    order = np.lexsort([*keys, plan.tensor])
    tensor, offset, shape = plan.tensor[order], plan.offset[order], plan.shape[order]
    bounds = np.searchsorted(tensor, np.arange(len(state.paths) + 1)).tolist()
    collection = LayoutCollection()
    layout_of = np.zeros(len(state.paths), np.int64)
    for t, global_shape in enumerate(state.shapes):
        rows, ndim = slice(bounds[t], bounds[t + 1]), len(global_shape)
        layout_of[t] = collection.add_arrays(global_shape, offset[rows, :ndim], shape[rows, :ndim])
    kinds = np.array(state.kinds, np.int64)
    return ShardTable(state.paths, state.dtypes, kinds, collection.layouts, layout_of, file[order], state.names)


def seal(storage: Storage, files: Sequence[FileInfo]) -> None:
    """Check that a folder still has these files in their sizes, and make its names durable.

    Raises:
        CheckpointError: a file is gone or has another size.
    """
    for info in files:
        try:
            size = storage.size(info.name)
        except FileNotFoundError:
            raise CheckpointError(f"{storage.location}/{info.name} is gone before it could be committed") from None
        if size != info.size:
            raise CheckpointError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")
    # IMPORTANT: names of data files are durable before `.metadata` names them.
    storage.sync()
