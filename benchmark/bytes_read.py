"""Counts the bytes that are read for parts of a tensor which are not how it was saved.

    python -m benchmark.bytes_read [--smoke]

Eight ranks, simulated as threads, save a [4096, 8192] float32 tensor in rows, and load parts of it. Prints a table and
writes it and the counts to benchmark/results/. Takes a few seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from benchmark.command import main
from benchmark.report import goal, goals_section, heading, megabytes, table
from benchmark.session import Session
from paddle_dist_ckpt import LoadOptions, LoadReport, SaveOptions
from paddle_dist_ckpt.testing import Box, ShardedArray, SimulatedRank, run_ranks, shard_array

T = TypeVar("T")

_RANKS = 8
_SHAPE, _SMOKE_SHAPE = (4096, 8192), (512, 1024)
_SHIFT = 37  # rows: then no part starts or ends where a block does
_BLOCK_BYTES = SaveOptions().block_bytes


@dataclass(frozen=True, slots=True)
class _Case:
    """What is loaded.

    Attributes:
        name: What the table calls it.
        boxes: The part that each rank wants; None if it wants nothing.
        exchange: See :class:`LoadOptions`.
        runs: How many stretches of a file hold what all ranks want, or None where the goal is that everything is read
            once.
    """

    name: str
    boxes: Sequence[Box | None]
    exchange: Literal["auto", "always", "never"]
    runs: int | None


def _rows(shape: tuple[int, int], rank: int, shift: int) -> Box:
    rows = shape[0] // _RANKS
    start = rank * rows + shift
    return Box((start, 0), (min(rows, shape[0] - start), shape[1]))


def _columns(shape: tuple[int, int], rank: int) -> Box:
    columns = shape[1] // _RANKS
    return Box((0, rank * columns), (shape[0], columns))


def _only(box: Box) -> list[Box | None]:
    """One rank in the middle wants something, the others nothing."""
    return [box if rank == _RANKS // 2 else None for rank in range(_RANKS)]


def _cases(shape: tuple[int, int]) -> list[_Case]:
    ranks, middle = range(_RANKS), _RANKS // 2
    shifted, columns = [_rows(shape, i, _SHIFT) for i in ranks], [_columns(shape, i) for i in ranks]
    return [
        _Case("1/8 of the rows on one rank, as saved", _only(_rows(shape, middle, 0)), "auto", 1),
        _Case("1/8 of the rows on one rank, 37 rows on", _only(shifted[middle]), "auto", 2),
        # The last rank's shifted rows end with the tensor, and so lie in one file; the others' lie in two.
        _Case("1/8 of the rows on each rank, 37 rows on", shifted, "auto", 2 * _RANKS - 1),
        _Case('1/8 of the columns on each rank, exchange="always"', columns, "always", None),
        _Case("1/8 of the columns on one rank", _only(columns[middle]), "auto", None),
    ]


def measure(session: Session) -> dict[str, Any]:
    """Save once and load all cases; every value is compared.

    Returns:
        ``bytes_read``: for each case its name, the bytes needed, read and received, all ranks together, the most that
        the goal allows, and whether that is kept; ``shape`` of the tensor; ``goals``.

    Raises:
        ValueError: something came back different.
    """
    shape = _SMOKE_SHAPE if session.smoke else _SHAPE
    array = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    with tempfile.TemporaryDirectory(prefix="bytes-read-") as folder:
        _on_ranks(lambda rank: rank.save({"w": shard_array(array, [_rows(shape, rank.rank, 0)])}, folder))
        cases = [_load(case, array, folder) for case in _cases(shape)]
    goals = [
        goal(f"bytes read: {case['case']}", f"at most {megabytes(case['most'])}", megabytes(case["read"]), case["met"])
        for case in cases
    ]
    return {"shape": shape, "bytes_read": cases, "goals": goals}


def _load(case: _Case, array: np.ndarray[Any, Any], folder: str) -> dict[str, Any]:
    def work(rank: SimulatedRank) -> LoadReport:
        box = case.boxes[rank.rank]
        target = shard_array(array, [] if box is None else [box], fill=False)
        report = rank.load({} if box is None else {"w": target}, folder, options=LoadOptions(exchange=case.exchange))
        _check(target, array, case.name)
        return report

    reports = _on_ranks(work)
    needed = sum(box.size * array.itemsize for box in case.boxes if box is not None)
    most = array.nbytes if case.runs is None else needed + 2 * _BLOCK_BYTES * case.runs
    read = sum(report.bytes_read for report in reports)
    return {
        "case": case.name,
        "needed": needed,
        "read": read,
        "received": sum(report.bytes_received for report in reports),
        "most": most,
        "met": read <= most,
    }


def _check(target: ShardedArray, array: np.ndarray[Any, Any], name: str) -> None:
    for box, piece in zip(target.boxes, target.pieces, strict=True):
        if not np.array_equal(piece, array[box.slices]):
            raise ValueError(f"{name}: came back different")


def _on_ranks(work: Callable[[SimulatedRank], T]) -> list[T]:
    """What each rank returned; the first exception is raised."""
    results: list[T] = []
    for result in run_ranks(_RANKS, work):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    rows = [
        [case["case"], *(megabytes(case[kind]) for kind in ("needed", "read", "received"))]
        for case in found["bytes_read"]
    ]
    shape = " x ".join(f"{extent:,}" for extent in found["shape"])
    lines = [
        *heading("Bytes read for slices", found),
        f"A float32 tensor of {shape} ({megabytes(np.prod(found['shape']) * 4)}) saved in rows by {_RANKS} ranks, in "
        f"blocks of {_BLOCK_BYTES / 2**20:g} MiB. All ranks together; headers and metadata are not counted.",
        "",
        *table(["what is loaded", "needed", "read from files", "sent between ranks"], rows),
        "",
        *goals_section(found["goals"]),
        "The goal allows two blocks more than is needed for every run (a stretch of a file that is wanted), and for "
        "columns, of which every block has a part, the whole of the files once.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main("bytes_read", measure, as_markdown))
