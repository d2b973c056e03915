"""An export, as each of its ranks runs it.

begin   the coordinator reads the checkpoint and plans, and makes a hidden folder beside the place that is meant
write   every rank writes its files into that; when all have, the coordinator gives it its name

Nothing is visible under that name before all of it is there and durable. What fails leaves nothing behind, but where
the coordinator itself is killed: a folder ``.NAME.export-...``, which a later export to the same place removes when its
claim has expired; see :mod:`..folder.hidden`.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ..control.rounds import ask, only_on
from ..core.frames import with_room_for_frames
from ..core.messages import decode, encode, prepare
from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..core.text import encodable
from ..core.threads import io_threads
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointReplacedError, DurabilityUnknownError
from ..files.codec import encode_metadata
from ..files.metadata import FileInfo, Metadata, SaveInfo
from ..files.names import metadata_name, temporary_name
from ..folder.checkpoint import Restarts, read_checkpoint
from ..folder.context import check_folders
from ..folder.hidden import HiddenFolder, is_seen
from ..reports import ExportReport, Stopwatch
from ..storage import Folders
from ..storage.base import FolderIdentity, Storage
from ..storage.local import give_name, rename
from .formats import FORMATS, Choose, ExportPlan, ExportRequest, plan_export
from .stream import write_files

__all__ = ["check_free", "check_same_export", "export_checkpoint"]

_logger = logging.getLogger("paddle_dist_ckpt")


class BeginRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``begin``: what a rank asks for, and which folder it sees, None if none, under which name."""

    export: ExportRequest
    folder: FolderIdentity | None
    location: str


class BeginAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``begin``: which checkpoint it is, the hidden folder, and what is made there, of which a file tells."""

    unique_id: int
    save_id: str
    hidden: str
    save: SaveInfo


class WrittenFiles(msgspec.Struct, frozen=True, array_like=True):
    """Round ``write``: the files that a rank has written."""

    files: list[FileInfo]


class DoneAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``write``: all of it has its name now."""


prepare([BeginRequest, BeginAnswer, WrittenFiles, DoneAnswer])


@with_room_for_frames
def export_checkpoint(
    session: ControlSession,
    source: Storage,
    request: ExportRequest,
    choose: Choose,
    progress: bool | None,
    folders: Folders,
    separate_folders: bool = False,
) -> ExportReport:
    """Write tensors of a checkpoint in another format, together with the session's other ranks.

    Args:
        session: The ranks. Each writes whole files, about equally many bytes.
        source: The checkpoint's folder.
        request: What to export.
        choose: Says what that is of the checkpoint, and of what it is made; on all ranks the same for one request.
        progress: Whether to show a bar on the coordinator; None if stderr is a terminal.
        folders: Opens local folders, and does what else is done to them.
        separate_folders: Whether ranks of one host may read from several folders.

    Raises:
        See :func:`paddle_dist_ckpt.export`.
    """
    watch = Stopwatch()
    coordinator = None
    if session.rank == session.coordinator:
        coordinator = _Coordinator(session, source, choose, folders, separate_folders)

    def begin() -> tuple[None, BeginRequest]:
        folder = None
        with suppress(FileNotFoundError, NotADirectoryError):  # of which the coordinator tells, or reading
            folder = source.identity()
        return None, BeginRequest(request, folder, encodable(source.location))

    try:
        with watch.phase("plan"):
            _, begun = ask(session, "begin", begin, BeginAnswer, only_on(coordinator, _Coordinator.begin))

        def write() -> tuple[ExportPlan, WrittenFiles]:
            try:
                plan = coordinator.plan if coordinator is not None else _plan(session, source, request, choose, begun)
                return plan, _write_share(session, source, plan, begun, progress, folders)
            except (CheckpointCorruptedError, FileNotFoundError) as error:
                _check_not_replaced(source, read_checkpoint(source, begun.unique_id), begun, error)
                raise

        with watch.phase("write"):
            plan, _ = ask(session, "write", write, DoneAnswer, only_on(coordinator, _Coordinator.finish))
    finally:
        if coordinator is not None:
            coordinator.clean_up()
    files = {file.name: file.nbytes for file in plan.files}
    if plan.draft is not None:
        files[metadata_name(plan.draft.unique_id)] = len(encode_metadata(plan.draft))
    return ExportReport(
        path=request.out,
        format=request.format,
        files=tuple(files),
        tensors=plan.tensors,
        total_bytes=sum(files.values()),
        left_out=tuple(plan.left_out),
        seconds=watch.seconds,
    )


class _Coordinator:
    """What the coordinator does: the hidden folder, from its beginning to its end.

    Attributes:
        plan: After round ``begin``.
    """

    plan: ExportPlan

    def __init__(
        self, session: ControlSession, source: Storage, choose: Choose, folders: Folders, separate_folders: bool
    ) -> None:
        self._session, self._source, self._choose, self._folders = session, source, choose, folders
        self._separate_folders = separate_folders
        self._hidden: HiddenFolder | None = None

    def begin(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``begin``: plan, which raises what the format cannot hold, and make the hidden folder."""
        requests = {rank: decode(data, BeginRequest) for rank, data in messages.items()}
        check_same_export({rank: one.export for rank, one in requests.items()}, self._session.coordinator)
        if not self._separate_folders:  # which alone tells one checkpoint of another format from another like it
            found = {rank: one.folder for rank, one in requests.items() if one.folder is not None}
            check_folders(found, {rank: one.location for rank, one in requests.items()})
        self._request = requests[self._session.coordinator].export
        out = Path(self._request.out)
        check_free(self._request, self._folders)
        metadata = self._plan()
        name = f".{out.name}.export-{self._save.save_id}"
        self._hidden = HiddenFolder(out, name, self._folders)
        self._hidden.make(self._source.location)
        answer = encode(BeginAnswer(metadata.unique_id, metadata.save_id, str(self._hidden.path), self._save))
        return dict.fromkeys(messages, answer)

    def _plan(self) -> Metadata:
        """Plan the export; returns what is exported."""
        restarts = Restarts(self._source)
        while True:
            metadata = read_checkpoint(self._source, self._request.unique_id)
            # PerRank values speak of the ranks that have saved.
            block_bytes = self._request.block_bytes
            self._save = SaveInfo.of_now(secrets.token_hex(8), metadata.world_size, block_bytes, None)
            try:
                ranks = len(self._session.ranks)
                self.plan = plan_export(self._source, metadata, self._request, self._choose, ranks, self._save)
                return metadata
            except (CheckpointCorruptedError, FileNotFoundError):
                if not restarts.due(metadata):
                    raise

    def finish(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``write``: all files are there; make that visible."""
        assert self._hidden is not None
        storage, out = self._folders(self._hidden.path), Path(self._request.out)
        self._hidden.check_held()
        for file in self.plan.files:
            if storage.size(file.name) != file.nbytes:
                raise CheckpointError(f"{self._hidden.path / file.name} has changed while it was written")
        if self.plan.draft is not None:
            written = {info.name: info for data in messages.values() for info in decode(data, WrittenFiles).files}
            files = [written[info.name] for info in self.plan.draft.files]
            data = encode_metadata(msgspec.structs.replace(self.plan.draft, files=files))
            temporary = temporary_name(self._save.unique_id, self._save.save_id)
            storage.publish(metadata_name(self._save.unique_id), data, temporary, replace=False)
        self._hidden.finish()
        storage.sync()
        try:
            # IMPORTANT: whoever sees it sees all of it, durable. Fails if somebody else has made it meanwhile.
            self._folders.run("publishing", out, lambda: self._publish(out), lambda _: _warn_of_late(out), final=True)
        except OSError:
            check_free(self._request, self._folders)  # which says it in words
            raise
        if not FORMATS[self._request.format].is_file:
            self._hidden = None
        try:
            self._folders(out.parent).sync()
        except OSError as error:
            raise DurabilityUnknownError(
                f"exported to {out}, its durability unknown: a crash of the machine might undo it, for it ended with: "
                f"{error}",
                str(out),
                self.plan.draft.unique_id if self.plan.draft is not None else 0,
            ) from error
        return dict.fromkeys(messages, encode(DoneAnswer()))

    def _publish(self, out: Path) -> None:
        assert self._hidden is not None
        hidden = self._hidden.path
        if not FORMATS[self._request.format].is_file:
            _be_as(out, hidden)
            rename(hidden, out)
        elif not give_name(hidden / self.plan.files[0].name, out):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))

    def clean_up(self) -> None:
        """Remove the hidden folder, if it still is one."""
        if self._hidden is not None:
            self._hidden.remove()


def _be_as(empty: Path, folder: Path) -> None:
    """Give a folder the mode, and if that may be the owner, of an empty one whose place it takes, if there is one.

    Where these are the same nothing is asked for: some filesystems have neither, and refuse to set them.
    """
    with suppress(FileNotFoundError):
        found, made = empty.stat(), folder.stat()
        if (found.st_uid, found.st_gid) != (made.st_uid, made.st_gid):
            with suppress(PermissionError):
                os.chown(folder, found.st_uid, found.st_gid)
                made = folder.stat()  # a change of the owner takes bits away
        if stat.S_IMODE(found.st_mode) != stat.S_IMODE(made.st_mode):
            os.chmod(folder, stat.S_IMODE(found.st_mode))


def _warn_of_late(out: Path) -> None:
    _logger.warning("%s is published after all, long after that was given up", out)


def check_same_export(requests: Mapping[int, object], coordinator: int) -> None:
    """All ranks must ask for the same.

    Args:
        requests: The :class:`ExportRequest` of each, encoded or not.
        coordinator: The rank with which the others are compared.

    Raises:
        ValueError: they do not.
    """
    for rank, theirs in requests.items():
        if theirs != requests[coordinator]:
            raise ValueError(f"rank {rank} and rank {coordinator} ask for different exports")


def check_free(request: ExportRequest, folders: Folders) -> None:
    """Refuse to replace anything but an empty folder, by a folder.

    Raises:
        ValueError: there is something.
    """
    folders.run("a look at", request.out, lambda: _check_free(request))


def _check_free(request: ExportRequest) -> None:
    out, is_file = Path(request.out), FORMATS[request.format].is_file
    if out.is_symlink() or (out.exists() and (is_file or not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} is there already; an export makes a new file or folder, or fills an empty folder")
    if out.is_mount():
        raise ValueError(f"{out} is the root of a filesystem, whose place an export cannot take; name a folder in it")


def _plan(
    session: ControlSession, source: Storage, request: ExportRequest, choose: Choose, begun: BeginAnswer
) -> ExportPlan:
    """Plan as the coordinator has done it."""
    metadata = read_checkpoint(source, begun.unique_id)
    _check_not_replaced(source, metadata, begun)
    return plan_export(source, metadata, request, choose, len(session.ranks), begun.save)


def _check_not_replaced(
    source: Storage, found: Metadata, begun: BeginAnswer, cause: BaseException | None = None
) -> None:
    """Refuse a checkpoint that is not the one that the coordinator has seen."""
    if found.save_id != begun.save_id:
        text = f"checkpoint {begun.unique_id} in {source.location} was replaced during its export"
        raise CheckpointReplacedError(text) from cause


def _write_share(
    session: ControlSession,
    source: Storage,
    plan: ExportPlan,
    begun: BeginAnswer,
    progress: bool | None,
    folders: Folders,
) -> WrittenFiles:
    """Write the files that are this rank's."""
    hidden = folders(Path(begun.hidden))
    if not is_seen(hidden):
        raise CheckpointError(
            f"rank {session.rank} does not see {begun.hidden}, which rank {session.coordinator} has made; all ranks of "
            "an export need one folder"
        )
    files = [plan.files[i] for i in plan.shares[session.ranks.index(session.rank)]]
    is_coordinator = session.rank == session.coordinator
    threads = io_threads(len(session.ranks), waits=True)
    with Progress("export", sum(file.nbytes for file in files), progress, is_coordinator) as bar:
        return WrittenFiles(write_files(source, plan.source, hidden, files, threads, session.check, bar))
