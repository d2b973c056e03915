"""``cat``: the items of a tensor, or a value."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..core.text import value_text
from .arguments import CheckpointPath, Identifier, Json
from .documents import print_json
from .output import count, human_bytes, print_columns, say, say_text, shape_text

if TYPE_CHECKING:
    from ..core.box import Box
    from ..files.metadata import Metadata
    from ..storage.base import Storage
    from .contents import Statistics, TensorContent

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
    from .contents import TensorContent, is_value, leaf_of, leaf_values
    from .regions import parse_slice

    leaf = leaf_of(metadata, key)
    if is_value(metadata, leaf):
        if region is not None or stats:
            raise ValueError(f"{key} is a value, which has neither slices nor statistics")
        (value,) = leaf_values(storage, metadata, [leaf])
        if json:
            print_json({"key": key, "kind": "value", "value": value})
        else:
            say_text(value if isinstance(value, str) else value_text(value, _MOST_LETTERS))
        return
    tensor = TensorContent(storage, metadata, leaf)
    part = _Slice(tensor, *parse_slice(region or "", tensor.layout.shape))
    if json:
        found = {"stats": _statistics(part, progress=False)} if stats else {"values": _all_items(part)}
        facts = {"key": key, "kind": "tensor", "dtype": tensor.dtype.name, "shape": tensor.layout.shape}
        print_json({**facts, "slice": region, **found})
    elif stats:
        _print_statistics(part)
    else:
        _print_items(part)


class _Slice(NamedTuple):
    """A slice of a tensor: its region, and the dimensions of that which the slice keeps."""

    tensor: TensorContent
    box: Box
    kept: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        return [self.box.shape[dimension] for dimension in self.kept]

    @property
    def nbytes(self) -> int:
        return self.box.size * self.tensor.dtype.itemsize

    @property
    def title(self) -> str:
        return f"{self.tensor.key}  {shape_text(self.shape)} {self.tensor.dtype.name}"


def _statistics(part: _Slice, progress: bool | None) -> Statistics:
    from ..core.progress import Progress

    with Progress("read", part.nbytes, progress, True) as bar:
        return part.tensor.statistics(part.box, bar)


def _print_statistics(part: _Slice) -> None:
    found = _statistics(part, progress=None)
    say(part.title, "head")
    names = ("elements", "nan", "infinite", "zero", "min", "max", "mean", "norm")
    print_columns([[name, _number(getattr(found, name))] for name in names])


def _all_items(part: _Slice) -> Any:
    """All items as lists; None if they are too many."""
    if part.box.size > _MOST_ITEMS or _letters(part.shape) > _MOST_JSON:
        return None
    return _readable(part.tensor.region(part.box), part.tensor.dtype).reshape(part.shape).tolist()


def _print_items(part: _Slice) -> None:
    """Print the items, or of many those at the edges."""
    import numpy as np

    from .regions import edge_items

    tensor, box, kept = part
    large = box.size > _MOST_PRINTED
    shown, edge = edge_items(box, _MOST_PRINTED) if large else (box, 0)
    firsts = [dimension for dimension in kept if shown.shape[dimension] < box.shape[dimension]]
    raw = tensor.edges(shown, edge) if large else tensor.region(shown)
    shape = [raw.shape[dimension] for dimension in kept if dimension not in firsts]
    items = _readable(raw, tensor.dtype).reshape(shape)
    say(f"{part.title}, {human_bytes(part.nbytes)}", "head")
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
