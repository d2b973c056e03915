"""An export, as each of its ranks runs it.

begin   the coordinator reads the checkpoint and plans, and makes a hidden folder beside the place that is meant
write   every rank writes its files into that; when all have, the coordinator gives it its name

Nothing is visible under that name before all of it is there and durable. What fails leaves nothing behind, but where
the coordinator itself is killed: a folder ``.NAME.export-...``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..control.rounds import ask, only_on
from ..core.dtypes import dtype_named
from ..core.messages import decode, encode, prepare
from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..core.shards import Kind
from ..core.threads import io_threads
from ..errors import CheckpointError, UnsupportedValueError
from ..files.metadata import Metadata
from ..folder.checkpoint import check_sizes, read_checkpoint
from ..folder.selection import Selection, select
from ..reports import ExportReport, Stopwatch
from ..storage import LocalStorage
from ..storage.base import Storage
from ..tree.paths import flat_keys
from .paddle_files import plan_paddle, plan_pdparams
from .plan import ExportFile, ExportTensor, divide_files
from .safetensors import plan_safetensors
from .stream import write_files

__all__ = ["FORMATS", "ExportRequest", "check_free", "export_checkpoint"]

_TOKEN = ".token"


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format to export to.

    Attributes:
        plan: Plans the files: of tensors, values (path and value), the most bytes of tensors in a file, and the name
            of what is made.
        holds_values: Whether it has a place for values.
        is_file: Whether what is made is one file, and not a folder.
    """

    plan: Callable[[Sequence[ExportTensor], Sequence[tuple[str, Any]], int, str], list[ExportFile]]
    holds_values: bool = False
    is_file: bool = False


FORMATS: Mapping[str, ExportFormat] = {
    "safetensors": ExportFormat(lambda tensors, values, most, name: plan_safetensors(tensors, most)),
    "paddle": ExportFormat(lambda tensors, values, most, name: plan_paddle(tensors, most)),
    "pdparams": ExportFormat(
        lambda tensors, values, most, name: plan_pdparams(tensors, values, name), holds_values=True, is_file=True
    ),
}


class ExportRequest(msgspec.Struct, frozen=True):
    """What is to be exported; the same on all ranks.

    Attributes:
        out: The folder that is to be made, or the file, as an absolute path.
        format: One of :data:`FORMATS`.
        unique_id: Which checkpoint; None for the newest.
        prefix: See :func:`paddle_dist_ckpt.export`, as for the others.
        keys: Flat keys, or patterns.
        dtype: The floating-point type to convert to, or None.
        max_shard_bytes: The most bytes of tensors in a file, if there are several.
    """

    out: str
    format: str
    unique_id: int | None
    prefix: str | None
    keys: list[str] | None
    dtype: str | None
    max_shard_bytes: int


class BeginAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``begin``: which checkpoint it is, and the hidden folder with what is in its token file."""

    unique_id: int
    save_id: str
    hidden: str
    token: str


class DoneAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``write``: all of it has its name now."""


prepare([ExportRequest, BeginAnswer, DoneAnswer])


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files, and the keys of the values that the format has no place for."""

    metadata: Metadata
    files: list[ExportFile]
    left_out: list[str]


def export_checkpoint(
    session: ControlSession, source: Storage, request: ExportRequest, progress: bool | None
) -> ExportReport:
    """Write tensors of a checkpoint in another format, together with the session's other ranks.

    Args:
        session: The ranks. Each writes whole files, about equally many bytes.
        source: The checkpoint's folder.
        request: What to export.
        progress: Whether to show a bar on the coordinator; None if stderr is a terminal.

    Raises:
        See :func:`paddle_dist_ckpt.export`.
    """
    watch = Stopwatch()
    coordinator = _Coordinator(session, source) if session.rank == session.coordinator else None
    try:
        with watch.phase("plan"):
            _, begun = ask(
                session, "begin", lambda: (None, request), BeginAnswer, only_on(coordinator, _Coordinator.begin)
            )

        def write() -> tuple[_Plan, DoneAnswer]:
            plan = _plan(source, request, begun)
            _write_share(session, source, plan, begun, progress)
            return plan, DoneAnswer()

        with watch.phase("write"):
            plan, _ = ask(session, "write", write, DoneAnswer, only_on(coordinator, _Coordinator.finish))
    finally:
        if coordinator is not None:
            coordinator.clean_up()
    return ExportReport(
        path=request.out,
        format=request.format,
        files=tuple(file.name for file in plan.files),
        tensors=sum(isinstance(part, ExportTensor) for file in plan.files for part in file.parts),
        total_bytes=sum(file.nbytes for file in plan.files),
        left_out=tuple(plan.left_out),
        seconds=watch.seconds,
    )


class _Coordinator:
    """What the coordinator does: the hidden folder, from its beginning to its end."""

    def __init__(self, session: ControlSession, source: Storage) -> None:
        self._session, self._source = session, source
        self._hidden: Path | None = None

    def begin(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``begin``: plan, which raises what the format cannot hold, and make the hidden folder."""
        ours = messages[self._session.coordinator]
        for rank, theirs in messages.items():
            if theirs != ours:
                raise ValueError(f"rank {rank} and rank {self._session.coordinator} ask for different exports")
        self._request = decode(ours, ExportRequest)
        out = Path(self._request.out)
        check_free(self._request)
        self._plan = _plan(self._source, self._request, None)
        out.parent.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        hidden = out.parent / f".{out.name}.export-{token}"
        hidden.mkdir()
        self._hidden = hidden
        (hidden / _TOKEN).write_text(token, encoding="ascii")
        metadata = self._plan.metadata
        answer = encode(BeginAnswer(metadata.unique_id, metadata.save_id, str(hidden), token))
        return dict.fromkeys(messages, answer)

    def finish(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Round ``write``: all files are there; make that visible."""
        assert self._hidden is not None
        storage = LocalStorage(self._hidden)
        for file in self._plan.files:
            if storage.size(file.name) != file.nbytes:
                raise CheckpointError(f"{self._hidden / file.name} has changed while it was written")
        storage.delete(_TOKEN)
        storage.sync()
        # IMPORTANT: whoever sees it sees all of it, durable. Fails if somebody else has made it meanwhile.
        if FORMATS[self._request.format].is_file:
            os.link(self._hidden / self._plan.files[0].name, self._request.out)
        else:
            os.rename(self._hidden, self._request.out)
            self._hidden = None
        LocalStorage(Path(self._request.out).parent).sync()
        return dict.fromkeys(messages, encode(DoneAnswer()))

    def clean_up(self) -> None:
        """Remove the hidden folder, if it still is one."""
        if self._hidden is not None:
            shutil.rmtree(self._hidden, ignore_errors=True)


def check_free(request: ExportRequest) -> None:
    """Refuse to replace anything but an empty folder, by a folder.

    Raises:
        ValueError: there is something.
    """
    out, is_file = Path(request.out), FORMATS[request.format].is_file
    if out.is_symlink() or (out.exists() and (is_file or not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} is there already; an export makes a new file or folder, or fills an empty folder")


def _plan(source: Storage, request: ExportRequest, expected: BeginAnswer | None) -> _Plan:
    """Read the checkpoint and plan; on every rank alike.

    Raises:
        CheckpointError: it is not the checkpoint that the coordinator has seen.
    """
    metadata = read_checkpoint(source, request.unique_id if expected is None else expected.unique_id)
    if expected is not None and metadata.save_id != expected.save_id:
        raise CheckpointError(f"checkpoint {metadata.unique_id} in {source.location} was replaced during its export")
    paths = select(metadata, Selection(request.prefix, request.keys))
    keys = dict(zip(paths, flat_keys(list(paths.values())), strict=True))
    target, table = FORMATS[request.format], metadata.table
    wanted = dtype_named(request.dtype) if request.dtype is not None else None
    tensors, values = [], []
    for path, key in keys.items():
        row = table.index.get(path)
        if row is None or table.kinds[row] == Kind.VALUE:
            values.append(path)
            continue
        stored = table.dtypes[row]
        dtype = wanted if wanted is not None and stored.category == "float" else stored
        shape, is_array = table.layouts[table.layout_of[row]].shape, table.kinds[row] == Kind.ARRAY
        tensors.append(ExportTensor(row, paths[path], key, shape, stored, dtype, table.names[row], bool(is_array)))
    left_out = [] if target.holds_values else [keys[path] for path in values]
    named = [key for key in left_out if request.keys is not None and key in request.keys]
    if named:
        raise UnsupportedValueError(f"{', '.join(named[:5])}: no tensor, so the format has no place for it")
    held = [(paths[path], _value_of(metadata, path)) for path in values] if target.holds_values else []
    files = target.plan(tensors, held, request.max_shard_bytes, Path(request.out).name)
    used = {part.row for file in files for part in file.parts if isinstance(part, ExportTensor)}
    check_sizes(source, metadata, sorted(set(table.select(sorted(used))[0].shard_file.tolist())))
    return _Plan(metadata, files, left_out)


def _value_of(metadata: Metadata, path: str) -> Any:
    key = metadata.key(path)
    if key not in metadata.values:
        raise UnsupportedValueError(f"{key}: a value of more than 4 KiB cannot be exported")
    return metadata.values[key]


def _write_share(
    session: ControlSession, source: Storage, plan: _Plan, begun: BeginAnswer, progress: bool | None
) -> None:
    """Write the files that are this rank's."""
    seen = ""
    with suppress(OSError):
        seen = (Path(begun.hidden) / _TOKEN).read_text(encoding="ascii")
    if seen != begun.token:
        raise CheckpointError(
            f"rank {session.rank} does not see {begun.hidden}, which rank {session.coordinator} has made; all ranks of "
            "an export need one folder"
        )
    mine = divide_files([file.nbytes for file in plan.files], len(session.ranks))
    files = [plan.files[i] for i in mine[session.ranks.index(session.rank)]]
    is_coordinator = session.rank == session.coordinator
    with Progress("export", sum(file.nbytes for file in files), progress, is_coordinator) as bar:
        threads = io_threads(len(session.ranks), waits=True)
        write_files(source, plan.metadata, LocalStorage(begun.hidden), files, threads, session.check, bar)
