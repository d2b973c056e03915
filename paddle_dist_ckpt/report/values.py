"""The values of a checkpoint, what its user said of it, and what of it cannot be read, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.shards import Kind
from ..core.text import key_text, value_text
from ..errors import CheckpointCorruptedError
from ..files.metadata import Metadata
from ..tree.paths import plain_key
from ..tree.values import from_jsonable
from ..visible import visible

__all__ = ["ValueColumns", "unread_keys", "user_values", "values_of"]

_MOST_VALUES = 2000


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """Values: the key, the type's name and the text of each. ``left_out`` says how many more there are."""

    key: list[str]
    type: list[str]
    text: list[str]
    left_out: int


def values_of(metadata: Metadata, keys: Sequence[str]) -> ValueColumns:
    """The values; of those in data files only where they are.

    Args:
        metadata: The checkpoint's.
        keys: The flat keys of its table's tensors.
    """
    table = metadata.table
    stored = [t for t, kind in enumerate(table.kinds.tolist()) if kind == Kind.VALUE]
    rows = [(metadata.key(path), *_decoded(tree)) for path, tree in metadata.value_records[:_MOST_VALUES]]
    for t in stored[: _MOST_VALUES - len(rows)]:
        size = table.layouts[table.layout_of[t]].shape[0]
        rows.append((keys[t], "", f"(in a data file, {size} bytes)"))
    return _columns(sorted(rows), len(metadata.value_records) + len(stored))


def user_values(metadata: Metadata) -> ValueColumns:
    """What ``SaveOptions.user_metadata`` held."""
    user = metadata.user_metadata
    rows = [
        (key_text(key), type(value).__name__, value_text(value)) for key, value in list(user.items())[:_MOST_VALUES]
    ]
    return _columns(rows, len(user))


def unread_keys(metadata: Metadata) -> ValueColumns:
    """What a checkpoint of another format has and cannot be read, with the reasons as texts."""
    rows = [(plain_key(path), "", visible(reason)) for path, reason in list(metadata.left_out.items())[:_MOST_VALUES]]
    return _columns(rows, len(metadata.left_out))


def _decoded(tree: Any) -> tuple[str, str]:
    """The type and the text of a value in its tagged JSON form."""
    try:
        value = from_jsonable(tree)
    except CheckpointCorruptedError as error:
        return "", f"({visible(str(error))})"
    return type(value).__name__, value_text(value)


def _columns(rows: Iterable[tuple[str, str, str]], total: int) -> ValueColumns:
    shown = list(rows)
    key, kind, text = ([row[i] for row in shown] for i in range(3))
    return ValueColumns([visible(k) for k in key], kind, text, total - len(shown))
