"""Measures planning for many ranks, tensors and shards, in one process and without any tensor's data.

    python -m benchmark.scale [--quick] [--smoke]

Prints tables, and writes them and all numbers to benchmark/results/. Takes about 3 minutes, with --quick half.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmark.command import main
from benchmark.machine import reset_peak_memory, used_memory
from benchmark.report import duration, goal, goals_section, heading, megabytes, table
from benchmark.session import Session, say
from paddle_dist_ckpt import LocalStorage, SaveOptions
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import pack_column, pack_signed
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.messages import decode, encode
from paddle_dist_ckpt.core.shards import Kind, ShardTable
from paddle_dist_ckpt.core.tensors import Geometry, LocalShard, TensorView
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.files.metadata import FileInfo, Metadata
from paddle_dist_ckpt.loading.answering import Answering
from paddle_dist_ckpt.loading.fit import Fit
from paddle_dist_ckpt.loading.messages import LoadAnswer, WantedPaths
from paddle_dist_ckpt.loading.stored import StoredShards
from paddle_dist_ckpt.loading.wanted import WantedState
from paddle_dist_ckpt.planning.cover import tensors_covered
from paddle_dist_ckpt.planning.load_plan import WantedBoxes, plan_load
from paddle_dist_ckpt.saving.global_state import merge_structures
from paddle_dist_ckpt.saving.messages import Description, SaveRequest, Structure, TensorList
from paddle_dist_ckpt.saving.planned_save import PlannedSave, make_plan
from paddle_dist_ckpt.saving.save_coordinator import SaveCoordinator
from paddle_dist_ckpt.saving.save_memory import SaveContext, SaveMemory
from paddle_dist_ckpt.storage.base import Folder, FolderIdentity
from paddle_dist_ckpt.testing import NumpyAdapter

_WIDTH = 64  # columns of every tensor
_SHAPES = 4  # different shapes among the tensors
_SIZES = [(256, 2000), (4096, 244), (16384, 244)]
_CURVES = {
    "ranks": [(ranks, 244) for ranks in (64, 256, 1024, 4096, 16384)],
    "tensors": [(16, tensors) for tensors in (250, 1000, 4000, 16000, 64000)],
}
_SMOKE_SIZES = [(4, 10), (8, 20)]
_SMOKE_CURVES = {"ranks": _SMOKE_SIZES, "tensors": [(4, 10), (4, 20)]}
_GRID, _SMOKE_GRID = 1024, 16


def structures(ranks: int, tensors: int, parts: int) -> dict[int, bytes]:
    """What ranks say of tensors that are cut in ``parts`` row by row; several ranks may hold the same part."""
    paths = [f"/model/layers.{i // 12}.block.{i % 12}.weight" for i in range(tensors)]
    rows = [4 + k for k in range(_SHAPES)]
    descriptions = [Description("float32", Kind.TENSOR, False, (parts * n, _WIDTH), None, 0) for n in rows]
    shape = pack_column(np.arange(tensors) % _SHAPES)
    listed = encode(TensorList(paths, [], descriptions, shape))
    found = {}
    for rank in range(ranks):
        part = rank * parts // ranks
        cells = np.array([[part * n, 0, n, _WIDTH, -1] for n in rows], np.int64)
        found[rank] = encode(Structure(listed, shape, pack_column([1] * _SHAPES), 2, pack_signed(cells), []))
    return found


def timed(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """The best of a few times in seconds, and the last result."""
    best, result = float("inf"), None
    for _ in range(times):
        result = None
        gc.collect()
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def planned(structures: Mapping[int, bytes], fingerprints: dict[int, bytes]) -> PlannedSave:
    """The plan of a save without plain tensors."""
    state, shards = merge_structures(structures, 0)
    return make_plan(state, shards, fingerprints, np.zeros(len(state.paths), bool))


def measure_plan(ranks: int, tensors: int, times: int) -> tuple[dict[str, Any], PlannedSave]:
    """The coordinator's part in a first save, with the decoding of what the ranks send and the encoding of orders."""
    said = structures(ranks, tensors, ranks)
    fingerprints = {rank: xxhash.xxh3_128_digest(data) for rank, data in said.items()}
    gc.collect()
    before = reset_peak_memory()
    seconds, plan = timed(lambda: planned(said, fingerprints), times)
    peak = used_memory()["VmHWM"] - before["VmRSS"]
    row = {
        "ranks": ranks,
        "tensors": tensors,
        "shards": ranks * tensors,
        "seconds": seconds,
        "peak_bytes": peak,
        "bytes_in": sum(map(len, said.values())),
        "bytes_out": sum(map(len, plan.rank_plans.values())),
    }
    return row, plan


def measure_cached(plan: PlannedSave, folder: Path) -> dict[str, float]:
    """The coordinator's part in a save of the same structure: requests decoded, recognised, orders encoded."""
    memory = SaveMemory(planned=[plan])
    seen = Folder(FolderIdentity("host", 1, 1), None)
    requests = {
        rank: encode(SaveRequest(None, seen, 1 << 20, fingerprint, None, plan.plan_id, b"", [], None))
        for rank, fingerprint in plan.fingerprints.items()
    }
    orders: dict[int, bytes] = {}

    def run() -> None:
        with SoloHub().session("save", 60) as session, ExitStack() as ending:
            context = SaveContext(LocalStorage(folder), session, NoTransport(), NumpyAdapter(), memory)
            orders.update(SaveCoordinator(context, SaveOptions(), ending, False).plan(requests))

    seconds, _ = timed(run)
    return {
        "seconds": seconds,
        "bytes_in": sum(map(len, requests.values())),
        "bytes_out": sum(map(len, orders.values())),
    }


def measure_load(plan: PlannedSave) -> dict[str, Any]:
    """What a rank of a job with half as many ranks is given of the checkpoint, and its plan."""
    ranks = len(plan.state.ranks)
    table = plan.table(tuple((int(n),) for n in plan.rank_items))
    files = [FileInfo(f"{rank}_0.{'0' * 16}.0.safetensors", 1 << 40, "0" * 16) for rank in range(ranks)]
    metadata = Metadata(
        save_id="0" * 16,
        unique_id=0,
        world_size=ranks,
        block_bytes=1 << 20,
        created="",
        library="",
        paddle_version=None,
        user_tree=None,
        files=files,
        table=table,
        value_records=[],
    )
    encoding, data = timed(lambda: encode_metadata(metadata))
    decoding, metadata = timed(lambda: decode_metadata(data, "0.metadata", 0))
    giving, answer = timed(lambda: encode(Answering(metadata, []).answer(WantedPaths(table.paths), {})[0][1]))
    wanted = _wanted(table, ranks // 2)
    adapter = NumpyAdapter()

    def plan_of_load() -> Fit:
        found = decode(answer, LoadAnswer)
        return Fit(StoredShards(found, wanted.tensors.paths), found, wanted, False, (), adapter.devices)

    planning, fit = timed(plan_of_load)
    assert not fit.problems
    return {
        "metadata_bytes": len(data),
        "encode_seconds": encoding,
        "decode_seconds": decoding,
        "give_seconds": giving,
        "answer_bytes": len(answer),
        "plan_seconds": planning,
    }


def _wanted(table: ShardTable, ranks: int) -> WantedState:
    """One rank's part of all tensors, cut row by row among so many ranks."""
    wanted = WantedState()
    known: dict[tuple[int, ...], Geometry] = {}
    for i, path in enumerate(table.paths):
        shape = table.layouts[table.layout_of[i]].shape
        if shape not in known:
            rows = shape[0] // ranks
            piece = LocalShard(Box((rows * (ranks // 3), 0), (rows, _WIDTH)))
            known[shape] = Geometry(Kind.TENSOR, DTYPES["float32"], shape, False, (piece,))
        wanted.tensors.add(path, TensorView(known[shape], ((1 << 40) + (i << 24),), None, None))
    return wanted


def measure_grid(grid: int) -> dict[str, float]:
    """One tensor in a square of shards, ``grid`` each way: the exact cover, and the overlap with a quarter of it."""
    side = grid * 8
    layout = Layout.from_cuts((side, side), [list(range(8, side, 8))] * 2)
    count = len(layout.boxes)
    one = np.zeros(1, np.int64)
    table = ShardTable(["/w"], [DTYPES["float32"]], one, [layout], one, np.zeros(count, np.int64), [None])
    box = WantedBoxes(one, Boxes.of([Box((side // 80, side // 40), (side // 2, side // 2))], 2))
    shape = np.array([[side, side]])
    cover, exact = timed(lambda: tensors_covered(np.zeros(count, np.int64), layout.boxes, shape))
    overlap, items = timed(lambda: plan_load(table, box))
    assert exact.all()
    assert not len(items.uncovered)
    return {"cover_seconds": cover, "overlap_seconds": overlap, "overlaps": len(items.wanted), "grid": grid}


def measure(session: Session) -> dict[str, Any]:
    """Everything; ``sizes``, ``curves``, ``grid`` and ``goals``."""
    sizes = _SMOKE_SIZES if session.smoke else _SIZES[:2] if session.quick else _SIZES
    curves: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for ranks, tensors in sizes:
        say(f"{ranks} ranks, {tensors} tensors")
        row, plan = measure_plan(ranks, tensors, 1 if ranks > 4096 else 3)
        rows.append({**row, "cached": measure_cached(plan, session.scratch), "load": measure_load(plan)})
        del plan
    for name, points in (_SMOKE_CURVES if session.smoke else _CURVES).items():
        curves[name] = []
        for ranks, tensors in points[:4] if session.quick else points:
            say(f"curve over {name}: {ranks} ranks, {tensors} tensors")
            row, plan = measure_plan(ranks, tensors, 1 if ranks * tensors > 2_000_000 else 3)
            curves[name].append({**row, "load": measure_load(plan)})
            del plan
    grid = measure_grid(_SMOKE_GRID if session.smoke else _GRID)
    return {"sizes": rows, "curves": curves, "grid": grid, "goals": list(_goals(rows, grid))}


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


Row = Mapping[str, Any]
_Limit = tuple[str, str, float, Callable[[float], str], Callable[[Row], float]]
"""What is measured; the goal in words, the limit for ``{}``; how numbers are shown; where the number is in a row."""


def _large_job(ranks: int, shards: str, seconds: float, gibibytes: int) -> list[_Limit]:
    """The three goals for a very large job."""
    work = f"{ranks:,} simulated ranks, {shards} shards"
    return [
        (work, "plan in at most {}", seconds, duration, lambda row: row["seconds"]),
        (work, "cached in at most {}", 0.05, duration, lambda row: row["cached"]["seconds"]),
        (work, "memory at most {}", gibibytes * 2**30, _mebibytes, lambda row: row["peak_bytes"]),
    ]


def _given_and_planned(row: Row) -> float:
    return row["load"]["give_seconds"] + row["load"]["plan_seconds"]


_MANY, _CUT = "256 simulated ranks x 2,000 tensors", "one tensor in 1,024 x 1,024 shards"
_SIZE_LIMITS: dict[int, list[_Limit]] = {
    256: [
        (_MANY, "plan in at most {}", 0.4, duration, lambda row: row["seconds"]),
        (_MANY, "`.metadata` at most {}", 5e6, megabytes, lambda row: row["load"]["metadata_bytes"]),
        (_MANY, "a rank is given and plans its load in at most {}", 0.4, duration, _given_and_planned),
    ],
    4096: _large_job(4096, "1M", 1.5, 1),
    16384: _large_job(16384, "4M", 8, 3),
}
_GRID_LIMITS: list[_Limit] = [
    (_CUT, "overlap with one box in at most {}", 0.3, duration, lambda grid: grid["overlap_seconds"]),
    (_CUT, "exact cover in at most {}", 0.3, duration, lambda grid: grid["cover_seconds"]),
]


def _goals(sizes: Sequence[Row], grid: Row) -> Iterator[dict[str, Any]]:
    rows: dict[int, Row] = {row["ranks"]: row for row in sizes}
    measured = [(limit, rows.get(ranks)) for ranks, limits in _SIZE_LIMITS.items() for limit in limits]
    for (work, text, most, shown, value), row in [*measured, *((limit, grid) for limit in _GRID_LIMITS)]:
        found = None if row is None else value(row)
        words = "not measured" if found is None else shown(found)
        yield goal(work, text.format(shown(most)), words, None if found is None else found <= most)


def as_markdown(found: Mapping[str, Any]) -> str:
    """The report."""
    grid = found["grid"]
    lines = [
        *heading("Planning at scale", found),
        "One thread. Best of three (4M shards: of one).",
        "",
        *_size_table(found["sizes"]),
        "",
        "*plan*: the coordinator's time for a first save, from the ranks' encoded messages to their encoded orders; "
        "*cached*: for the next one of the same structure; *in*, *out*: bytes of the messages of all ranks together; "
        "*metadata*: the size of the `.metadata` file; "
        "*given*: the coordinator's time to look up and encode what a rank of another job wants; *rank's plan*: that "
        "rank's time to decode it and to plan.",
        "",
        f"One tensor in {grid['grid']:,} x {grid['grid']:,} shards: exact cover {duration(grid['cover_seconds'])}, "
        f"overlap with a quarter of it ({grid['overlaps']:,} shards) {duration(grid['overlap_seconds'])}.",
        "",
    ]
    for name, points in found["curves"].items():
        lines += [f"## Over the number of {name}", "", *_size_table(points), ""]
    return "\n".join([*lines, *goals_section(found["goals"])])


def _size_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    counts, sent = ("ranks", "tensors", "shards"), ("in", "out")
    head = [*counts, "plan", "cached", "memory", *sent, "`.metadata`", "given", "rank's plan"]
    cells = [
        [
            *(f"{row[name]:,}" for name in counts),
            duration(row["seconds"]),
            duration(row["cached"]["seconds"]) if "cached" in row else "–",
            _mebibytes(row["peak_bytes"]),
            *(f"{row[f'bytes_{name}'] / 1e6:.3g} MB" for name in sent),
            f"{row['load']['metadata_bytes'] / 1e6:.3g} MB",
            duration(row["load"]["give_seconds"]),
            duration(row["load"]["plan_seconds"]),
        ]
        for row in rows
    ]
    return table(head, cells)


if __name__ == "__main__":
    raise SystemExit(main("scale", measure, as_markdown))
