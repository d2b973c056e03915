"""The coordinator's side of a save: from every rank's request to every rank's order, from the results to the commit."""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import msgspec
import numpy as np

from ..control.rounds import check_same
from ..core.decoding import json_cost
from ..core.garbage import no_collections
from ..core.messages import decode, encode
from ..errors import CheckpointError, UnsupportedValueError
from ..files.metadata import FileInfo, Metadata, SaveInfo, save_members
from ..files.room import check_values_fit
from ..files.times import SaveTimes
from ..folder import commit
from ..folder.context import check_folders
from ..folder.lease import Lease
from ..options import SaveOptions
from ..storage.base import FolderIdentity
from .copies import ALL, PARTS, copies_that_differ
from .global_state import GlobalState, merge_structures
from .messages import ClearRequest, CommitAnswer, PlanAnswer, SaveRequest, WriteAnswer, WriteRequest
from .planned_save import PlannedSave, make_plan
from .replicas import Comparison, logged, merge_contents, replica_warnings
from .requests import check_room, leaders_of
from .save_memory import SaveContext

__all__ = ["CATCH_UP", "SaveCoordinator"]

_logger = logging.getLogger("paddle_dist_ckpt")
CATCH_UP = b"catch up"
"""The answer to all ranks where one has sent nothing in round ``plan``: it is behind."""
_SAME = ("unique_id", "block_bytes", "data_suffix", "check_replicas")
_same_arguments = operator.attrgetter(*_SAME)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """What the ranks have been ordered to do.

    Attributes:
        planned: The plan that each rank has its part of.
        contents: What may be another in each save of one structure.
        lease: This save's right to its files in the coordinator's folder.
        save: What all files of this save say of it.
        leaders: One rank for each folder.
        warnings: What the caller of every rank is told.
        compared: Which blocks of copies are compared; None for none.
    """

    planned: PlannedSave
    contents: Comparison
    lease: Lease
    save: SaveInfo
    leaders: frozenset[int]
    warnings: list[str]
    compared: int | None

    @property
    def one_folder(self) -> bool:
        """Whether all ranks see the same folder."""
        return len(self.leaders) == 1


class SaveCoordinator:
    """The coordinator's answers, round by round; its options count.

    ``ending`` is ended when the save is. If it has failed then, the lease is given back, or left to expire if files of
    this save may still be about.
    """

    _requests: dict[int, SaveRequest]
    _folders: dict[int, FolderIdentity]
    _ordered: _Ordered
    _written: dict[int, WriteRequest]
    _left: commit.Aftermath

    def __init__(self, context: SaveContext, options: SaveOptions, ending: ExitStack, in_background: bool) -> None:
        self._context, self._options, self._ending, self._in_background = context, options, ending, in_background
        self._differing = ""  # what is to be said of copies that differ, if the save is aborted for it
        self._settled = True  # whether no rank can have files of this save, now or later, that nobody would remove

    @no_collections()
    def plan(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``plan``: an order for every rank; or, if a plan has to be made and not all have said of what, ask.

        If a rank is behind, nothing is planned yet, and all are told so.
        """
        if not all(messages.values()):
            return dict.fromkeys(messages, CATCH_UP)
        requests = self._requests = {rank: decode(data, SaveRequest) for rank, data in messages.items()}
        passed = {rank: _same_arguments(request) for rank, request in requests.items()}
        check_same(_SAME, passed, self._context.session.coordinator)
        self._folders = {rank: request.folder.identity for rank, request in requests.items()}
        if not self._options.separate_folders:
            check_folders(self._folders, {rank: request.location for rank, request in requests.items()})
        self._fingerprints = {rank: request.fingerprint for rank, request in requests.items()}
        known = self._context.memory.planned_for(self._fingerprints)
        if known is not None:
            contents = merge_contents(known.state, requests)
            if np.array_equal(known.alike, contents.alike):
                return self._order(known, contents, self._warnings(known.state, contents))
        structures = {rank: request.structure for rank, request in requests.items() if request.structure is not None}
        if len(structures) < len(requests):
            return dict.fromkeys(messages, b"")
        return self._plan_and_order(structures)

    @no_collections()
    def described(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``describe``, if round ``plan`` has asked: an order for every rank."""
        return self._plan_and_order(messages)

    def _plan_and_order(self, structures: Mapping[int, bytes]) -> dict[int, bytes]:
        memory = self._context.memory
        memory.make_room(self._fingerprints)  # first of all
        state, shards = merge_structures(structures, self._context.session.coordinator)
        contents = merge_contents(state, self._requests)
        warnings = self._warnings(state, contents)
        planned = make_plan(state, shards, self._fingerprints, contents.alike)
        memory.planned.insert(0, planned)
        return self._order(planned, contents, warnings)

    def _warnings(self, state: GlobalState, contents: Comparison) -> list[str]:
        """What is to be said of replicas; raises if replicas differ that must not."""
        return replica_warnings(state, contents, self._options.check_replicas, self._context.session.doubtful)

    def _order(self, planned: PlannedSave, contents: Comparison, warnings: list[str]) -> dict[int, bytes]:
        requests, context = self._requests, self._context
        ours = requests[context.session.coordinator]
        inline = [ours.user_metadata or b"", *contents.value_json.values()]
        check_values_fit(contents.cost + 2 * json_cost(b",".join(inline)), int(planned.rank_bytes.sum()))
        if warnings:
            _logger.warning("%s: %s", context.storage.location, logged(warnings))
        made: list[Lease] = []
        self._ending.push(functools.partial(self._end, made))  # first: an interrupt may come when the lease is there
        lease = commit.begin(
            context.storage,
            ours.unique_id,
            context.replace_newest,
            context.memory.given_up,
            self._options.timeout,
            made,
        )
        self._ordered = _Ordered(
            planned=planned,
            contents=contents,
            lease=lease,
            save=SaveInfo.of_now(
                lease.save_id, len(requests), ours.block_bytes, context.adapter.version, lease.unique_id
            ),
            leaders=leaders_of(self._folders, context.session.coordinator),
            warnings=warnings,
            compared=self._compared(planned),
        )
        if not lease.doomed:
            check_room(planned, requests, {rank: request.folder.free_bytes for rank, request in requests.items()})
        orders = _orders(self._ordered, requests)
        self._settled = bool(lease.doomed)  # nobody writes before round clear has ended
        return orders

    def check_held(self) -> None:
        """See that the claim is there which says what is removed; see :meth:`..folder.lease.Lease.check_held`."""
        self._ordered.lease.check_held()

    def cleared(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``clear``: the files of dead saves are gone, or left to a later save; now there must be room."""
        cleared = {rank: decode(data, ClearRequest) for rank, data in messages.items()}
        lease = self._ordered.lease
        if any(one.left for one in cleared.values()):
            lease.leave_doomed()
        lease.cleared()
        free_bytes = {rank: one.free_bytes for rank, one in cleared.items()}
        check_room(self._ordered.planned, self._requests, free_bytes)
        self._settled = False
        return dict.fromkeys(messages, b"")

    def _compared(self, planned: PlannedSave) -> int | None:
        """Which blocks of copies are compared, if any.

        A tenth where others would cost more than can be afforded: in a background save the time until the call
        returns, since copies are not among what is snapshotted; on devices copies to the host.
        """
        if self._options.check_replicas == "off" or not len(planned.copied):
            return None
        on_device = any(request.on_device for request in self._requests.values())
        if self._options.check_replicas != "sampled" and not on_device and not self._in_background:
            return ALL
        planned.sampled += 1
        return planned.sampled % PARTS

    def _take_written(self, messages: Mapping[int, bytes]) -> bool:
        """Note what ranks say that they wrote, compared with the plan, and where their copies of it differ, which may
        be a warning; whether all can go on.

        Raises:
            CheckpointError: something is missing.
        """
        self._written = {rank: decode(data, WriteRequest) for rank, data in messages.items()}
        _check_written(self._ordered.planned, self._written)
        if self._ordered.compared is None:
            return True
        text = copies_that_differ(self._ordered.planned, self._written)
        if text and (self._options.check_replicas == "error" or self._context.session.doubtful):
            self._differing = text
        elif text:
            _logger.warning("%s", text)
            self._ordered.warnings.append(text)
        return not self._differing

    def _end(
        self,
        leases: list[Lease],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lease in leases:
            if error is not None:
                commit.give_up(lease, self._settled or len(self._requests) == 1)  # whose own files are removed by now
                # By the next save all ranks have left this one, and nobody need wait until its claim has expired.
                self._context.memory.given_up.add(lease.save_id)
            lease.stop()  # after a commit, what is left to do is left to a later save

    @no_collections()
    def written(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``write``: abort if a rank failed, commit if there is one folder, else have each folder sealed."""
        ordered = self._ordered
        self._settled = ordered.one_folder  # of what a rank cannot remove in another, the claim speaks
        if not (all(messages.values()) and self._take_written(messages)):
            return dict.fromkeys(messages, encode(WriteAnswer(True, [], None)))
        files: dict[FolderIdentity, list[FileInfo]] = {}
        for rank, written in self._written.items():
            files.setdefault(self._folders[rank], []).extend(written.files)
        if ordered.one_folder:
            commit.seal(self._context.storage, [info for infos in files.values() for info in infos])
            return dict.fromkeys(messages, encode(WriteAnswer(False, [], self._publish())))
        return {
            rank: encode(WriteAnswer(False, files[self._folders[rank]] if rank in ordered.leaders else [], None))
            for rank in messages
        }

    def commit(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``commit``: all folders are sealed."""
        return dict.fromkeys(messages, encode(self._publish()))

    def cleaned(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``clean``: the replaced save's files are gone from all other folders."""
        commit.finish(self._ordered.lease, self._left)
        return dict.fromkeys(messages, b"")

    def aborted(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``abort`` never ends well: the rank that failed raises in it, if there is one."""
        if self._differing:
            raise UnsupportedValueError(f"{self._differing}\nNothing was saved.")
        raise CheckpointError("the save was aborted, but no rank says why")

    def _publish(self) -> CommitAnswer:
        ordered = self._ordered
        metadata = self._metadata()
        unique_id = commit.publish(ordered.lease, metadata, ordered.contents.cost)
        return CommitAnswer(
            unique_id=unique_id,
            files=len(metadata.files),
            total_bytes=sum(written.nbytes for written in self._written.values()),
            warnings=ordered.warnings,
            replaced=self._replaced(unique_id),
            leaders=sorted(ordered.leaders - {self._context.session.coordinator}),  # it finishes by itself
        )

    def _metadata(self) -> Metadata:
        """What `.metadata` will say."""
        ordered, written = self._ordered, self._written
        ranks, user = ordered.planned.state.ranks, self._requests[self._context.session.coordinator].user_metadata
        return Metadata(
            **save_members(ordered.save),
            user_tree=msgspec.json.decode(user) if user is not None else None,
            files=[info for rank in ranks for info in written[rank].files],
            table=ordered.planned.table(tuple(tuple(written[rank].entries) for rank in ranks)),
            value_records=[(path, msgspec.Raw(json)) for path, json in sorted(ordered.contents.value_json.items())],
            times=SaveTimes.of({rank: written[rank].seconds for rank in ranks}),
        )

    def _replaced(self, unique_id: int) -> list[str]:
        """After the commit: the replaced saves if they have files in other folders; else the lease is ended."""
        lease = self._ordered.lease
        self._left = commit.aftermath(lease, unique_id, lease.save_id)
        if self._ordered.one_folder or not self._left.saves:
            commit.finish(lease, self._left)
            return []
        return self._left.saves


def _orders(ordered: _Ordered, requests: Mapping[int, SaveRequest]) -> dict[int, bytes]:
    """What each rank is to do, encoded; what is the same for many ranks, as if all have their plans, only once."""
    planned, doomed = ordered.planned, ordered.lease.doomed
    hosts = Counter(request.folder.identity.host for request in requests.values())

    def order(plan: bytes | None, ranks_on_host: int, leads: bool) -> bytes:
        dead = None if not doomed else doomed if leads else []
        return encode(PlanAnswer(planned.plan_id, plan, ordered.save, ranks_on_host, dead, ordered.compared))

    order_of_known = functools.cache(functools.partial(order, None))
    orders = {}
    for rank, request in requests.items():
        ranks_on_host, leads = hosts[request.folder.identity.host], rank in ordered.leaders
        if request.plan_id == planned.plan_id:
            orders[rank] = order_of_known(ranks_on_host, leads)
        else:
            orders[rank] = order(planned.rank_plans[rank], ranks_on_host, leads)
    return orders


def _check_written(planned: PlannedSave, written: Mapping[int, WriteRequest]) -> None:
    """Compare what the ranks say they wrote with what they were to write.

    Raises:
        CheckpointError: something is missing.
    """
    expected = zip(planned.state.ranks, planned.rank_items.tolist(), planned.rank_bytes.tolist(), strict=True)
    for rank, items, nbytes in expected:
        result = written[rank]
        if sum(result.entries) != items or result.nbytes != nbytes:
            raise CheckpointError(
                f"rank {rank} wrote {sum(result.entries)} shards of {result.nbytes} bytes; {items} of {nbytes} bytes "
                "were planned"
            )
