"""Copies a committed checkpoint to another folder, and verifies it on the way."""

from __future__ import annotations

from contextlib import closing, suppress

import xxhash

from ..core.frames import with_room_for_frames
from ..core.progress import Progress
from ..core.threads import io_threads
from ..errors import CheckpointCorruptedError, CheckpointError
from ..files.copying import copy_entries
from ..files.header import header_pieces
from ..files.holes import HoleBudget
from ..files.metadata import Metadata
from ..files.names import metadata_name
from ..files.pieces import FileEntries
from ..files.runs import open_data_file
from ..storage.base import Storage, WritableFile
from ..storage.capabilities import extended
from .checkpoint import Restarts, check_sizes, read_with_text
from .claims import EXPIRY, claimed_saves
from .commit import aftermath, finish, has_files_of, in_folder, publish_under, remove_saves, seal, warn_of_others
from .delete import check_native
from .ids import committed_saves
from .lease import Lease
from .verify import damaged_values

__all__ = ["copy"]


@with_room_for_frames
def copy(source: Storage, out: Storage, unique_id: int | None, progress: bool | None) -> Metadata:
    """See :func:`paddle_dist_ckpt.copy_checkpoint`."""
    restarts = Restarts(source)
    while True:
        metadata, data = read_with_text(source, unique_id)
        check_native(metadata, source.location)
        try:
            _Copy(source, out, metadata).make(data, progress)
            return metadata
        except (CheckpointCorruptedError, OSError):
            if not restarts.due(metadata):
                raise


class _Copy:
    """A copy that is being made, and what is to be undone if it fails."""

    def __init__(self, source: Storage, out: Storage, metadata: Metadata) -> None:
        self._source, self._out, self._metadata = source, out, metadata
        self._made: list[str] = []  # names of files
        self._unseen: list[str] = []  # of these, what somebody who takes this copy for dead may not find

    def make(self, data: bytes, progress: bool | None) -> None:
        """Make it; ``data`` is the `.metadata`."""
        out, metadata = self._out, self._metadata
        check_sizes(self._source, metadata, range(len(metadata.files)))
        damaged = damaged_values(metadata)
        if damaged:
            raise CheckpointCorruptedError(f"{self._source.location}/{metadata_name(metadata.unique_id)}: {damaged[0]}")
        begun: list[Lease] = []  # an interrupt may come when the lease is there
        try:
            lease = in_folder(out, lambda: Lease(out, metadata.unique_id, automatic=True, made=begun))
            try:
                self._copy_files(lease, progress)
                self._commit(lease, data)
            except FileNotFoundError:  # somebody has taken this copy for dead, and removed the folder
                lease.check_held()
                raise
        except BaseException:
            for lease in begun:
                lease.stop()
                with suppress(Exception):  # a later save does what is left to do
                    self._undo(lease)
                    lease.withdraw(*self._settled(lease))
            raise
        try:
            finish(lease, aftermath(lease, metadata.unique_id, metadata.save_id))
        except BaseException:  # an interrupt
            lease.leave([])
            raise

    def _copy_files(self, lease: Lease, progress: bool | None) -> None:
        out, metadata = self._out, self._metadata
        remove_saves(out, lease.doomed, lease.check_held)
        lease.doomed.clear()
        self._check_free()
        self._check_unclaimed(lease)
        lease.take_on(metadata.save_id)  # who finds the claim after a crash removes what was copied by then
        budget = HoleBudget()
        with Progress("copy", sum(info.size for info in metadata.files), progress, True) as bar:
            for file, info in enumerate(metadata.files):
                lease.check_held()
                self._made.append(info.name)  # before it is there: what fails may have made it
                self._unseen.append(info.name)
                with closing(self._create(info.name)) as target:
                    lease.check_held()  # who takes it removes the claim first, and what is there then
                    self._unseen.clear()
                    _copy_file(self._source, metadata, file, target, bar, budget)
                    target.sync()
        seal(out, metadata.files)

    def _create(self, name: str) -> WritableFile:
        try:
            return self._out.create(name)
        except FileExistsError:
            self._made.remove(name)  # it is somebody else's
            raise CheckpointError(
                f"{self._out.location}/{name} is being put there by somebody else; {EXPIRY}"
            ) from None

    def _commit(self, lease: Lease, data: bytes) -> None:
        """Publish the `.metadata`, if that of no other has its name."""
        out, metadata = self._out, self._metadata

        def confirm() -> None:
            lease.confirm()
            # IMPORTANT: in this order. Who had its claim until just now has removed by then what it has removed.
            self._check_unclaimed(lease)
            try:
                check_sizes(out, metadata, range(len(metadata.files)))
            except CheckpointCorruptedError:
                lease.check_held()
                raise

        if not publish_under(lease, metadata.unique_id, data, False, confirm):
            raise CheckpointError(f"{out.location}/{metadata_name(metadata.unique_id)} appeared meanwhile")

    def _undo(self, lease: Lease) -> None:
        """Remove what was copied, unless it turns out to be committed, or to be somebody else's.

        Who has taken this copy for dead has removed its claim and files. What has their names now may be another's.
        """
        out, save = self._out, self._metadata.save_id
        if not lease.is_held() and save in claimed_saves(out):
            if not set(out.names()).isdisjoint({*self._made}.intersection(self._unseen)):
                lease.speak_again([save])
        elif save not in committed_saves(out):
            for name in self._made:
                out.delete(name)

    def _settled(self, lease: Lease) -> list[str]:
        """The save that is copied, if nothing of it is left to remove; or what is there is committed, or another's."""
        out, save = self._out, self._metadata.save_id
        if not has_files_of(out, [save]) or save in lease.others.answered_for():
            return [save]
        return [save] if save in committed_saves(out) else []

    def _check_free(self) -> None:
        """Refuse to write over anything, or to begin what there is no room for."""
        out, metadata = self._out, self._metadata
        names, saves = set(out.names()), committed_saves(out)
        if metadata_name(metadata.unique_id) in names:
            raise ValueError(f"{out.location} has a checkpoint with unique_id {metadata.unique_id} already")
        if metadata.save_id in saves:
            raise ValueError(f"{out.location} has this checkpoint already, with unique_id {saves[metadata.save_id]}")
        taken = [info.name for info in metadata.files if info.name in names]
        if taken:
            claim = claimed_saves(out).get(metadata.save_id)
            raise ValueError(
                f"{out.location} has files of this checkpoint already, but no .metadata: {taken[0]}"
                + (f"; the claim {claim} speaks of them: {EXPIRY}" if claim is not None else "")
            )
        warn_of_others(out, names, metadata.unique_id)
        needed, free = sum(info.size for info in metadata.files), out.free_bytes()
        if free is not None and free < needed:
            raise CheckpointError(f"{out.location} has room for {free:,} bytes; {needed:,} are to be copied")

    def _check_unclaimed(self, lease: Lease) -> None:
        """Refuse to make what somebody else is about to remove: a copy has the save's own id, and the same files."""
        claim = lease.others.speaking_of(self._metadata.save_id)
        if claim is not None:
            raise CheckpointError(
                f"files of this checkpoint are being removed from {self._out.location}, or put there, as {claim} says; "
                f"{EXPIRY}"
            )


def _copy_file(
    source: Storage, metadata: Metadata, file: int, target: WritableFile, progress: Progress, budget: HoleBudget
) -> None:
    """Copy one data file, but for its holes, if that can be. Nothing of a block is written before it is verified.

    The header is written in pieces, as it may be nearly all of the file, and is verified when the last one is.
    """
    info = metadata.files[file]
    known = open_data_file(source, info, int(metadata.blocks[1][file]), budget)
    with closing(known.file):
        keeps_holes = not known.holes.none and extended(target, info.size)
        digest, at = xxhash.xxh3_64(), 0
        try:
            for piece, _ in header_pieces(known.file, digest):
                target.write(piece, at)
                progress(len(piece))
                at += len(piece)
            if digest.hexdigest() != info.digest:
                raise CheckpointCorruptedError("its header is another one")
        except CheckpointCorruptedError as error:
            raise CheckpointCorruptedError(f"{info.name} has changed while it was copied: {error}") from error
        threads = io_threads(1, waits=True)
        for entries in FileEntries.of(metadata, file, known):
            copy_entries(entries, target, keeps_holes, threads, progress)
