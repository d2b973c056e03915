"""What is chosen of a checkpoint that is loaded or written whole, its tensors as they are stored or made by recipes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from ..core.parts import Arranged, SourceTensor
from ..core.shards import Kind
from ..core.text import counted
from ..errors import StateDictMismatchError, UnsupportedValueError
from ..files.metadata import Metadata
from ..folder.selection import Chosen, Selection, below, select, select_keys, selected_of
from ..tree.paths import is_own, join, unstorable
from ..visible import each_visible, visible
from .answering import Answering
from .making import RecipeArranger
from .mismatches import idle_text
from .stored_tensors import stored_tensors

__all__ = ["choose", "refused_keys"]

_logger = logging.getLogger("paddle_dist_ckpt")


def choose(
    metadata: Metadata,
    location: str,
    selection: Selection,
    arranger: RecipeArranger | None,
    strict: bool | Literal["all"],
) -> Chosen:
    """Choose what is handed on of a checkpoint.

    Args:
        metadata: What it holds.
        location: Its folder.
        selection: Which part; of what is made, by the keys that it is made for.
        arranger: What is made of its tensors; None if they stay as they are.
        strict: Whether recipes that do not fit are an error; if not, what they make is left out, with a warning. With
            ``"all"``, statements that change nothing are errors too.

    Raises:
        StateDictMismatchError: recipes and the checkpoint do not fit together.
        CheckpointNotFoundError: nothing is selected.
        UnsupportedValueError: something is made for a key that cannot be stored, is escaped, or that another one is
            escaped for.
    """
    if arranger is None:
        return Chosen(select(metadata, selection), {}, {})
    stored = stored_tensors(metadata)
    made, _, problems, unfit, left, unmade = arranger.make(stored, Answering(metadata, []).what_is)
    problems += [f"{key}: {unfit[key]}" for key in selected_of(unfit, selection)]
    advice = "LoadOptions(strict=False) loads what fits"
    if strict == "all":
        idle = arranger.idle(stored, None)
        problems = [*problems, *map(idle_text, idle)]
        advice += "; strict=True lets statements change nothing" * bool(idle)
    if problems and strict:
        text = f"checkpoint {metadata.unique_id} in {location} does not fit the recipes"
        lines = [f"{text}; {counted(len(problems), 'problem')}:", *each_visible(problems)]
        raise StateDictMismatchError("\n".join([*lines, f"({advice})"]), problems)
    for problem in (*problems, *left):
        _logger.warning("left out: %s", problem)
    return _chosen(metadata, stored, made, unmade, selection)


def _chosen(
    metadata: Metadata,
    stored: Mapping[str, SourceTensor],
    made: Mapping[str, Arranged | None],
    unmade: Sequence[str],
    selection: Selection,
) -> Chosen:
    """What is selected of what is made, and of the checkpoint's values. It has its flat key as the one part of the path
    under which it is handed on, without the prefix."""
    table, prefix = metadata.table, selection.prefix
    values = [path for path, kind in zip(table.paths, table.kinds.tolist(), strict=True) if kind == Kind.VALUE]
    paths = {metadata.key(path): path for path in (*values, *(path for path, _ in metadata.value_records))}
    paths |= {key: metadata.path_of[key] if one is None else join("", key) for key, one in made.items()}
    selected = select_keys(paths, selection)
    if refused := refused_keys(metadata, [key for key in selected if made.get(key) is not None]):
        raise UnsupportedValueError("; ".join(refused))
    skipped = 0 if prefix is None else len(prefix) + 1
    places = {
        path: below(path, prefix) or path if is_own(path) else join("", key[skipped:]) for key, path in selected.items()
    }
    changed = {path: one for key, path in selected.items() if (one := made.get(key)) is not None}
    missed = [key for key in selected_of(unmade, selection) if key not in selected]  # there may be values of these keys
    return Chosen(places, changed, stored, missed)


def refused_keys(metadata: Metadata, keys: Sequence[str]) -> list[str]:
    """Of keys for which something is made, what is wrong with those that cannot be stored, or whose place in a flat
    state_dict would have another key, or is that of another stored tensor: one of both would be lost. In words that
    obey nothing."""
    if wrong := unstorable(join("", key) for key in keys):
        return each_visible(wrong)
    special = metadata.special_keys
    found = [key for key in keys if "\\" in key or special.get(join("", key), key) != key]
    if not found:
        return []
    return [
        f"{visible(', '.join(found[:5]))}: nothing is made for a key that is escaped, or another one for its sake, as "
        "where a state has both 'a.b' and 'b' in 'a'; make it under a key of its own"
    ]
