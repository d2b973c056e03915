"""Measures planning for many ranks, tensors and shards, in one process and without any tensor's data.

    python -m benchmark.scale [--quick] [--out DIR]

Prints tables and writes them, with all samples, to scale.md and scale.json. Takes about 3 minutes, with --quick half.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmark import machine
from benchmark.run import HERE
from benchmark.worker import reset_peak_memory, used_memory
from paddle_dist_ckpt.control import SoloHub
from paddle_dist_ckpt.control.transports import NoTransport
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import pack_column, pack_signed
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.messages import decode, encode
from paddle_dist_ckpt.core.shards import Kind, Layout, ShardTable
from paddle_dist_ckpt.core.tensors import Geometry, LocalShard, TensorView
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.files.metadata import FileInfo, Metadata, SaveInfo
from paddle_dist_ckpt.loading.answering import Answering
from paddle_dist_ckpt.loading.fit import Fit
from paddle_dist_ckpt.loading.messages import LoadAnswer, WantedPaths
from paddle_dist_ckpt.loading.wanted import WantedState
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.planning.cover import tensors_covered
from paddle_dist_ckpt.planning.load_plan import WantedBoxes, plan_load
from paddle_dist_ckpt.saving.context import SaveContext
from paddle_dist_ckpt.saving.messages import Description, SaveRequest, Structure, TensorList
from paddle_dist_ckpt.saving.planned_save import PlannedSave, make_plan
from paddle_dist_ckpt.saving.save_coordinator import SaveCoordinator
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.storage.base import Folder
from paddle_dist_ckpt.testing import NumpyAdapter

_WIDTH = 64  # columns of every tensor
_SHAPES = 4  # different shapes among the tensors
_SIZES = ((256, 2000, "a rank of each tensor"), (4096, 244, "1M shards"), (16384, 244, "4M shards"))
_CURVES = {
    "ranks": [(ranks, 244) for ranks in (64, 256, 1024, 4096, 16384)],
    "tensors": [(16, tensors) for tensors in (250, 1000, 4000, 16000, 64000)],
}
_GRID = 1024


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


def measure_plan(ranks: int, tensors: int, times: int) -> tuple[dict[str, Any], PlannedSave]:
    """The coordinator's part in a first save, with the decoding of what the ranks send and the encoding of orders."""
    said = structures(ranks, tensors, ranks)
    fingerprints = {rank: xxhash.xxh3_128_digest(data) for rank, data in said.items()}
    gc.collect()
    before = reset_peak_memory()
    seconds, plan = timed(lambda: make_plan(said, fingerprints, 0), times)
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
    memory = SaveMemory(planned=plan)
    seen = Folder("host", 1, 1, None)
    requests = {
        rank: encode(SaveRequest(None, seen, 1 << 20, fingerprint, None, plan.plan_id, b"", [], None))
        for rank, fingerprint in plan.fingerprints.items()
    }
    orders: dict[int, bytes] = {}

    def run() -> None:
        with SoloHub().session("save", 60) as session:
            context = SaveContext(LocalStorage(folder), session, NoTransport(), NumpyAdapter(), memory)
            coordinator = SaveCoordinator(context, SaveOptions(), ExitStack())
            orders.update(coordinator.plan(requests))
            coordinator.leave()

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
    save = SaveInfo(
        save_id="0" * 16,
        unique_id=0,
        world_size=ranks,
        block_bytes=1 << 20,
        created="",
        library="",
        paddle_version=None,
        user_metadata=None,
    )
    metadata = Metadata(save, files, table, [])
    encoding, data = timed(lambda: encode_metadata(metadata))
    decoding, metadata = timed(lambda: decode_metadata(data, "0.metadata", 0))
    giving, answer = timed(lambda: encode(Answering(metadata, {}).answer(WantedPaths(table.paths, []))))
    wanted = _wanted(table, ranks // 2)
    planning, fit = timed(lambda: Fit(decode(answer, LoadAnswer), wanted, False))
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


def measure_grid() -> dict[str, float]:
    """One tensor in a grid of 1,024 x 1,024 shards: the exact cover, and the overlap with a quarter of it."""
    side = _GRID * 8
    layout = Layout.from_cuts((side, side), [list(range(8, side, 8))] * 2)
    count = len(layout.boxes)
    one = np.zeros(1, np.int64)
    table = ShardTable(["/w"], [DTYPES["float32"]], one, [layout], one, np.zeros(count, np.int64), [None])
    box = WantedBoxes(one, Boxes.of([Box((100, 200), (side // 2, side // 2))], 2))
    shape = np.array([[side, side]])
    cover, exact = timed(lambda: tensors_covered(np.zeros(count, np.int64), layout.boxes, shape))
    overlap, items = timed(lambda: plan_load(table, box))
    assert exact.all()
    assert not len(items.uncovered)
    return {"cover_seconds": cover, "overlap_seconds": overlap, "overlaps": len(items.wanted)}


def measure(quick: bool) -> dict[str, Any]:
    """Everything."""
    sizes, curves = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, tensors, _ in _SIZES[:2] if quick else _SIZES:
            _say(f"{ranks} ranks, {tensors} tensors")
            row, plan = measure_plan(ranks, tensors, 1 if ranks > 4096 else 3)
            row["cached"] = measure_cached(plan, Path(folder))
            row["load"] = measure_load(plan)
            sizes.append(row)
            del plan
    for name, points in _CURVES.items():
        curves[name] = []
        for ranks, tensors in points[:4] if quick else points:
            _say(f"curve over {name}: {ranks} ranks, {tensors} tensors")
            row, plan = measure_plan(ranks, tensors, 1 if ranks * tensors > 2_000_000 else 3)
            curves[name].append({**row, "load": measure_load(plan)})
            del plan
    return {"sizes": sizes, "curves": curves, "grid": measure_grid()}


def as_markdown(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The report."""
    head = [
        "ranks",
        "tensors",
        "shards",
        "plan",
        "cached",
        "memory",
        "in",
        "out",
        "`.metadata`",
        "given",
        "rank's plan",
    ]
    rows = [_size_row(row) for row in found["sizes"]]
    grid = found["grid"]
    lines = [
        "# Planning at scale",
        "",
        f"{about['cpu']}, one thread, Python {about['python']}. Best of three (4M shards: of one).",
        "",
        *_table(head, rows),
        "",
        "*plan*: the coordinator's time for a first save, from the ranks' encoded messages to their encoded orders; "
        "*cached*: for the next one of the same structure; *in*, *out*: bytes of the messages of all ranks together; "
        "*metadata*: the size of the `.metadata` file; "
        "*given*: the coordinator's time to look up and encode what a rank of another job wants; *rank's plan*: that "
        "rank's time to decode it and to plan.",
        "",
        f"One tensor in 1,024 x 1,024 shards: exact cover {grid['cover_seconds'] * 1000:.0f} ms, overlap with a "
        f"quarter of it ({grid['overlaps']:,} shards) {grid['overlap_seconds'] * 1000:.0f} ms.",
        "",
    ]
    for name, points in found["curves"].items():
        rows = [_size_row({**row, "cached": None}) for row in points]
        lines += [f"## Over the number of {name}", "", *_table(head, rows), ""]
    return "\n".join(lines)


def _size_row(row: Mapping[str, Any]) -> list[str]:
    load, cached = row["load"], row["cached"]
    return [
        f"{row['ranks']:,}",
        f"{row['tensors']:,}",
        f"{row['shards']:,}",
        f"{row['seconds']:.3g} s",
        f"{cached['seconds'] * 1000:.3g} ms" if cached else "",
        f"{row['peak_bytes'] / 2**20:.0f} MiB",
        f"{row['bytes_in'] / 1e6:.3g} MB",
        f"{row['bytes_out'] / 1e6:.3g} MB",
        f"{load['metadata_bytes'] / 1e6:.3g} MB",
        f"{load['give_seconds'] * 1000:.3g} ms",
        f"{load['plan_seconds'] * 1000:.3g} ms",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [head, ["---:"] * len(head), *rows]]


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[2K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure planning at scale.")
    parser.add_argument("--quick", action="store_true", help="without the largest sizes")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine.describe(args.out)
    found = measure(args.quick)
    _say("")
    report = as_markdown(found, about)
    (args.out / "scale.json").write_text(json.dumps({"machine": about, **found}, indent=1) + "\n", encoding="utf-8")
    (args.out / "scale.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
