"""Compares all blocks of entries of a data file with their checksums, in buffers of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ..core.buffers import Buffers
from ..core.threads import run_all
from ..errors import CheckpointCorruptedError
from .pieces import FileEntries, Pieces
from .runs import CHUNK_BYTES, Segments

__all__ = ["check_entries"]


def check_entries(entries: FileEntries, threads: int, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with entries of a file, a line for each that is damaged; ``progress`` is told how much was read."""
    pieces = Pieces.of(entries)
    checks = _Checks(*pieces.columns())
    progress(pieces.zeros)
    run_all(checks.tasks(Buffers(threads), progress), threads, lambda: None)
    first: dict[int, str] = {}
    for segment, problem in sorted(checks.problems):
        first.setdefault(int(pieces.entry[segment]), problem)
    return list(first.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Checks(Segments):
    """Pieces of which nothing is wanted."""

    problems: list[tuple[int, str]] = field(default_factory=list)

    def _read(self, first: int, last: int, buffers: Buffers, progress: Callable[[int], None]) -> None:
        start = int(self.starts[first])
        stop = start + self._span(first, last)
        try:
            if not self._are_zeros(first, last):
                with buffers.borrow(min(stop - start, CHUNK_BYTES)) as buffer:
                    found = self._digests(first, last, buffer)
                self.problems.extend(self._wrong(first, last, found))
        except CheckpointCorruptedError as error:  # the file ends there
            self.problems.append((first, str(error)))
        except OSError as error:
            self.problems.extend((segment, str(error)) for segment in range(first, last))
        progress(stop - start)

    def _digests(self, first: int, last: int, buffer: np.ndarray) -> list[int]:
        start = int(self.starts[first])
        stop = start + self._span(first, last)
        if stop - start <= CHUNK_BYTES:
            self._read_into(first, [buffer])
            low, high, _ = self._blocks(first, last)
            spans = zip((low - start).tolist(), (high - start).tolist(), strict=True)
            return [xxhash.xxh3_64_intdigest(buffer.data[a:b]) for a, b in spans]
        digest = xxhash.xxh3_64()
        with self._ends_early(first):
            for at in range(start, stop, CHUNK_BYTES):
                piece = buffer[: stop - at]
                self.file.file.read_into([piece], self.file.data_start + at, self.file.once)
                digest.update(piece.data)
        return [digest.intdigest()]
