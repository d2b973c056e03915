"""Reads a whole checkpoint with numpy and the standard library alone, as the format's specification says."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

# bfloat16, float8 and such have no numpy type; they come as integers with the same bits.
BITS = {"bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}


def read_checkpoint(folder: Path, unique_id: int) -> dict[str, Any]:
    """Whole arrays and values by path."""
    head, body = map(json.loads, (folder / f"{unique_id}.metadata").read_text("utf-8").splitlines())
    assert head["format"] == "paddle_dist_ckpt.metadata"
    assert head["version"][0] == 1
    assert not head["required_features"]
    table, found = body["tensors"], {path: value(tree) for path, tree in body["values"]}
    data = [(folder / name).read_bytes() for name, _, _ in body["files"]]
    arrays, shards, file = [], [], iter(column(table["shard_file"]))
    for dtype, layout in zip(column(table["dtype"]), column(table["layout"]), strict=True):
        name, shape = table["dtypes"][dtype], table["layouts"][layout]["shape"]
        arrays.append(np.empty(shape, BITS.get(name, name)))
        shards += [(next(file), arrays[-1], box) for box in boxes(table["layouts"][layout])]
    at = [8 + int.from_bytes(each[:8], "little") for each in data]  # where the next shard starts in each file
    for number, array, box in sorted(shards, key=lambda shard: -shard[1].itemsize):
        part = np.frombuffer(data[number], array.dtype, array[box].size, at[number])
        array[box] = part.reshape(array[box].shape)
        at[number] += part.nbytes
    for path, kind, array in zip(table["paths"], column(table["kind"]), arrays, strict=True):
        found[path] = value(json.loads(array.tobytes())) if kind == 2 else array
    return found


def column(packed: list[str]) -> list[int]:
    return np.frombuffer(base64.b64decode(packed[1]), packed[0]).tolist()


def boxes(layout: dict[str, Any]) -> list[tuple[slice, ...]]:
    if "cuts" in layout:
        edges = [[0, *cuts, size] for cuts, size in zip(layout["cuts"], layout["shape"], strict=True)]
        return list(itertools.product(*([slice(a, b) for a, b in itertools.pairwise(each)] for each in edges)))
    sides = [zip(column(o), column(e), strict=True) for o, e in zip(layout["offsets"], layout["extents"], strict=True)]
    return list(zip(*([slice(o, o + e) for o, e in side] for side in sides), strict=True))


def value(tree: Any) -> Any:
    if isinstance(tree, list):
        return [value(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag in ("dict", "tuple", "complex"):
        return {"dict": dict, "tuple": tuple, "complex": lambda c: complex(*c)}[tag](value(content))
    if tag == "numpy":
        return np.frombuffer(base64.b64decode(content[1]), content[0])[0]
    return {"int": lambda c: int(c, 16), "float": float, "bytes": base64.b64decode}[tag](content)
