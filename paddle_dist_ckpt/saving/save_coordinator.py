"""The coordinator's side of a save: from every rank's request to every rank's order, from the results to the commit."""

from __future__ import annotations

import datetime
import errno
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from ..core.messages import decode, encode
from ..core.protocols import ControlSession
from ..errors import CheckpointError, UnsupportedValueError
from ..files.metadata import FileInfo, Metadata, SaveInfo
from ..folder import commit
from ..folder.lease import Lease
from ..options import SaveOptions
from ..storage.base import Storage
from ..tree.paths import plain_key
from .global_state import Contents, GlobalState, check_arguments, merge_contents
from .messages import SaveOrder, SaveRequest, SaveResult, WriteAnswer, Written
from .part import LIBRARY
from .planned_save import PlannedSave, make_plan
from .save_memory import SaveMemory

__all__ = ["SaveCoordinator"]

_logger = logging.getLogger("paddle_dist_ckpt")
FolderKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the coordinator keeps between rounds."""

    what: PlannedSave
    contents: Contents
    lease: Lease
    block_bytes: int
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
        self,
        storage: Storage,
        session: ControlSession,
        framework_version: str | None,
        options: SaveOptions,
        memory: SaveMemory,
        replace_newest: bool = False,
    ) -> None:
        self._storage, self._session, self._options = storage, session, options
        self._framework_version, self._memory = framework_version, memory
        self._replace_newest = replace_newest
        self._created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._lease: Lease | None = None
        self._requests: dict[int, SaveRequest] = {}
        self._planned: _Planned | None = None
        self._written: dict[int, Written] = {}
        self._warnings: list[str] = []
        self._settled = True  # whether no rank can have files of this save, now or later, that nobody would remove

    def plan(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``plan``: an order for every rank; or, if a plan has to be made and not all have said of what, ask."""
        self._requests = {rank: decode(data, SaveRequest) for rank, data in messages.items()}
        check_arguments(self._requests, self._session.coordinator)
        fingerprints = {rank: request.fingerprint for rank, request in self._requests.items()}
        known = self._memory.planned
        if known is not None and known.fingerprints == fingerprints:
            return self._order(known)
        structures = {r: request.structure for r, request in self._requests.items() if request.structure is not None}
        if len(structures) < len(self._requests):
            return dict.fromkeys(messages, encode(SaveOrder(0, None, 0, "", "", 0, [])))
        return self._order(self._plan(structures))

    def described(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``describe``, if round ``plan`` has asked: an order for every rank."""
        return self._order(self._plan(messages))

    def _plan(self, structures: Mapping[int, bytes]) -> PlannedSave:
        fingerprints = {rank: request.fingerprint for rank, request in self._requests.items()}
        self._memory.planned = None  # first of all make room
        self._memory.planned = make_plan(structures, fingerprints, self._session.coordinator)
        return self._memory.planned

    def _order(self, what: PlannedSave) -> dict[int, bytes]:
        requests = self._requests
        contents = merge_contents(what.state, requests)
        self._check_replicas(contents)
        ours = requests[self._session.coordinator]
        lease = self._lease = commit.begin(self._storage, ours.unique_id, self._replace_newest)
        folders = {rank: request.folder.key for rank, request in requests.items()}
        self._warn_of_folders(folders)
        leaders = _leaders(what.state, folders)
        self._planned = _Planned(what, contents, lease, ours.block_bytes, ours.user_metadata, folders, leaders)
        _check_room(what, requests)
        hosts = Counter(request.folder.host for request in requests.values())
        orders = {}
        for rank, request in requests.items():
            orders[rank] = SaveOrder(
                plan_id=what.plan_id,
                plan=None if request.plan_id == what.plan_id else what.rank_plans[rank],
                unique_id=lease.unique_id,
                save_id=lease.save_id,
                created=self._created,
                ranks_on_host=hosts[request.folder.host],
                clean=lease.doomed if rank in leaders else [],
            )
        self._settled = False
        return {rank: encode(order) for rank, order in orders.items()}

    def _check_replicas(self, contents: Contents) -> None:
        if self._options.check_replicas == "off" and not self._session.doubtful:
            return
        self._warnings = [
            f"{plain_key(path)}: the plain tensors or values of ranks {', '.join(map(str, sorted(ranks)))} differ from "
            "the others'; the coordinator's is saved, or else that of the lowest rank that has one"
            for path, ranks in sorted(contents.differing.items())
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
        _check_written(planned.what, self._written)
        files: dict[FolderKey, list[FileInfo]] = {}
        for rank, written in self._written.items():
            files.setdefault(planned.folders[rank], []).extend(written.files)
        if planned.one_folder:
            commit.seal(self._storage, [info for infos in files.values() for info in infos])
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
        commit.finish(self._planned.lease)
        return dict.fromkeys(messages, b"")

    def aborted(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``abort`` never ends well: the rank that failed raises in it."""
        raise CheckpointError("the save was aborted, but no rank says why")

    def _publish(self) -> SaveResult:
        planned = self._planned
        assert planned is not None
        metadata = _build_metadata(planned, self._written, self._framework_version, self._created)
        unique_id = commit.publish(planned.lease, metadata)
        replaced = self._replaced(planned)
        total = sum(written.nbytes for written in self._written.values())
        return SaveResult(unique_id, len(metadata.files), total, self._warnings, replaced, sorted(planned.leaders))

    def _replaced(self, planned: _Planned) -> str | None:
        """After the commit: the replaced save if it has files in other folders; else the claim is ended.

        What goes wrong here does not undo the commit, so it is left to a later save.
        """
        try:
            replaced = None if planned.one_folder else commit.replaced_save(planned.lease)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: files of the replaced save are left to a later one: %s", self._storage.location, error)
            planned.lease.stop()
            return None
        if replaced is None:
            commit.finish(planned.lease)
        return replaced

    def leave(self) -> None:
        """After the commit, leave what is left to do to a later save."""
        if self._lease is not None:
            self._lease.stop()

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """Around the whole save: when it fails, clean up, or let the lease expire if files may still be about."""
        try:
            yield
        except BaseException:
            if self._lease is not None:
                commit.give_up(self._lease, self._settled)
            raise


def _leaders(state: GlobalState, folders: Mapping[int, FolderKey]) -> frozenset[int]:
    """One rank for each folder: the coordinator for its own, the lowest rank for each other."""
    leaders: dict[FolderKey, int] = {}
    for rank in (state.ranks[state.coordinator], *state.ranks):
        leaders.setdefault(folders[rank], rank)
    return frozenset(leaders.values())


def _check_room(what: PlannedSave, requests: Mapping[int, SaveRequest]) -> None:
    """Raises OSError (ENOSPC): a filesystem has less room than the plan needs."""
    need: dict[tuple[str, int], int] = {}
    for rank, nbytes in zip(what.state.ranks, what.rank_bytes.tolist(), strict=True):
        folder = requests[rank].folder
        need[folder.host, folder.device] = need.get((folder.host, folder.device), 0) + nbytes
    for rank in what.state.ranks:
        folder = requests[rank].folder
        wanted = need[folder.host, folder.device]
        if folder.free_bytes is not None and wanted > folder.free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {folder.free_bytes:,} bytes free, and {wanted:,} are to "
                "be written to it",
            )


def _check_written(what: PlannedSave, written: Mapping[int, Written]) -> None:
    """Compare what the ranks say they wrote with what they were to write.

    Raises:
        CheckpointError: something is missing.
    """
    planned = zip(what.state.ranks, what.rank_items.tolist(), what.rank_bytes.tolist(), strict=True)
    for rank, items, nbytes in planned:
        result = written[rank]
        if sum(result.entries) != items or result.nbytes != nbytes:
            raise CheckpointError(
                f"rank {rank} wrote {sum(result.entries)} shards of {result.nbytes} bytes; {items} of {nbytes} bytes "
                "were planned"
            )


def _build_metadata(
    planned: _Planned, written: Mapping[int, Written], framework_version: str | None, created: str
) -> Metadata:
    """What `.metadata` will say."""
    state = planned.what.state
    files = [info for rank in state.ranks for info in written[rank].files]
    entries = tuple(tuple(written[rank].entries) for rank in state.ranks)
    values = [(path, msgspec.Raw(json)) for path, json in sorted(planned.contents.value_json.items())]
    save = SaveInfo(
        unique_id=planned.lease.unique_id,
        save_id=planned.lease.save_id,
        world_size=len(state.ranks),
        block_bytes=planned.block_bytes,
        created=created,
        library=LIBRARY,
        paddle_version=framework_version,
        user_metadata=msgspec.json.decode(planned.user_metadata) if planned.user_metadata is not None else None,
    )
    return Metadata(save, files, planned.what.table(entries), values)
