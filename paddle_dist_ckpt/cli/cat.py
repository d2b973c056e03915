"""``cat``: the items of a tensor, or a value."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.text import value_text
from .arguments import CheckpointPath, Identifier, Json
from .documents import print_json
from .output import count, human_bytes, print_columns, say, say_text, shape_text

if TYPE_CHECKING:
    from ..files.metadata import Metadata
    from ..storage.base import Storage

__all__ = ["cat"]

_MOST_PRINTED = 1_000  # items; of more the edges are shown
_MOST_ITEMS = 1_000_000  # in JSON
_MOST_JSON = 16_000_000  # letters
_MOST_LETTERS = 100_000  # of a value that is no text


def cat(
    path: CheckpointPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The flat key, as inspect shows it.")],
    unique_id: Identifier = None,
    region: Annotated[
        str | None, typer.Option("--slice", metavar="SLICE", help="A part of the tensor, such as 0:4,:,-1.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Count NaNs and infinities; smallest, largest, mean, norm.")
    ] = False,
    json: Json = False,
) -> None:
    """Print a tensor, a slice of it, its statistics, or a value.

    Only what is printed is read: of a large tensor the edges, and a slice however large the tensor. Statistics are
    taken in windows, in little memory, of the finite items (of the magnitudes of complex ones). Every block that is
    read is verified, where the format has checksums.

    Of more than a thousand items the edges are printed. With --json all items are; of more than a million, or of very
    many lists, null, unless a smaller --slice is given.

    \b
    Examples:
      paddle-dist-ckpt cat checkpoints model.embed.weight --slice 0:4,:8
      paddle-dist-ckpt cat checkpoints model.embed.weight --stats
    """
    from ..folder.checkpoint import read_checkpoint, unless_replaced
    from ..storage import as_source

    storage = as_source(path)
    metadata = read_checkpoint(storage, unique_id)
    with unless_replaced(storage, metadata):
        _cat(storage, metadata, key, region, stats, json)


def _cat(storage: Storage, metadata: Metadata, key: str, region: str | None, stats: bool, json: bool) -> None:
    import numpy as np

    from .contents import ValueContent, find_content, read_edges, read_region, read_value, statistics
    from .regions import edge_items, parse_slice

    tensor = find_content(metadata, key)
    if isinstance(tensor, ValueContent):
        if region is not None or stats:
            raise ValueError(f"{key} is a value, which has neither slices nor statistics")
        value = read_value(storage, metadata, tensor)
        if json:
            print_json({"key": key, "kind": "value", "value": value})
            return
        say_text(value if isinstance(value, str) else value_text(value, _MOST_LETTERS))
        return
    box, kept = parse_slice(region or "", tensor.shape)
    shape = [box.shape[dimension] for dimension in kept]
    document: dict[str, Any] = {"key": key, "kind": "tensor", "dtype": tensor.dtype.name, "shape": tensor.shape}
    if stats:
        from ..core.progress import Progress

        with Progress("read", box.size * tensor.dtype.itemsize, False if json else None, True) as bar:
            found = statistics(storage, metadata, tensor, box, bar)
        if json:
            print_json({**document, "slice": region, "stats": found})
            return
        say(f"{key}  {shape_text(shape)} {tensor.dtype.name}", "head")
        names = ("elements", "nan", "infinite", "zero", "min", "max", "mean", "norm")
        print_columns([[name, _number(getattr(found, name))] for name in names])
        return
    if json:
        items = None
        if box.size <= _MOST_ITEMS and _letters(shape) <= _MOST_JSON:
            items = _readable(read_region(storage, metadata, tensor, box), tensor.dtype).reshape(shape).tolist()
        print_json({**document, "slice": region, "values": items})
        return
    large = box.size > _MOST_PRINTED
    part, edge = edge_items(box, _MOST_PRINTED) if large else (box, 0)
    firsts = [dimension for dimension in kept if part.shape[dimension] < box.shape[dimension]]
    kept = tuple(dimension for dimension in kept if dimension not in firsts)
    if large:
        raw = read_edges(storage, metadata, tensor, part, edge)
    else:
        raw = read_region(storage, metadata, tensor, part)
    items = _readable(raw, tensor.dtype).reshape([raw.shape[dimension] for dimension in kept])
    say(f"{key}  {shape_text(shape)} {tensor.dtype.name}, {human_bytes(box.size * tensor.dtype.itemsize)}", "head")
    if firsts:
        say(f"of the first {count(len(firsts), 'dimension')} only the first item; see --slice", "faint")
    for line in np.array2string(items, threshold=0 if large else box.size + 1, edgeitems=edge).split("\n"):
        say(line)


def _letters(shape: list[int]) -> int:
    """About how many letters a tensor's items are as JSON, with the lists that they are in, which may be of nothing."""
    return sum(n * (2 * level + 4) for level, n in enumerate(itertools.accumulate(shape, operator.mul), 1))


def _readable(raw: Any, dtype: Any) -> Any:
    """Raw items as numpy can print them and turn them into Python's numbers."""
    import numpy as np

    from ..core.dtypes import arithmetic_dtype

    values = raw.view(arithmetic_dtype(dtype))
    return values if values.dtype.kind in "biufc" else values.astype(np.float32)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.9g}"
