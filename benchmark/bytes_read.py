"""Counts the bytes that are read for parts of a tensor which are not how it was saved.

    python -m benchmark.bytes_read [--out DIR]

Eight ranks, simulated as threads, save a [4096, 8192] float32 tensor in rows, and load parts of it. Prints a table and
writes it and the counts to bytes_read.md and bytes_read.json. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from benchmark.run import HERE
from paddle_dist_ckpt import LoadOptions, LoadReport, SaveOptions
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.testing import ShardedArray, shard_array
from paddle_dist_ckpt.testing.simulation import SimulatedRank, run_ranks

__all__ = ["as_markdown", "measure"]

T = TypeVar("T")

_RANKS = 8
_SHAPE = (4096, 8192)
_ROWS, _COLUMNS = (extent // _RANKS for extent in _SHAPE)
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


def _rows(rank: int, shift: int) -> Box:
    start = rank * _ROWS + shift
    return Box((start, 0), (min(_ROWS, _SHAPE[0] - start), _SHAPE[1]))


def _columns(rank: int) -> Box:
    return Box((0, rank * _COLUMNS), (_SHAPE[0], _COLUMNS))


def _only(box: Box) -> list[Box | None]:
    """One rank in the middle wants something, the others nothing."""
    return [box if rank == _RANKS // 2 else None for rank in range(_RANKS)]


_ALL = range(_RANKS)
_CASES = (
    _Case("1/8 of the rows on one rank, as saved", _only(_rows(4, 0)), "auto", 1),
    _Case("1/8 of the rows on one rank, 37 rows on", _only(_rows(4, _SHIFT)), "auto", 2),
    _Case("1/8 of the rows on each rank, 37 rows on", [_rows(i, _SHIFT) for i in _ALL], "auto", 2 * _RANKS - 1),
    _Case('1/8 of the columns on each rank, exchange="always"', [_columns(i) for i in _ALL], "always", None),
    _Case("1/8 of the columns on one rank", _only(_columns(4)), "auto", None),
)
"""The last rank's shifted rows end with the tensor, and so lie in one file; the others' lie in two."""


def measure() -> list[dict[str, Any]]:
    """Save once and load all cases; every value is compared.

    Returns:
        For each case its name, the bytes needed, read and received, all ranks together, the most that the goal allows,
        and whether that is kept.

    Raises:
        ValueError: something came back different.
    """
    array = np.arange(_SHAPE[0] * _SHAPE[1], dtype=np.float32).reshape(_SHAPE)
    with tempfile.TemporaryDirectory(prefix="bytes-read-") as folder:
        _on_ranks(lambda rank: rank.save({"w": shard_array(array, [_rows(rank.rank, 0)])}, folder))
        return [_load(case, array, folder) for case in _CASES]


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


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report."""
    head = ["what is loaded", "needed", "read from files", "sent between ranks", "goal: at most", ""]
    cells = [
        [
            row["case"],
            *(f"{row[kind] / 1e6:.1f} MB" for kind in ("needed", "read", "received", "most")),
            "met" if row["met"] else "**missed**",
        ]
        for row in rows
    ]
    table = ["| " + " | ".join(line) + " |" for line in [head, ["---"] + ["---:"] * (len(head) - 1), *cells]]
    shape = " x ".join(f"{extent:,}" for extent in _SHAPE)
    lines = [
        "# Bytes read for slices",
        "",
        f"A float32 tensor of {shape} ({np.prod(_SHAPE) * 4 / 1e6:.1f} MB) saved in rows by {_RANKS} ranks, in blocks "
        f"of {_BLOCK_BYTES / 2**20:g} MiB. All ranks together; headers and metadata are not counted.",
        "",
        *table,
        "",
        "The goal allows two blocks more than is needed for every run (a stretch of a file that is wanted), and for "
        "columns, of which every block has a part, the whole of the files once.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Count the bytes that are read for slices of a tensor.")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = measure()
    report = as_markdown(rows)
    (args.out / "bytes_read.json").write_text(json.dumps({"bytes_read": rows}, indent=1) + "\n", encoding="utf-8")
    (args.out / "bytes_read.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
