"""Where a checkpoint has what is wanted elsewhere: under the same flat key, nested in other dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.cached import cached_property
from ..tree.paths import escaped_key, occurs, plain_key, plain_keys, without_escapes

__all__ = ["FlatKeys"]


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
        counts, keys = Counter(plain_keys([*asked])), plain_keys(wanted)
        pairs = zip(wanted, keys, strict=True)
        found = {path: self._plain[key] for path, key in pairs if counts[key] == 1 and key in self._plain}
        if self._escaped:
            found = {path: at for path, at in found.items() if "\\" not in path}
            found |= {path: self._escaped[key] for path in wanted if (key := escaped_key(path)) in self._escaped}
        return found

    @cached_property
    def _plain(self) -> dict[str, str]:
        """The stored path of each plain key of one path only."""
        keys = plain_keys(self._paths)
        counts = Counter(keys)
        counts.update(without_escapes(key) for key in self._escaped if "\\" in key)
        return _by_key(keys, self._paths, counts)

    @cached_property
    def _escaped(self) -> dict[str, str]:
        """The stored paths that may be flat keys of an export, which escapes some keys of a state that has both "b" in
        "a" and "a.b": the escaped ones, and those that they would be equal to without that."""
        escaped = [path for path in self._paths if "\\" in path] if occurs("\\", self._paths) else []
        plain = {without_escapes(key) for key in plain_keys(escaped)}
        paths = [*escaped, *(path for path in self._paths if plain_key(path) in plain)] if escaped else []
        keys = plain_keys(paths)
        return _by_key(keys, paths, Counter(keys))


def _by_key(keys: Sequence[str], paths: Sequence[str], counts: Counter[str]) -> dict[str, str]:
    return {key: path for key, path in zip(keys, paths, strict=True) if counts[key] == 1 and "~" not in path}
