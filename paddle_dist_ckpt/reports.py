"""What save, load, verify and export report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = [
    "ExportReport",
    "LoadReport",
    "SaveReport",
    "Stopwatch",
    "VerifyReport",
    "loaded_line",
    "saved_line",
]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. Equal on all ranks but for what says "this rank".

    Attributes:
        path: The folder.
        unique_id: The id under which the checkpoint was committed.
        total_bytes: Bytes of tensor data that all ranks wrote together.
        bytes_written: Bytes of tensor data that this rank wrote.
        files: How many data files the checkpoint has.
        seconds: Seconds per phase on this rank: ``plan``, ``write``, and ``commit`` if ranks see several folders
            (otherwise the commit is part of ``write``). A background save also has ``snapshot``: reducing partial
            tensors, copying, and writing what the snapshot had no room for; ``plan`` and ``snapshot`` passed in the
            call, ``write`` and ``commit`` after it.
        warnings: A sentence for each replica that differs between ranks, with its key and those ranks.
    """

    path: str
    unique_id: int
    total_bytes: int
    bytes_written: int
    files: int
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: The folder.
        unique_id: The id of the checkpoint that was loaded.
        bytes_read: Bytes that this rank read from data files, headers left out.
        bytes_received: Bytes that other ranks read for this one.
        files_opened: How many data files this rank opened.
        skipped: With ``strict=False``, ``allow_missing`` or ``per_rank="by_rank"``, a line for every target that was
            not loaded, and why, and of a master weight if it was set to its parameter instead; with ``resize``, which
            part of a tensor was left as it is or left out.
        unused_keys: Flat keys that the checkpoint has and no rank asked for.
        seconds: Seconds per phase on this rank: ``plan``, ``read``, and ``open`` if ranks read for each other.
        skipped_keys: The flat keys that ``skipped`` is about, each once.
    """

    path: str
    unique_id: int
    bytes_read: int
    bytes_received: int
    files_opened: int
    skipped: tuple[str, ...] = ()
    unused_keys: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    skipped_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        path: The folder.
        unique_id: The id of the checkpoint.
        ok: Whether every byte is as it was written.
        problems: A line for everything that is not.
        files: How many data files were checked.
        total_bytes: Their bytes together.
        verified_bytes: Bytes of tensors that were compared with checksums: all of them, or in a checkpoint of another
            format those for which it has checksums. For the rest, file sizes and tensor layouts were checked.
    """

    path: str
    unique_id: int
    ok: bool
    problems: tuple[str, ...]
    files: int
    total_bytes: int
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did. Equal on all ranks but for ``seconds``.

    Attributes:
        path: What was made.
        format: In which format.
        files: Names of its files.
        tensors: How many tensors they hold.
        total_bytes: Bytes of all files.
        left_out: Flat keys of values that the format has no place for, of what cannot be read, and of what recipes or
            statements do not make.
        seconds: Seconds per phase on this rank: ``plan`` and ``write``.
    """

    path: str
    format: str
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    left_out: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


def saved_line(report: SaveReport) -> str:
    """A save as the log has it."""
    files = f"{report.files} file{'s' if report.files != 1 else ''}"
    took = f"{_size(report.total_bytes)} in {files}, {sum(report.seconds.values()):.2f} s"
    return f"saved id {report.unique_id} to {report.path}: {took}"


def loaded_line(report: LoadReport) -> str:
    """A load as the log has it: what this rank has got."""
    took = f"{_size(report.bytes_read + report.bytes_received)}, {sum(report.seconds.values()):.2f} s"
    counts = {"not loaded": len(report.skipped), "not asked for": len(report.unused_keys)}
    more = "".join(f"; {count} {what}" for what, count in counts.items() if count)
    return f"loaded id {report.unique_id} from {report.path}: {took}{more}"


def _size(nbytes: int) -> str:
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


@dataclass(slots=True)
class Stopwatch:
    """How long the phases of a save or load take, for its report.

    Attributes:
        seconds: By phase; one that comes again adds up, and one that fails does not count.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase, or a part of one."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
