"""Where a checkpoint has what is wanted elsewhere: under the same flat key, nested in other dicts.

The places of lists and tuples, int keys and ranks are the same only if they are of the same kind, so keys are compared
with the signs that paths have for these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ..core.cached import cached_property
from ..tree.paths import containers_of, escaped_key, occurs, plain_key, plain_keys, without_escapes

__all__ = ["FlatKeys", "nested_key"]

_IN_LIST = re.compile("/~[lt]")


class FlatKeys:
    """The stored paths of a checkpoint by their flat keys, as far as these are text.

    Args:
        paths: All stored paths.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def found(self, wanted: Sequence[str], asked: Iterable[str]) -> dict[str, str]:
        """The stored path for each wanted one whose flat key one stored path alone has, and no other that is asked for.

        Args:
            wanted: Paths at which nothing is stored.
            asked: All paths that are asked for.
        """
        counts, keys = Counter(map(nested_key, asked)), list(map(nested_key, wanted))
        pairs = zip(wanted, keys, strict=True)
        found = {path: self._plain[key] for path, key in pairs if counts[key] == 1 and key in self._plain}
        if self._escaped:
            found = {path: at for path, at in found.items() if "\\" not in path}
            found |= {path: self._escaped[key] for path in wanted if (key := escaped_key(path)) in self._escaped}
        return found

    def found_of_values(self, wanted: Iterable[str], asked: Collection[str]) -> dict[str, str]:
        """The same for values and objects, of which nothing is stored at these paths and below: also what has such a
        key and others below it, and the places in a list that is stored as one value."""
        found, taken = self.found([*wanted], asked), {*asked, *containers_of(asked)}
        counts = Counter(map(nested_key, asked))
        for path in wanted:
            if path in found or counts[nested_key(path)] > 1:
                continue
            at, rest = self._containers.get(nested_key(path)), ""
            if at is None and (list_at := _IN_LIST.search(path)):
                at, rest = self._plain.get(nested_key(path[: list_at.start()])), path[list_at.start() :]
            if at is not None and at not in taken:
                found[path] = at + rest
        return found

    @cached_property
    def _plain(self) -> dict[str, str]:
        """The stored path of each key of one path only."""
        keys = list(map(nested_key, self._paths))
        counts = Counter(keys)
        counts.update(without_escapes(key) for key in self._escaped if "\\" in key)
        return _by_key(keys, self._paths, counts)

    @cached_property
    def _containers(self) -> dict[str, str]:
        """The same for what other paths lead through."""
        paths = [*containers_of(self._paths)]
        keys = list(map(nested_key, paths))
        return _by_key(keys, paths, Counter(keys))

    @cached_property
    def _escaped(self) -> dict[str, str]:
        """The stored paths that may be flat keys of an export, which escapes some keys of a state that has both "b" in
        "a" and "a.b": the escaped ones, and those that they would be equal to without that."""
        escaped = [path for path in self._paths if "\\" in path] if occurs("\\", self._paths) else []
        plain = {without_escapes(key) for key in plain_keys(escaped)}
        paths = [*escaped, *(path for path in self._paths if plain_key(path) in plain)] if escaped else []
        keys = plain_keys(paths)
        found = _by_key(keys, paths, Counter(keys))
        return {key: path for key, path in found.items() if "~" not in path}


def nested_key(path: str) -> str:
    """What a path has in common with others that nest the same in other dicts."""
    return path[1:].replace("/", ".")


def _by_key(keys: Sequence[str], paths: Sequence[str], counts: Counter[str]) -> dict[str, str]:
    return {key: path for key, path in zip(keys, paths, strict=True) if counts[key] == 1}
