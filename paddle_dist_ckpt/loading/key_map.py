"""What the user says of keys: where wanted entries are stored (``LoadOptions.key_map``), and patterns of keys."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..files.metadata import Metadata
from ..tree.paths import WILDCARD, Part, containers_of, join, plain_key

__all__ = [
    "LEFT_OUT",
    "OWN_KEY",
    "apply",
    "leaves_alone",
    "left_whole",
    "matched",
    "matcher",
    "path_of_key",
    "unheard",
    "unmatched_text",
]

OWN_KEY = "what is stored under its own key"
"""What a wanted tensor is, in words, if nothing else is said of it."""
LEFT_OUT = "nothing, for key_map leaves it as it is"
"""The same of one for which a key_map has None."""

KeyMap = Mapping[str, "str | None"] | Callable[[str], "str | None"]


def apply(key_map: KeyMap | None, keys: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """What a key_map says of wanted entries.

    Args:
        key_map: A function of flat keys; or a mapping whose keys are flat keys, or the first parts of some.
        keys: The flat keys of the wanted entries, by their paths.

    Returns:
        The stored flat key for each path that is stored under another key; and the paths that are left as they are.

    Raises:
        TypeError: a function returned something else than a key or None.
        ValueError: a function failed.
    """
    moved: dict[str, str] = {}
    skipped: set[str] = set()
    if key_map is None:
        return moved, skipped
    find = key_map if callable(key_map) else _lookup(key_map)
    for path, key in keys.items():
        try:
            stored = find(key)
        except Exception as error:
            raise ValueError(f"key_map({key!r}) failed: {type(error).__name__}: {error}") from error
        if stored is None:
            skipped.add(path)
        elif not isinstance(stored, str):
            raise TypeError(f"key_map({key!r}) returned {stored!r}; a key is due, or None to leave the entry as it is")
        elif stored != key:
            moved[path] = stored
    return moved, skipped


def matched(key_map: KeyMap | None, keys: Iterable[str]) -> dict[str, bool]:
    """Whether each key of a mapping is one of some flat keys, or the first parts of one. Of a function, nothing."""
    if not isinstance(key_map, Mapping):
        return {}
    found = dict.fromkeys(key_map, False)
    for key in keys:
        found.update((first, True) for first in _first_parts(key) if first in found)
    return found


def unheard(key_map: KeyMap | None, entries: Mapping[str, tuple[str, str | None]]) -> list[str]:
    """The flat keys of entries of objects of which a function says something, and something else than of their objects,
    with which they go. That an entry is stored under its own key it says of all that it does not know, too.

    Args:
        entries: The flat key of each one's object, and that of what is stored for this, by the entries' flat keys.
    """
    found = list[str]()
    if key_map is None or isinstance(key_map, Mapping):
        return found
    for key, (owner, stored) in entries.items():
        with suppress(Exception):  # it may know of the keys alone that are asked for
            if key_map(key) not in (key, None if stored is None else stored + key[len(owner) :]):
                found.append(key)
    return found


def leaves_alone(key_map: KeyMap | None, key: str) -> bool:
    """Whether a mapping says nothing of a flat key, nor of any key below it. Of a function it is not known; it may."""
    if not isinstance(key_map, Mapping):
        return True
    return not any(f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}.") for one in key_map)


def left_whole(key_map: KeyMap | None, keys: Mapping[str, str]) -> list[str]:
    """The paths of which a mapping leaves all as it is that has their flat key, or is below it; ``keys`` has these by
    path. Of a function it is not known."""
    if not isinstance(key_map, Mapping):
        return []
    find = _lookup(key_map)
    loaded = {first for key, stored in key_map.items() if stored is not None for first in _first_parts(key)}
    return [path for path, key in keys.items() if find(key) is None and key not in loaded]


def unmatched_text(entry: str, objects: Iterable[str] = ()) -> str:
    """That a key of a mapping is that of nothing, in words; ``objects`` are the keys of those with which all goes that
    they have."""
    bare = entry.rstrip(".*")
    hint = f" (leading parts of keys have no dot or star at the end: {bare!r})" if bare not in ("", entry) else ""
    if owners := [key for key in objects if entry.startswith(f"{key}.")]:
        hint = hint or f" (what an object has goes with it: {max(owners, key=len)!r})"
    return f"{entry!r} matches none of the wanted keys{hint}"


def _lookup(keys: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """A mapping as a function: the longest of its keys that is a flat key, or its first parts, counts."""

    def find(key: str) -> str | None:
        for first in _first_parts(key):
            if first in keys:
                stored = keys[first]
                return None if stored is None else stored + key[len(first) :]
        return key

    return find


def _first_parts(key: str) -> Iterator[str]:
    """A flat key, and what it begins with before each dot, the longest first."""
    end = len(key)
    while end >= 0:
        yield key[:end]
        end = key.rfind(".", 0, end)


def path_of_key(metadata: Metadata, parts_at: Callable[[str], Mapping[Part, Any]]) -> Callable[[str], str]:
    """A function that gives the path of a flat key in a checkpoint.

    Of a key that the checkpoint does not have it is where that would be: in the container whose key is the longest
    beginning of it; or in a list or tuple that is stored as one value, which is taken apart for it. A key that several
    paths have unless they are escaped, as they all are, is that of none. ``parts_at`` gives the parts of what is such a
    list, by its path, and nothing of anything else.
    """
    paths = metadata.paths
    ambiguous = {key for key, count in Counter(map(plain_key, metadata.special_keys)).items() if count > 1}
    by_key = metadata.path_of
    containers = {plain_key(container): container for container in containers_of(paths)}

    def find(key: str) -> str:
        if key in by_key:
            return by_key[key]
        if key in ambiguous:
            path = join("", key)
            while path in by_key.values():
                path = join(path, "")
            return path
        if key in containers:
            return containers[key]
        for above in itertools.islice(_first_parts(key), 1, None):
            below = key[len(above) + 1 :]
            if containers.get(above):  # and not all of the state_dict, for an empty key before a dot
                return join(containers[above], below)
            number, *rest = below.split(".")
            if number.isdecimal() and above in by_key and (parts := parts_at(by_key[above])):
                place = type(next(iter(parts)))
                return functools.reduce(join, rest, join(by_key[above], place(int(number))))
        return join("", key)

    return find


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that says whether a flat key matches one of some patterns, as :func:`fnmatch.fnmatchcase` has them."""
    keys = {pattern for pattern in patterns if WILDCARD.search(pattern) is None}
    others = [pattern for pattern in patterns if pattern not in keys]
    if not others:
        return keys.__contains__
    match = re.compile("|".join(map(fnmatch.translate, others))).match
    return lambda key: key in keys or match(key) is not None
