"""Checkpoints for the page: one that ranks have saved, and metadata of any size without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paddle_dist_ckpt import SaveOptions
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import Kind, ShardTable
from paddle_dist_ckpt.files.metadata import FileInfo, Metadata
from paddle_dist_ckpt.files.times import SaveTimes
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array
from paddle_dist_ckpt.tree.values import to_jsonable
from test.jobs import all_ok

__all__ = ["HOSTILE", "hostile_metadata", "large_metadata", "metadata_of", "own_names", "save_model"]


def save_model(folder: Path, ranks: int = 4, width: int = 64, layers: int = 4, **extra: Any) -> None:
    """Save a small language model with its optimizer: cut by rows, by columns, in four dimensions, and not at all."""

    def part(array: np.ndarray, dimension: int, rank: int) -> Any:
        if dimension < 0:
            return shard_array(array, [whole(array.shape)])
        size = array.shape[dimension] // ranks
        offset = tuple(rank * size if d == dimension else 0 for d in range(array.ndim))
        shape = tuple(size if d == dimension else n for d, n in enumerate(array.shape))
        return shard_array(array, [Box(offset, shape)])

    shapes: dict[str, tuple[tuple[int, ...], int]] = {"embed.weight": ((8 * width, width), 0)}
    for i in range(layers):
        block = f"decoder.layers.{i}"
        shapes |= {
            f"{block}.self_attn.qkv.weight": ((width, 3 * width), 1),
            f"{block}.self_attn.out.weight": ((width, width), 0),
            f"{block}.mlp.up.weight": ((width, 4 * width), 1),
            f"{block}.mlp.down.weight": ((4 * width, width), 0),
            f"{block}.mlp.up.bias": ((4 * width,), 0),
            f"{block}.norm.weight": ((width,), -1),
        }
    shapes["patch.conv.weight"] = ((width, 4 * ranks, 8, 8), 1)

    def state(rank: int) -> dict[str, Any]:
        made = {
            key: part(np.ones(shape, "float16" if "norm" not in key else "float32"), d, rank)
            for key, (shape, d) in shapes.items()
        }
        moments = {
            f"{key}.{name}": part(np.ones(shape, "float32"), d, rank)
            for key, (shape, d) in shapes.items()
            for name in ("moment1", "moment2")
        }
        values = {"step": 1200, "lr": 3e-4, "seen": (10**9, "tokens"), "history": [0.5, 0.25, None]}
        return {"model": made, "optimizer": moments, "trainer": values, **extra}

    options = SaveOptions(timeout=60, user_metadata={"run": "baseline-7b", "config": {"width": width, "ranks": ranks}})

    def save(rank: SimulatedRank) -> Any:
        return rank.save(state(rank.rank), folder, 1200, options)

    all_ok(run_ranks(ranks, save))


def metadata_of(
    tensors: list[tuple[str, Layout, list[int]]],
    files: list[str],
    values: dict[str, Any] | None = None,
    user: dict[str, Any] | None = None,
    times: SaveTimes | None = None,
    dtype: str = "float32",
) -> Metadata:
    """Metadata of tensors, by path: how each is cut, and which file has each box."""
    ordered = sorted(tensors)
    layouts = list(dict.fromkeys(layout for _, layout, _ in ordered))
    number = {id(layout): i for i, layout in enumerate(layouts)}
    table = ShardTable(
        paths=[path for path, _, _ in ordered],
        dtypes=[DTYPES[dtype]] * len(ordered),
        kinds=np.full(len(ordered), int(Kind.TENSOR)),
        layouts=layouts,
        layout_of=np.array([number[id(layout)] for _, layout, _ in ordered], np.int64),
        shard_file=np.array([file for _, _, where in ordered for file in where], np.int64),
        names=[None] * len(ordered),
    )
    sizes = table.file_bytes(len(files)).tolist()
    return Metadata(
        unique_id=7,
        save_id="0123456789abcdef",
        world_size=1 + max((int(n.split("_")[0]) for n in files if n[0].isdigit()), default=0),
        block_bytes=1 << 20,
        created="2026-01-02T03:04:05+00:00",
        library="paddle_dist_ckpt 0.1.0",
        paddle_version="3.3.1",
        user_tree=to_jsonable(user or {}, "user_metadata"),
        files=[FileInfo(name, 4096 + size, "0" * 16) for name, size in zip(files, sizes, strict=True)],
        table=table,
        value_records=[(path, to_jsonable(value, path)) for path, value in sorted((values or {}).items())],
        times=times,
    )


def own_names(ranks: int) -> list[str]:
    """Names of data files as ranks write them."""
    return [f"{rank}_7.0123456789abcdef.0.safetensors" for rank in range(ranks)]


def large_metadata(tensors: int, ranks: int = 64) -> Metadata:
    """Metadata of a job with so many tensors; each is cut by rows over eight of the ranks, or whole on one."""
    rows = [Layout.from_cuts((1024, 512 * (1 + k)), [[128 * i for i in range(1, 8)], []]) for k in range(4)]
    bias = Layout.from_cuts((4096,), [[]])
    found: list[tuple[str, Layout, list[int]]] = []
    for i in range(tensors):
        name = f"/model/layers.{i // 10:05d}.block.{i % 10}.{'bias' if i % 5 == 4 else 'weight'}"
        if i % 5 == 4:
            found.append((name, bias, [i % ranks]))
        else:
            found.append((name, rows[i % 4], [(8 * (i // 10) + k) % ranks for k in range(8)]))
    seconds = {
        rank: {"plan": 0.2 + 0.001 * rank, "snapshot": 0.4 + 0.01 * (rank % 7), "write": 3.0 + (rank * 37 % 11) / 5}
        for rank in range(ranks)
    }
    return metadata_of(found, own_names(ranks), {"/step": 3}, {"run": "large"}, SaveTimes.of(seconds))


HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>-->\u202e\u2066abc\0"


def hostile_metadata() -> Metadata:
    """Metadata whose keys, values and names of files are markup, marks of direction, or 10,000 characters long."""
    part = HOSTILE.replace("~", "~0").replace("/", "~1")
    halves, whole_one = Layout.from_cuts((4, 4), [[2], []]), Layout.from_cuts((3,), [[]])
    tensors = [
        (f"/{part}", halves, [0, 1]),
        (f"/m/{part}", whole_one, [1]),
        ("/" + "k" * 10_000, halves, [1, 1]),
        ("/" + "学" * 5_000, whole_one, [0]),
        ("/ordinary.weight", halves, [1, 0]),
        ("/__proto__", whole_one, [0]),
        ("/constructor", whole_one, [0]),
    ]
    files = ["plain.safetensors", HOSTILE.replace("/", "").replace("\0", "") + ".safetensors"]
    values = {f"/value/{part}": HOSTILE, "/big": 10**9000, "/list": [HOSTILE] * 3}
    return metadata_of(tensors, files, values, {HOSTILE: {HOSTILE: HOSTILE}, "n": "y" * 10_000})
