"""Which stored entry may be meant by a key that the checkpoint does not have.

The commonest mistake is a container: ``weight`` for ``model.weight``, or ``_layers.`` before all. So the keys are
compared part by part from behind, and what most of the missing ones have too much or too little is taken for it. Else a
key may be mistyped. Never offered is what somebody asks for already, as the entries of other layers mostly are.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..core.cached import cached_property
from ..core.shards import Kind
from ..files.metadata import Metadata
from ..tree.names import may_be_optimizers
from ..tree.paths import is_own, own_among, parse_path, plain_key
from ..visible import MOST_KEY
from .messages import Hint

__all__ = ["Hints"]

# What somebody has stored may have very many keys, or very long ones, so everything that is compared is bounded.
_MOST_HINTS = 20
_MOST_SAMPLES = 50  # missing keys from which it is found out what is too much or too little; two at least
_MOST_COMPARED = 20_000_000  # letters of stored keys, if more samples than two are compared with them
_LETTERS_EACH = 100  # take about as long as the rest of a comparison
_MOST_LACKING = 128  # letters
_MOST_TYPED = 5000  # keys among which a mistyped one is looked for
_LONGEST_TYPED = 40  # letters of a part that may be mistyped
_MOST_PAIRS = 2_000_000  # of letters of such parts that are compared in all
_PAIRS_EACH = 50  # take about as long as the rest of such a comparison
_LEAST_LIKE = 0.6  # of the parts that differ
_LEAST_LIKE_IN_ALL = 0.8
_MOST_PLACES = 5  # that a message names
_VARIABLE = re.compile(r"_\d+\.[wb]_\d+")
Parts = tuple[str, ...]


class Move(NamedTuple):
    """What a wanted key has too much, and what it lacks: one of both is nothing."""

    surplus: Parts
    lacking: Parts


class Hints:
    """Finds out what may be meant.

    Args:
        metadata: What the checkpoint holds.
        wanted: The flat keys that ranks ask for.
    """

    def __init__(self, metadata: Metadata, wanted: Callable[[], Collection[str]]) -> None:
        self._metadata, self._find_wanted = metadata, wanted
        self._left, self._pairs = _MOST_HINTS, _MOST_PAIRS

    def of(self, key: str, is_tensor: bool) -> list[Hint]:
        """What may be meant by a missing key; if it is one only, that is worth telling."""
        if self._left == 0 or not _may_be_meant(key):
            return []
        self._left -= 1
        moved = (other for move in self._moves for other in _moved(key, move))
        found = [other for other in moved if other in self._stored and other not in self._wanted]
        if may_be_optimizers("/" + key):  # another parameter's accumulator would be taken without a word
            found = [stored for stored in found if self._are_all_moved(key, stored)]
        elif not found:
            found = self._mistyped(key)
        return [hint for stored in found[:2] if (hint := self._hint(stored)) and is_tensor == (hint.shape is not None)]

    def nested(self, key: str) -> str | None:
        """Where a flat key stands in the nested state_dict that was saved; None if it is no stored key."""
        path = self._stored.get(key) or self._own.get(key)
        if path is None:
            return None
        parts = parse_path(path)
        return "".join(f"[{part!r}]" if isinstance(part, (str, int)) else f"[{part.at}]" for part in parts)

    def advice(self) -> str:
        """What to do about all missing keys together, if one thing explains several of them."""
        moves = [move for move, count in self._moves.items() if count > 1 or len(self._samples) == 1]
        if len(moves) != 1:
            return ""
        surplus, lacking = (".".join(parts) for parts in moves[0])
        if lacking:
            places = self._places(moves[0])
            if places and "" not in places:
                key_map = {place: f"{place}.{lacking}" for place in places}
                return f"the checkpoint has {lacking!r} within such keys: pass LoadOptions(key_map={key_map!r})"
            return (
                f"the checkpoint has {lacking!r} before such keys: pass {{{lacking!r}: ...}} as it was saved, or "
                f"LoadOptions(key_map=lambda key: {lacking + '.'!r} + key)"
            )
        return (
            f"the checkpoint has no {surplus!r} in such keys: pass what is in it, as it was saved, or "
            f"LoadOptions(key_map=lambda key: key.replace({surplus + '.'!r}, '', 1))"
        )

    def _places(self, move: Move) -> list[str]:
        """Behind which first parts of the missing keys a move is, a few at most. Those of an optimizer's entries are
        left out where there are others, which its entries follow."""
        samples = [key for key in self._samples if not may_be_optimizers("/" + key)] or self._samples
        found = set[str]()
        for key in samples:
            parts = key.split(".")
            others = (other for other in _moved(key, move) if other in self._stored and other not in self._wanted)
            found.update(".".join(parts[: _alike(parts, other.split("."))]) for other in others)
        return sorted(found)[:_MOST_PLACES]

    def advice_on_containers(self) -> str:
        """What to do if whole containers have other names in the checkpoint, and the same keys below."""
        found = self._renamed_containers()
        if not found:
            return ""
        wanted, stored = next(iter(found.items()))
        return f"what is below {wanted!r} is stored below {stored!r}: pass LoadOptions(key_map={found!r})"

    def _renamed_containers(self) -> dict[str, str]:
        """Which stored container may be meant by each that is missing altogether: the only one below which are the same
        keys. With these also that of an optimizer, whose entries may be called otherwise in each run."""
        stored = _by_container(pair for key, path in self._stored.items() if (pair := _nested_parts(key, path)))
        wanted = _by_container(key.split(".", 1) for key in self._wanted if "." in key)
        missing = {
            name: rests
            for name, rests in sorted(wanted.items())
            if len(rests) > 1 and name not in stored and not any(f"{name}.{rest}" in self._stored for rest in rests)
        }
        left = {
            name: rests for name, rests in stored.items() if not any(f"{name}.{rest}" in self._wanted for rest in rests)
        }
        alike = {name: [other for other in left if left[other] == rests] for name, rests in missing.items()}
        found = {name: others[0] for name, others in alike.items() if len(others) == 1}
        if len(set(found.values())) < len(found):
            return {}
        optimizers = [name for name in missing if name not in found and _has_optimizers(missing[name])]
        theirs = [name for name in left if name not in found.values() and _has_optimizers(left[name])]
        if found and len(optimizers) == len(theirs) == 1:
            found[optimizers[0]] = theirs[0]
        return found

    def _are_all_moved(self, key: str, stored: str) -> bool:
        """Whether all that is missing differs by the same, so that it is a container; of entries of an optimizer alone
        only one that is before all can be."""
        others = any(not may_be_optimizers("/" + sample) for sample in self._samples)
        before = key.partition(".")[0] != stored.partition(".")[0]
        alike = set(self._moves.values()) == {len(self._samples)}
        return alike and len(self._samples) > 1 and (others or before)

    @cached_property
    def _wanted(self) -> set[str]:
        return set(self._find_wanted())

    @cached_property
    def _by_last(self) -> dict[str, list[str]]:
        """The stored keys that nobody asks for, by their last parts; none that is much too long."""
        found: dict[str, list[str]] = {}
        for key in self._stored:
            if len(key) <= MOST_KEY + _MOST_LACKING and key not in self._wanted:
                found.setdefault(key.rpartition(".")[2], []).append(key)
        return found

    @cached_property
    def _stored(self) -> dict[str, str]:
        """The path of each stored key."""
        metadata = self._metadata
        paths = metadata.paths
        return {metadata.key(path): path for path in paths if not is_own(path)}

    @cached_property
    def _own(self) -> dict[str, str]:
        """The path of each key below which ranks have something of their own."""
        return {self._metadata.key(path): path for path in own_among(self._metadata.paths)}

    def _hint(self, key: str) -> Hint | None:
        path, table = self._stored[key], self._metadata.table
        place = table.index.get(path)
        if place is None or table.kinds[place] == Kind.VALUE:
            return Hint(key, None)
        return Hint(key, tuple(table.shape_of(place)))

    @cached_property
    def _samples(self) -> list[str]:
        missing = sorted(key for key in self._wanted if key not in self._stored and _may_be_meant(key))
        letters = (sum(map(len, keys)) + _LETTERS_EACH * len(keys) for keys in self._by_last.values())
        most = max(2, min(_MOST_SAMPLES, _MOST_COMPARED // max(letters, default=1)))
        return missing[:: -(-len(missing) // most)] if missing else []

    @cached_property
    def _moves(self) -> dict[Move, int]:
        """What most of the missing keys have too much or too little, and how many; two things only if in doubt."""
        counts = Counter[Move]()
        for key in self._samples:
            alike = self._by_last.get(key.rpartition(".")[2], [])
            counts.update({move for stored in alike if (move := _move(key, stored)) is not None})
        most = max(counts.values(), default=0)
        found = {move: count for move, count in counts.items() if count == most}
        return found if len(found) <= 2 else {}

    def _mistyped(self, key: str) -> list[str]:
        """The stored key that is most nearly the same, and differs in one part only, and not by its numbers."""
        if len(key) <= 3 or len(self._stored) > _MOST_TYPED:
            return []
        alike = {stored: self._likeness(key, stored) for stored in self._stored if stored not in self._wanted}
        best = max(alike, key=alike.__getitem__, default="")
        return [best] if best and alike[best] >= _LEAST_LIKE_IN_ALL else []

    def _likeness(self, key: str, stored: str) -> float:
        """How much is the same in both; 0 if another thing is meant, or if too much would be compared."""
        total = len(key) + len(stored)
        if 2 * min(len(key), len(stored)) < _LEAST_LIKE_IN_ALL * total:
            return 0.0
        wanted, there = key.split("."), stored.split(".")
        differing = [pair for pair in zip(wanted, there, strict=False) if pair[0] != pair[1]]
        if len(wanted) != len(there) or len(differing) != 1:
            return 0.0
        ours, theirs = differing[0]
        if max(len(ours), len(theirs)) > _LONGEST_TYPED:
            return 0.0
        self._pairs -= _PAIRS_EACH + len(ours) * len(theirs)
        if self._pairs < 0:
            return 0.0
        alike = difflib.SequenceMatcher(None, ours, theirs).ratio()
        if alike < _LEAST_LIKE or re.findall(r"\d+", ours) != re.findall(r"\d+", theirs):
            return 0.0
        return 1 - (1 - alike) * (len(ours) + len(theirs)) / total


def _nested_parts(key: str, path: str) -> list[str] | None:
    """The flat key of the outermost container in which a stored entry is, and the rest of its own; None if in none."""
    first, _, inside = path[1:].partition("/")
    name = plain_key(f"/{first}")
    return [name, key[len(name) + 1 :]] if inside and key.startswith(f"{name}.") else None


def _by_container(pairs: Iterable[list[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, rest in pairs:
        found.setdefault(name, set()).add(rest)
    return found


def _has_optimizers(rests: Iterable[str]) -> bool:
    return any(may_be_optimizers(f"/{rest}") for rest in rests)


def _may_be_meant(key: str) -> bool:
    """Whether a missing key is one of which it can be found out what is meant by it."""
    return len(key) <= MOST_KEY and not _VARIABLE.search(key)


def _move(key: str, stored: str) -> Move | None:
    """By what two keys differ, if one only has something that the other has not."""
    wanted, there = tuple(key.split(".")), tuple(stored.split("."))
    start = _alike(wanted, there)
    stop = _alike(wanted[start:][::-1], there[start:][::-1])
    move = Move(wanted[start : len(wanted) - stop], there[start : len(there) - stop])
    return move if bool(move.surplus) != bool(move.lacking) else None


def _alike(first: Sequence[str], second: Sequence[str]) -> int:
    """How many parts are the same, from the first one on."""
    return next(
        (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def _moved(key: str, move: Move) -> Iterator[str]:
    """The keys that end as this one does and differ from it by a move, each once."""
    parts, size = tuple(key.split(".")), len(move.surplus)
    places = (i for i in range(len(parts) - size) if parts[i : i + size] == move.surplus)
    others = dict.fromkeys(".".join((*parts[:i], *move.lacking, *parts[i + size :])) for i in places)
    yield from (other for other in others if _move(key, other) == move)
