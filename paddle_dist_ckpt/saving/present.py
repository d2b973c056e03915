"""What ranks have, presented to a load as a checkpoint that nobody writes: planned as a save is, read from the tensors.

    plan      every rank says what it has; the coordinator plans who would write what
    present   every rank says which files it would write

Nothing is copied ahead but what a load would overwrite while it reads, and nothing is hashed but what ranks have copies
of. A file is a name for the tensors' memory; what is read of it is copied from there. Partial tensors are reduced
between the rounds, and these values are kept.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, cast

import msgspec
import xxhash

from ..control.rounds import check_same, only_on
from ..core.buffers import Buffers
from ..core.frames import with_room_for_frames
from ..core.local_tensors import LocalTensors
from ..core.memory import Bytes1D
from ..core.messages import decode, encode
from ..core.protocols import ControlSession, Transport
from ..errors import UnsupportedValueError
from ..files.contents import TensorContents
from ..files.metadata import FileInfo, Metadata, SaveInfo, save_members
from ..files.names import data_file_name
from ..storage.base import Folder, FolderIdentity, ReadableFile, Storage
from ..tree.state_dict import Adapter
from .apart import set_apart
from .copies import ALL, PARTS, CopyPlan, copies_that_differ
from .describe import LocalState, describe, digests_of
from .file_plan import plan_files
from .global_state import merge_structures
from .messages import PlanAnswer, RankPlan, SaveRequest, WriteRequest
from .planned_save import PlannedSave, make_plan
from .reduce import awaited, reduce_partials
from .replicas import logged, merge_contents, replica_warnings

__all__ = ["Filled", "present"]

_logger = logging.getLogger("paddle_dist_ckpt")
_BLOCK_BYTES = 1 << 20  # what a load reads and exchanges at once is a multiple of it
FORMAT = "present"


@dataclass(frozen=True, slots=True)
class Filled:
    """What a rank fills with what is presented. What overlaps with it in memory is copied before.

    Attributes:
        tensors: Gives it; called after what is presented is found.
        renamed: Whether something of it may be filled with what is presented under another path.
    """

    tensors: Callable[[], LocalTensors]
    renamed: bool


@dataclass(frozen=True, slots=True)
class _Presented:
    """What the ranks of a session have, as one of them sees it.

    Attributes:
        storage: This rank's files. Of a storage it has what a load asks for.
        metadata: On the coordinator, what there is, and in which files of which ranks.
        state: What the files are of, which must stay alive.
    """

    storage: Storage
    metadata: Metadata | None
    state: LocalState


@with_room_for_frames
def present(
    find: Callable[[], dict[Any, Any]],
    session: ControlSession,
    transport: Transport,
    adapter: Adapter,
    check_replicas: str,
    filled: Filled | None = None,
) -> _Presented:
    """Present what this rank and the session's others have, until one of them changes it.

    Args:
        find: Finds this rank's state_dict, as for a save.
        session: The ranks.
        transport: For addends of partial tensors.
        adapter: Makes the tensors accessible.
        check_replicas: See :class:`paddle_dist_ckpt.SaveOptions`; the same on every rank.
        filled: What will be filled with it on this rank.

    Raises:
        UnsupportedValueError: see :func:`paddle_dist_ckpt.save_state_dict`.
        ValueError: ranks passed different ``check_replicas``.
    """
    storage = _PresentStorage(session.rank)
    coordinator = _PresentCoordinator(session, check_replicas, adapter) if session.rank == session.coordinator else None
    described: list[LocalState] = []

    def request() -> bytes:
        state = describe(find(), adapter, session.rank)
        described.append(state if filled is None else set_apart(state, filled.tensors(), filled.renamed))
        compare = check_replicas != "off" and len(session.ranks) > 1
        return encode(_request(described[0], storage.identity(), compare, check_replicas))

    order = decode(session.gather_scatter("plan", request, only_on(coordinator, _PresentCoordinator.plan)), PlanAnswer)
    (state,) = described
    failure, files = None, WriteRequest([], [], 0, {})
    try:
        files = _make_files(state, order, session, transport, storage)
    except Exception as error:  # raised in the round, when all ranks have left the collectives
        failure = error

    def offer() -> bytes:
        if failure is not None:
            raise failure
        return encode(files)

    session.gather_scatter("present", offer, only_on(coordinator, _PresentCoordinator.present))
    return _Presented(cast(Storage, storage), coordinator.metadata if coordinator is not None else None, state)


def _request(state: LocalState, folder: FolderIdentity, compare: bool, check_replicas: str) -> SaveRequest:
    structure = state.structure()
    return SaveRequest(
        unique_id=0,
        folder=Folder(folder, None),
        block_bytes=_BLOCK_BYTES,
        fingerprint=xxhash.xxh3_128_digest(structure),
        structure=structure,
        plan_id=0,
        digests=digests_of(state) if compare else b"",
        values=state.records(),
        user_metadata=None,
        check_replicas=check_replicas,
    )


def _make_files(
    state: LocalState, order: PlanAnswer, session: ControlSession, transport: Transport, storage: _PresentStorage
) -> WriteRequest:
    """Give this rank's storage the files of its part of the plan."""
    assert order.plan is not None
    plan = decode(order.plan, RankPlan)
    with awaited(session, "collectives", plan.transfers, _raise):
        parts = plan_files(state, plan, _BLOCK_BYTES)
        boxes = [pair for part in parts for pair in part.partial_boxes(state)]
    reduced = reduce_partials(session, transport, plan.transfers, state, boxes)
    files, entries = list[FileInfo](), list[int]()
    for part in parts:
        name = data_file_name(session.rank, 0, order.save.save_id, part.number)
        copies = state.copies if state.devices is not None else None
        contents = TensorContents(part.table, part.items.sources(state, reduced), Buffers(0), copies)
        storage.files[name] = _PresentFile(part.table.nbytes, contents, Lock() if copies is not None else nullcontext())
        files.append(FileInfo(name, part.table.nbytes, ""))
        entries.append(len(part.table.names))
    digests = [b"", b""]
    if order.compared is not None:
        twice = CopyPlan.of(state, plan, parts, _BLOCK_BYTES)
        own = twice.of_own(state, plan)
        digests = [one.of_copies(state, order.compared, session.check) for one in (own, twice)]
    return WriteRequest(files, entries, sum(info.size for info in files), {}, *digests)


def _raise(error: Exception) -> NoReturn:
    raise error


class _PresentCoordinator:
    """The coordinator's answers. ``metadata`` is there after the second."""

    metadata: Metadata
    _planned: PlannedSave
    _is_compared: bool

    def __init__(self, session: ControlSession, check_replicas: str, adapter: Adapter) -> None:
        self._session, self._check, self._version = session, check_replicas, adapter.version

    def plan(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``plan``."""
        requests = {rank: decode(data, SaveRequest) for rank, data in messages.items()}
        passed = {rank: (request.check_replicas,) for rank, request in requests.items()}
        check_same(["check_replicas"], passed, self._session.coordinator)
        structures = {rank: one.structure for rank, one in requests.items() if one.structure is not None}
        state, shards = merge_structures(structures, self._session.coordinator)
        contents = merge_contents(state, requests)
        warnings = replica_warnings(state, contents, self._check, self._session.doubtful)
        if warnings:
            _logger.warning("%s", logged(warnings))
        fingerprints = {rank: request.fingerprint for rank, request in requests.items()}
        self._planned = make_plan(state, shards, fingerprints, contents.alike)
        self._values = contents.value_json
        self._save = SaveInfo.of_now(secrets.token_hex(8), len(messages), _BLOCK_BYTES, self._version)
        planned, compared = self._planned, None
        if self._check != "off" and len(planned.copied):  # as in the background: a tenth costs little
            compared = ALL if self._check == "error" else planned.sampled % PARTS
        self._is_compared = compared is not None
        number, plans, save = planned.plan_id, planned.rank_plans, self._save
        return {rank: encode(PlanAnswer(number, plans[rank], save, 1, [], compared)) for rank in messages}

    def present(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``present``."""
        offered = {rank: decode(data, WriteRequest) for rank, data in messages.items()}
        text = copies_that_differ(self._planned, offered) if self._is_compared else ""
        if text and (self._check == "error" or self._session.doubtful):
            raise UnsupportedValueError(text)
        if text:
            _logger.warning("%s", text)
        ranks = self._planned.state.ranks
        self.metadata = Metadata(
            **save_members(self._save),
            user_tree=None,
            files=[info for rank in ranks for info in offered[rank].files],
            table=self._planned.table(tuple(tuple(offered[rank].entries) for rank in ranks)),
            value_records=[(path, msgspec.json.decode(json)) for path, json in sorted(self._values.items())],
            format=FORMAT,
        )
        return dict.fromkeys(messages, b"")


class _PresentStorage:
    """The files of one rank, which no other one reaches."""

    location = "the ranks' memory"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.files: dict[str, _PresentFile] = {}

    def identity(self) -> FolderIdentity:
        """Another one on each rank."""
        return FolderIdentity(socket.gethostname(), self._rank, 0)

    def open(self, name: str) -> ReadableFile:
        """Open one of the files."""
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.files[name]

    def size(self, name: str) -> int:
        """How many bytes it has."""
        return self.open(name).size


class _PresentFile:
    """Entries, one behind the other, that are copied from the tensors when they are read.

    Copies from devices are made one at a time, under the ``lock``.
    """

    def __init__(self, size: int, contents: TensorContents, lock: AbstractContextManager[Any]) -> None:
        self.size, self._contents, self._lock = size, contents, lock

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        """See :class:`..storage.base.ReadableFile`."""
        with self._lock:
            for buffer in buffers:
                if len(buffer):
                    self._contents.copy_to(buffer, offset)
                    offset += len(buffer)

    def is_cached(self) -> bool:
        """See :class:`..storage.base.ReadableFile`."""
        return True

    def close(self) -> None:
        """See :class:`..storage.base.ReadableFile`."""
