"""The files that one rank makes in a save: by its part of the plan, copied for a save in the background, written."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import numpy as np

from ..core.log import warn_only
from ..core.messages import decode, encode
from ..core.progress import Progress
from ..core.threads import io_threads, run_all
from ..errors import CheckpointError, CheckpointTimeoutError
from ..files.contents import AHEAD, TensorContents
from ..files.metadata import FileInfo
from ..files.names import DEFAULT_SUFFIX, claim_name, data_file_name
from ..files.writer import FileSave, bytes_ahead
from ..folder.own_claim import lost_claim
from ..options import SaveOptions
from ..reports import Stopwatch
from .copies import CopyPlan
from .describe import LocalState
from .file_plan import plan_files
from .messages import PlanAnswer, RankPlan, WriteRequest
from .reduce import awaited, reduce_partials
from .save_memory import KnownPlan, SaveContext

__all__ = ["RankFiles"]

_logger = logging.getLogger("paddle_dist_ckpt")
_PAGE = 4096


class RankFiles:
    """One rank's files in one save; a context manager, which removes them unless this rank has reported them.

    If they are written ``in_background``, the caller may change its tensors by then. ``seconds`` is how long each phase
    of the save has taken; it is looked at when they have been written.
    """

    def __init__(
        self,
        context: SaveContext,
        options: SaveOptions,
        order: PlanAnswer,
        in_background: bool,
        seconds: Mapping[str, float],
    ) -> None:
        self._context, self._options, self._order = context, options, order
        self._in_background, self._seconds = in_background, seconds
        self._threads = io_threads(order.ranks_on_host, waits=True)
        self._files: Sequence[FileSave] = ()
        self._digests = b""
        self._beside: list[Callable[[], None]] = []  # to be done while the files are written
        self._failure: Exception | None = None
        self._reported = False

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(self, *_: object) -> None:
        # IMPORTANT: once this rank has reported its files they may be committed at any moment, known to it or not.
        if not self._reported:
            self._remove()

    @property
    def nbytes(self) -> int:
        """How many bytes of data are in them."""
        return sum(file.table.nbytes for file in self._files)

    def prepare(self, state: LocalState) -> None:
        """Do what has to be done before the caller may change its tensors, but for writing them.

        If not in the background, the state must stay alive until they are written. An error is kept for round
        ``write``, but for what others have to hear of at once.
        """
        try:
            self._files = self._make(state)
            if self._in_background:
                self._take_snapshot(state)
            if self._order.compared is not None:
                hash_copies = functools.partial(self._hash_copies, state, self._order.compared)
                if self._in_background:  # copies are not among what is snapshotted
                    hash_copies()
                else:
                    self._beside.append(hash_copies)
        except Exception as error:
            self._failure = error

    def _make(self, state: LocalState) -> list[FileSave]:
        """The files of the plan, of which nothing is written yet. Reduces partial tensors."""
        order, session, memory = self._order, self._context.session, self._context.memory
        plan = decode(order.plan, RankPlan) if order.plan is not None else None
        transfers = (plan or memory.plan).transfers
        with awaited(session, "collectives", transfers, self._raise):
            if plan is not None:
                parts = plan_files(state, plan, self._options.block_bytes)
                size = self._options.block_bytes
                twice = CopyPlan.of(state, plan, parts, size)
                memory.keep_plan(
                    KnownPlan(order.plan_id, memory.plan.fingerprint, size, plan.total_bytes, transfers, parts, twice)
                )
            boxes = [pair for part in memory.plan.files for pair in part.partial_boxes(state)]
        with awaited(session, "write", transfers, self._raise):
            reduced = reduce_partials(session, self._context.transport, transfers, state, boxes)
        ahead, copies = (AHEAD, state.copies) if state.devices is not None else (0, None)
        buffers = memory.window_buffers(self._threads + ahead, state.host_memory)
        files = []
        for part in memory.plan.files:
            suffix = self._options.data_suffix or DEFAULT_SUFFIX
            name = data_file_name(session.rank, order.save.unique_id, order.save.save_id, part.number, suffix)
            info = part.info(state, order.save, session, self._context.adapter.version, self._options)
            contents = TensorContents(part.table, part.items.sources(state, reduced), buffers, copies)
            files.append(FileSave(self._context.storage, name, part.table, info, contents))
        return files

    def _hash_copies(self, state: LocalState, compared: int) -> None:
        """Hash this rank's copies of what others write. One thread does, for writing waits for the disk meanwhile."""
        context = self._context
        self._digests = context.memory.plan.copies.of_copies(state, compared, context.session.check)

    def _take_snapshot(self, state: LocalState) -> None:
        """Copy what will be written; write at once what the snapshot has no room for."""
        surplus = max(0, self.nbytes - self._snapshot_room())
        kept = []
        for file in self._files:
            ahead = bytes_ahead(file.table.nbytes, surplus)
            if ahead:
                file.write_ahead(ahead, self._threads, self._context.session.check)
            surplus = max(0, surplus - ahead)
            kept.append(file.table.nbytes - ahead)
        *starts, size = itertools.accumulate((-(-nbytes // _PAGE) * _PAGE for nbytes in kept), initial=0)
        buffer = self._context.memory.snapshot_buffer(size, state.host_memory)
        for file, start, nbytes in zip(self._files, starts, kept, strict=True):
            file.take_snapshot(buffer[start : start + nbytes])

    def _snapshot_room(self) -> int:
        """The most bytes that the snapshot may take: what the options say; or else what the host can give.

        It would not refuse more, but kill one of its processes as that is touched.
        """
        bound, nbytes, ranks = self._options.snapshot_bytes, self.nbytes, self._order.ranks_on_host
        if bound is not None:
            return bound
        room = self._context.memory.snapshot_room(nbytes, ranks)
        if room < nbytes and self._context.memory.is_news_of_room(1 - room / nbytes):
            _logger.warning(
                "%s: of %s bytes that are saved in the background, %s are written before the call returns: a copy of "
                "them has no room in the memory that is free for the ranks of this host (%d)",
                self._context.storage.location,
                f"{nbytes:,}",
                f"{nbytes - room:,}",
                ranks,
            )
        return room

    def write(self) -> bytes:
        """In round ``write``: write the files, and report them; an empty message says that this rank has failed."""
        try:
            if self._failure is not None:
                raise self._failure
            message = encode(self._write())
            self._context.session.check()  # if the save has failed meanwhile, nobody else knows of these files
        except CheckpointTimeoutError:
            raise  # at once, for nobody has to wait until the others have written all of theirs
        except Exception as error:
            self._failure = error  # raised in round "abort", when every rank has stopped writing
            return b""
        self._reported = True
        return message

    def _write(self) -> WriteRequest:
        context, watch = self._context, Stopwatch(dict(self._seconds))
        shown = False if self._options.progress is None and self._in_background else self._options.progress
        # In the background one thread will do, and no more can be started when the interpreter is about to end.
        threads = 1 if self._in_background else self._threads
        total = context.memory.plan.total_bytes
        with watch.phase("write"), Progress("save", total, shown, context.is_coordinator, True) as progress:
            infos: list[FileInfo] = []
            check = context.session.check

            def write_files() -> None:
                infos.extend([file.finish(threads, check, progress) for file in self._files])

            run_all([write_files, *self._beside], 1 + len(self._beside), check)
        copied = b""
        if self._order.compared is not None:
            blocks = np.concatenate([np.zeros(0, np.uint64), *(file.block_digests for file in self._files)])
            copied = context.memory.plan.copies.of_written(blocks, self._order.compared)
        entries = [len(file.table.names) for file in self._files]
        return WriteRequest(infos, entries, self.nbytes, watch.seconds, copied, self._digests)

    def give_up(self) -> bytes:
        """In round ``abort``: remove the files; raise what has made this rank fail, if it is the one."""
        self._remove()
        if self._failure is not None:
            self._raise(self._failure)
        return b""

    def _raise(self, error: Exception) -> NoReturn:
        """Raise what has made this rank fail. What Paddle raises of a device has no error number, and says nothing of
        the folder, so that is added. A file that is gone may say less than that the claim is."""
        storage, save = self._context.storage, self._order.save
        location, claim = storage.location, claim_name(save.unique_id, save.save_id)
        if isinstance(error, FileNotFoundError) and self._context.is_coordinator:
            with suppress(OSError, CheckpointTimeoutError):
                storage.identity()  # the folder is there
                if claim not in storage.names():
                    raise lost_claim(storage, claim) from error
        of_paddle = isinstance(error, (OSError, RuntimeError)) and getattr(error, "errno", None) is None
        if of_paddle and location not in str(error):
            raise CheckpointError(f"nothing was saved to {location}: {type(error).__name__}: {error}") from error
        raise error

    def _remove(self) -> None:
        storage = self._context.storage
        for file in self._files:
            # What made the save fail is what the caller has to hear of, and not what happens here.
            with suppress(OSError, CheckpointTimeoutError):
                file.close()
            try:
                storage.delete(file.name)
            except (OSError, CheckpointTimeoutError) as error:
                warn_only("%s/%s is left to a later save: %s", storage.location, file.name, error)
