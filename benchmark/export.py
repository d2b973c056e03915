"""Measures how long it takes to export a checkpoint, against a plain copy of the same bytes, and how much memory.

    python -m benchmark.export [--quick] [--smoke]

Two ranks, simulated as threads, save state A; one process exports it, and in between copies its files. Prints a table
and writes it and all samples to benchmark/results/. Takes about two minutes.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.command import main
from benchmark.machine import give_back_memory, reset_peak_memory, used_memory
from benchmark.report import (
    duration,
    goal,
    goals_section,
    heading,
    interval,
    megabytes,
    notes,
    paired_ratio,
    table,
    times,
)
from benchmark.session import Session, say
from benchmark.states import TensorSpec, layout
from paddle_dist_ckpt import export
from paddle_dist_ckpt.testing import Box, SimulatedRank, run_ranks, shard_array

_RANKS = 2
_WORKS: dict[str, dict[str, str]] = {
    "safetensors": {},
    "safetensors, in bfloat16": {"dtype": "bfloat16"},
    "native": {"format": "native"},
}
_COPY = "copy"
_PIECE = 16 << 20
_MOST_TIMES, _MOST_BYTES = 1.3, 256 << 20
_NOTES = f"""
State A, saved by {_RANKS} ranks that have every matrix in halves, is exported as whole tensors in one file, by one
process. The copy is what Python does without this library: every file is read in pieces of {_PIECE >> 20} MiB, the
pieces are written to one file, and that is synced. In every round all take turns in shuffled order, once with the files
in the page cache and once without; what was written before is removed and synced away, at nobody's cost. The export
verifies every block, and `native` computes checksums for what it writes; in bfloat16 half as much is written. Memory is
the highest resident set beyond the one at the start, over all rounds.
""".strip()


def measure(session: Session) -> dict[str, Any]:
    """Save once, export and copy in turns; every value of the first export is compared.

    Returns:
        ``seconds``: by work (an export, or ``copy``), and by whether files are in the page cache, for each round;
        ``ratios`` of them to the copy's, with intervals; ``peak`` bytes by work; ``total_bytes``; ``goals``.

    Raises:
        ValueError: something came back different.
    """
    specs, checkpoint = layout("A", "same", session.smoke), session.scratch / "checkpoint"
    _save(specs, checkpoint)
    works: dict[str, Callable[[Path], Any]] = {_COPY: functools.partial(_copy, checkpoint)}
    for name, options in _WORKS.items():
        works[name] = functools.partial(_export, checkpoint, **options)
    order = random.Random(session.seed)
    turns = [(work, cold) for cold in (False, True) for work in works]
    seconds: dict[str, dict[str, dict[int, float]]] = {work: {"cached": {}, "cold": {}} for work in works}
    peak = dict.fromkeys(works, 0)
    for i in range(-1, session.rounds):  # the first is the warm-up
        for work, cold in order.sample(turns, len(turns)):
            say(f"round {i + 1} of {session.rounds}: {work}{', not cached' if cold else ''}")
            session.cache(checkpoint, cold)
            out = session.scratch / "out"
            took, most = _measured(functools.partial(works[work], out))
            if i < 0 and work == "safetensors":
                _check(specs, out)
            session.remove(out)
            if i >= 0:
                seconds[work]["cold" if cold else "cached"][i] = took
                peak[work] = max(peak[work], most)
    ratios = {
        work: {how: paired_ratio(samples, seconds[_COPY][how]) for how, samples in seconds[work].items()}
        for work in _WORKS
    }
    ours, memory = ratios["safetensors"]["cached"], peak["safetensors"]
    assert ours is not None
    work = "export: A to safetensors"
    return {
        "seconds": seconds,
        "ratios": ratios,
        "peak": peak,
        "total_bytes": sum(math.prod(spec.shape) * 4 for spec in specs),
        "goals": [
            goal(work, f"at most {_MOST_TIMES}x a copy", interval(ours, times), ours[0] <= _MOST_TIMES),
            goal(f"{work}, memory", f"at most {megabytes(_MOST_BYTES)}", megabytes(memory), memory <= _MOST_BYTES),
        ],
    }


def _save(specs: Sequence[TensorSpec], checkpoint: Path) -> None:
    def work(rank: SimulatedRank) -> None:
        rank.save(
            {spec.name: shard_array(spec.local_part(0, 1), [_part(spec, rank.rank)]) for spec in specs}, checkpoint
        )

    for result in run_ranks(_RANKS, work):
        if isinstance(result, BaseException):
            raise result


def _part(spec: TensorSpec, rank: int) -> Box:
    """What a rank holds of a tensor."""
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    if spec.shard_dim is not None:
        shape[spec.shard_dim] //= _RANKS
        offset[spec.shard_dim] = rank * shape[spec.shard_dim]
    return Box(tuple(offset), tuple(shape))


def _measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and the most memory beyond the start."""
    gc.collect()
    give_back_memory()
    before = reset_peak_memory()["VmRSS"]
    start = time.perf_counter()
    work()
    return time.perf_counter() - start, used_memory()["VmHWM"] - before


def _export(checkpoint: Path, out: Path, **options: Any) -> None:
    export(checkpoint, out, **options)


def _copy(checkpoint: Path, out: Path) -> None:
    """Read every file and write it, and see that it is durable."""
    out.mkdir()
    with (out / "all").open("wb", buffering=0) as target:
        for path in sorted(checkpoint.iterdir()):
            with path.open("rb", buffering=0) as source:
                while piece := source.read(_PIECE):
                    target.write(piece)
        os.fsync(target.fileno())
    for folder in (out, out.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _check(specs: Sequence[TensorSpec], out: Path) -> None:
    data = np.memmap(out / "model.safetensors", np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    for spec in specs:
        low, high = (start + at for at in header[spec.name]["data_offsets"])
        if not np.array_equal(data[low:high].view(np.float32).reshape(spec.shape), spec.local_part(0, 1)):
            raise ValueError(f"{spec.name} came out different")


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    rows = []
    for work, seconds in found["seconds"].items():
        cells = []
        for how in ("cached", "cold"):
            cells.append(interval(seconds[how], duration))
            cells.append(interval(found["ratios"][work][how], times) if work in found["ratios"] else "")
        rows.append([work, *cells, megabytes(found["peak"][work])])
    lines = [
        *heading("Export", found),
        f"{found['total_bytes'] / 1e9:.2f} GB. Medians over the rounds, with bootstrap intervals of 95 %.",
        "",
        *table(["", "cached", "times the copy", "not cached", "times the copy", "memory"], rows),
        "",
        *goals_section(found["goals"]),
        *notes(_NOTES),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main("export", measure, as_markdown))
