"""Which part of a checkpoint is meant: by a prefix, by keys, by patterns."""

from __future__ import annotations

import bisect
import fnmatch
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.parts import Arranged, SourceTensor
from ..errors import CheckpointError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..tree.paths import WILDCARD, escaped_key, flat_keys, plain_key, plain_keys, special_keys, without_escapes
from ..visible import visible

__all__ = [
    "Chosen",
    "Selection",
    "below",
    "checked_keys",
    "select",
    "select_keys",
    "selected_of",
    "unread",
    "warn_of_unread",
]

_logger = logging.getLogger("paddle_dist_ckpt")

_MOST_NAMED = 20  # keys that match nothing, in a message, or that are left out, in the log


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a checkpoint: see :func:`paddle_dist_ckpt.load_merged_state_dict`."""

    prefix: str | None = None
    keys: Collection[str] | None = None


class Chosen(NamedTuple):
    """What is selected of a checkpoint, or of what is made of its tensors.

    Attributes:
        paths: Its paths, each with the path under which it is handed on.
        made: Those of them that are not as they are stored, with what they are made of.
        stored: The stored tensors, by flat key; empty if nothing is made of them.
        unmade: The flat keys of what was to be made of them, and is not.
    """

    paths: dict[str, str]
    made: Mapping[str, Arranged]
    stored: Mapping[str, SourceTensor]
    unmade: Sequence[str] = ()

    def keys(self, metadata: Metadata) -> list[str]:
        """The flat keys under which it is handed on: those of the checkpoint, if it is all there as it is here."""
        if not self.made and all(path == place for path, place in self.paths.items()):
            return [metadata.key(path) for path in self.paths]
        places = list(self.paths.values())
        if self.stored and len(set(keys := plain_keys(places))) == len(keys):
            return keys  # of places that are flat keys, which are escaped where they have to be
        return flat_keys(places)


def checked_keys(keys: str | Collection[str] | None) -> Collection[str] | None:
    """Keys or patterns as a user may give them, several or one.

    Raises:
        TypeError: they are something else.
    """
    wanted = [keys] if isinstance(keys, str) else keys
    if wanted is not None and not (isinstance(wanted, Collection) and all(isinstance(key, str) for key in wanted)):
        raise TypeError(f"keys must be a str or several, not {keys!r}")
    return wanted


def select(metadata: Metadata, selection: Selection) -> dict[str, str]:
    """The paths of tensors and values that are selected, each with what is left of it without the prefix.

    Raises:
        CheckpointNotFoundError: nothing matches, or one of the keys matches nothing.
        CheckpointError: without the prefix, two paths would be the same.
    """
    prefix, keys = selection.prefix, selection.keys
    not_read = unread(metadata, selection)
    warn_of_unread(not_read)
    paths = metadata.paths
    chosen = {path: rest for path in paths if (rest := below(path, prefix)) is not None}
    if not chosen and (paths or prefix is not None):
        raise CheckpointNotFoundError(
            f"no key of checkpoint {metadata.unique_id} is below the prefix {_quoted(str(prefix))}; "
            f"{_examples(metadata, paths)}{_hint_at_keys(metadata, prefix)}"
        )
    if keys is not None:
        wanted, unmatched = _matching({metadata.key(path): path for path in chosen}, keys)
        if unmatched:
            reasons = "".join(f"; {visible(key)} is not read: {reason}" for key, reason in list(not_read.items())[:5])
            raise CheckpointNotFoundError(
                f"no key matches {_some(unmatched)}{reasons}; {_examples(metadata, list(chosen))}"
            )
        chosen = {path: rest for path, rest in chosen.items() if path in wanted}
    if len(set(chosen.values())) < len(chosen):
        branches = {escaped_key(path.removesuffix(rest)) for path, rest in chosen.items()} - {prefix}
        raise CheckpointError(
            f"below the prefix {_quoted(str(prefix))} there are equal keys from different branches; a prefix with its "
            f"escapes, such as {_quoted(min(branches))}, means one of them, and so do keys"
        )
    return chosen


def warn_of_unread(not_read: Mapping[str, str]) -> None:
    """Say what is left out since it cannot be read, by flat keys with the reasons."""
    for key, reason in list(not_read.items())[:_MOST_NAMED]:
        _logger.warning("%s is left out: %s", visible(key), reason)
    if len(not_read) > _MOST_NAMED:
        _logger.warning("%d more keys are left out", len(not_read) - _MOST_NAMED)


def select_keys(paths: dict[str, str], selection: Selection) -> dict[str, str]:
    """Those of some flat keys that are selected, with their paths; a prefix is the beginning of a key before a dot.

    Raises:
        CheckpointNotFoundError: nothing matches, or one of the keys matches nothing.
    """
    prefix = "" if selection.prefix is None else f"{selection.prefix}."
    chosen = {key: path for key, path in paths.items() if key.startswith(prefix)}
    if selection.keys is None and (chosen or not prefix):
        return chosen
    wanted, unmatched = _matching(chosen, selection.keys if selection.keys is not None else [f"{prefix}*"])
    if unmatched:
        examples = ", ".join(list(paths)[:5])
        raise CheckpointNotFoundError(f"no key matches {_some(unmatched)}; there are, for example: {examples}")
    return {key: path for key, path in chosen.items() if path in wanted}


def selected_of(keys: Iterable[str], selection: Selection) -> list[str]:
    """Those of some flat keys that are selected; a prefix is the beginning of a key before a dot."""
    prefix = "" if selection.prefix is None else f"{selection.prefix}."
    chosen = {key: key for key in keys if key.startswith(prefix)}
    if selection.keys is None:
        return list(chosen)
    wanted, _ = _matching(chosen, selection.keys)
    return [key for key in chosen if key in wanted]


def below(path: str, prefix: str | None) -> str | None:
    """What is left of a path below a prefix that is made of whole parts, with escapes or without; None if it is not
    below it."""
    if prefix is None:
        return path
    has_escapes = "\\" in prefix
    end = path.find("/", 1 + len(without_escapes(prefix) if has_escapes else prefix))  # keys are not longer than paths
    while end > 0:
        key = plain_key(path[:end])
        if key == prefix or (has_escapes and escaped_key(path[:end]) == prefix):
            return path[end:]
        end = path.find("/", end + 1) if len(key) < len(prefix) else 0
    return None


def unread(metadata: Metadata, selection: Selection) -> dict[str, str]:
    """The flat keys of what is selected but cannot be read, with the reasons."""
    special = special_keys(list(metadata.left_out))  # two may have equal plain ones
    paths = {special.get(path) or plain_key(path): path for path in metadata.left_out}
    paths = {key: path for key, path in paths.items() if below(path, selection.prefix) is not None}
    if selection.keys is not None:
        wanted, _ = _matching(paths, selection.keys)
        paths = {key: path for key, path in paths.items() if path in wanted}
    return {key: metadata.left_out[path] for key, path in paths.items()}


def _examples(metadata: Metadata, paths: Sequence[str]) -> str:
    return "there are, for example: " + (", ".join(visible(metadata.key(path)) for path in paths[:5]) or "none")


def _hint_at_keys(metadata: Metadata, prefix: str | None) -> str:
    """What to do if keys have a prefix that are not nested, as in files of Hugging Face, or one without its dot."""
    whole = str(prefix).rstrip(".")
    if whole != prefix and any(below(path, whole) is not None for path in metadata.paths):
        return f"; a prefix ends without a dot: {_quoted(whole)}"
    pattern = f"{whole}.*"
    if not any(metadata.key(path).startswith(pattern[:-1]) for path in metadata.paths):
        return ""
    return f"; they are not nested, so keys=[{pattern!r}] selects them, or --key {pattern!r} of a command"


def _some(unmatched: list[str]) -> str:
    """Keys that match nothing, as a message names them: the first of very many."""
    more = len(unmatched) - _MOST_NAMED
    return f"[{', '.join(map(_quoted, unmatched[:_MOST_NAMED]))}]" + (f" and {more:,} more" if more > 0 else "")


def _quoted(text: str) -> str:
    """What somebody has typed, or may type, without a backslash for each that is in it."""
    return f"'{visible(text)}'"


def _matching(paths: dict[str, str], keys: Collection[str]) -> tuple[set[str], list[str]]:
    """The paths whose flat key is one of the keys, or matches one as a pattern; and the keys of which there is none.

    There may be as many patterns as flat keys, so each is compared only with those that begin as it does.
    """
    ordered: list[str] = []
    wanted, unmatched = set[str](), dict[str, None]()
    for pattern in keys:
        if pattern in paths:
            wanted.add(paths[pattern])
            continue
        ordered = ordered or sorted(paths)
        near = _beginning_with(ordered, WILDCARD.split(pattern, maxsplit=1)[0])
        found = [paths[key] for key in near if fnmatch.fnmatchcase(key, pattern)]
        wanted.update(found)
        if not found:
            unmatched[pattern] = None
    return wanted, list(unmatched)


def _beginning_with(ordered: list[str], start: str) -> list[str]:
    """Those of some texts, which are in order, that begin with a text."""
    first = bisect.bisect_left(ordered, start)
    end = bisect.bisect_right(ordered, start, first, key=lambda text: text[: len(start)])
    return ordered[first:end]
