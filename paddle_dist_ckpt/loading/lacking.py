"""Entries that objects need and that are not stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..tree.paths import parse_path

__all__ = ["lacking_entries"]


def lacking_entries(
    needed: Mapping[str, Sequence[str]], stored: Collection[str], untouched: Collection[str]
) -> dict[str, list[str]]:
    """The entries of objects that are not stored, by the objects' paths; of those that lack any.

    Args:
        needed: The entries that each object must be given, by its path.
        stored: The wanted paths for which something is stored.
        untouched: Paths of objects that get no state anyhow.
    """
    found = {}
    paths = list(map(parse_path, stored)) if needed else []
    for path, entries in needed.items():
        above = parse_path(path)
        there = {one[len(above)] for one in paths if one[: len(above)] == above and len(one) > len(above)}
        if path not in untouched and (lacking := [entry for entry in entries if entry not in there]):
            found[path] = lacking
    return found
