"""Paths of a nested state_dict as strings, and the flat keys (tensor ids) made from them.

A path is written like a JSON pointer (RFC 6901), ``/model/layers.0.weight``, so that ``{"a.b": x}`` and
``{"a": {"b": x}}`` stay apart whatever their keys contain. Where a part is not a str key, ``~i`` stands before an int
key, ``~l`` before a list's index, ``~t`` before a tuple's, and ``~r`` before the rank whose own value it is; ``~0`` and
``~1`` mean ``~`` and ``/``.

The flat key of a path is its parts joined by dots, as Paddle's own checkpoints have it. Where two paths would get one
flat key, each of them is escaped instead (:func:`flat_keys`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..core.garbage import no_collections

__all__ = [
    "WILDCARD",
    "Containers",
    "ListIndex",
    "Part",
    "RankIndex",
    "TupleIndex",
    "below",
    "containers_of",
    "escaped_key",
    "flat_keys",
    "format_path",
    "is_own",
    "join",
    "join_all",
    "occurs",
    "own_among",
    "parent_of",
    "parse_path",
    "plain_key",
    "plain_keys",
    "rank_of",
    "special_keys",
    "unstorable",
    "without_escapes",
]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ListIndex(NamedTuple):
    """A place in a list, as part of a path."""

    at: int


class TupleIndex(NamedTuple):
    """A place in a tuple, as part of a path."""

    at: int


class RankIndex(NamedTuple):
    """The rank whose own value it is, as the last part of a path."""

    at: int


Part = str | int | ListIndex | TupleIndex | RankIndex
WILDCARD = re.compile(r"[*?[]")
"""What a pattern of flat keys has, as :mod:`fnmatch` reads them, and what is no pattern has not."""

_SIGNS: dict[type[Any], str] = {int: "~i", ListIndex: "~l", TupleIndex: "~t", RankIndex: "~r"}
_KINDS = {sign: kind for kind, sign in _SIGNS.items()}
_MAX_INDEX = 100_000_000  # more than any list of tensors has
_FEW_CONTAINERS = 1 << 16
_FEW_PLACES = 1 << 20  # of lists, of which none is the path of a leaf
_TOGETHER = 256
_CHARACTERS = 12  # of paths, for each further container


def join(parent: str, part: Part) -> str:
    """``parent`` with one more part."""
    if type(part) is str:
        if "~" in part or "/" in part:
            part = part.replace("~", "~0").replace("/", "~1")
        return f"{parent}/{part}"
    return f"{parent}/{_SIGNS[type(part)]}{_number(part)}"


def occurs(text: str, paths: Iterable[str]) -> bool:
    """Whether a text is in any of these paths: to ask each of them would take longer."""
    return any(text in some for some in _joined(paths))


def _joined(paths: Iterable[str]) -> Iterator[str]:
    """The paths, some hundreds a text, a newline behind each. All characters of a text are as wide as the widest."""
    rest = iter(paths)
    while some := list(itertools.islice(rest, _TOGETHER)):
        yield "\n".join(some) + "\n"


def _narrow(text: str) -> str:
    """A text in the same order whose characters are one byte each, those of UTF-8; separators are what they were."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")


def _widened(text: str) -> str:
    """What :func:`_narrow` has made narrow."""
    return text if text.isascii() else text.encode("latin-1").decode("utf-8", "surrogatepass")


def join_all(parent: str, parts: Collection[Part]) -> list[str]:
    """``parent`` with each of these parts."""
    if set(map(type, parts)) == {str}:
        texts = cast("Collection[str]", parts)
        if not occurs("~", texts) and not occurs("/", texts):
            return [f"{parent}/{part}" for part in parts]
    return [join(parent, part) for part in parts]


def format_path(parts: Iterable[Part]) -> str:
    """A path as a string."""
    return functools.reduce(join, parts, "")


def parse_path(path: str) -> tuple[Part, ...]:
    """The parts of a path.

    Raises:
        ValueError: it is not a path that :func:`format_path` makes.
    """
    if not path.startswith("/"):
        raise ValueError(f"not a path: {path!r}")
    parts = path[1:].split("/")
    return tuple(map(_parse_part, parts) if "~" in path else parts)


def _parse_part(text: str) -> Part:
    if "~" not in text:
        return text
    kind = _KINDS.get(text[:2])
    part: Part = kind(int(text[2:])) if kind is not None else text.replace("~1", "/").replace("~0", "~")
    if join("", part) != "/" + text or (kind not in (None, int) and not 0 <= _number(part) < _MAX_INDEX):
        raise ValueError(f"not a part of a path: {text!r}")
    return part


def _number(part: Part) -> int:
    return part if type(part) is int else part[0]  # type: ignore[index, return-value]


def parent_of(path: str) -> str:
    """The path of the container that a path leads to a part of; nothing for the outermost one."""
    return path.rpartition("/")[0]


def is_own(path: str) -> bool:
    """Whether it is the path of one rank's own value. Its parent is where each rank has its own."""
    return path.rpartition("/")[2].startswith("~r")


def rank_of(path: str) -> int:
    """The rank whose own value is at a path."""
    part = parse_path(path)[-1]
    assert isinstance(part, RankIndex), "it is none of a rank's own"
    return part.at


def own_among(paths: Iterable[str]) -> list[str]:
    """The paths of ranks' own values among others."""
    return [path for path in paths if "/~r" in path and is_own(path)]


def below(path: str, ordered: Sequence[str]) -> slice:
    """Where in some paths, ascending, those below one are."""
    first = bisect.bisect_left(ordered, path + "/")
    return slice(first, bisect.bisect_left(ordered, path + "0", first))  # "0" comes after "/"


def containers_of(paths: Iterable[str]) -> set[str]:
    """The paths of all containers that these paths lead through."""
    found: set[str] = set()
    while paths := set(map(parent_of, paths)) - {""} - found:
        found |= paths
    return found


def flat_keys(paths: Sequence[str]) -> list[str]:
    """The flat key of each path, all different; a function of the set of paths alone.

    A path's key is its parts joined by dots. A path whose key another path also has, or whose parts contain a
    backslash, gets its parts escaped first: ``\\`` before each dot and backslash, and ``\\i``, ``\\l``, ``\\t``,
    ``\\r`` before the number of an int key, a list's index, a tuple's, a rank.
    """
    plain = plain_keys(paths)
    special = _special_keys(paths, plain)
    return [special.get(path, key) for path, key in zip(paths, plain, strict=True)] if special else plain


def special_keys(paths: Sequence[str]) -> dict[str, str]:
    """The flat keys of paths that are not their plain ones, by path; mostly there are none, as hashes alone tell: the
    keys of all take as much memory as the paths."""
    hashes = np.fromiter(map(hash, map(plain_key, paths)), np.int64, len(paths))
    hashes.sort()
    if (hashes[1:] != hashes[:-1]).all() and not occurs("\\", paths):
        return {}
    return _special_keys(paths, plain_keys(paths))


def _special_keys(paths: Sequence[str], plain: Sequence[str]) -> dict[str, str]:
    shared = {key for key, count in Counter(plain).items() if count > 1} if len(set(plain)) < len(plain) else ()
    if not shared and not occurs("\\", plain):
        return {}
    pairs = zip(paths, plain, strict=True)
    return {
        path: escaped for path, key in pairs if (key in shared or "\\" in key) and (escaped := escaped_key(path)) != key
    }


class Containers(NamedTuple):
    """The containers that some paths lead through.

    Attributes:
        too_many: Whether there are so many that a state_dict is refused, by readers and by writers, since the paths say
            so little of each.
        leaves: Those that are leaves as well.
        mixed: Those that are a dict to one path and a list, a tuple or ranks' own values to another.
        too_long: Whether the lists and tuples have far more places, all together, than paths lead through. Each place
            takes memory, and a number of a few digits makes millions of them.
    """

    too_many: bool
    leaves: list[str]
    mixed: list[str]
    too_long: bool = False

    @classmethod
    def of(cls, paths: Iterable[str]) -> Containers:
        """Look at paths, in memory in proportion to their number."""
        different = dict.fromkeys(paths)  # in order: if they are sorted, they nearly are for what follows too
        most = _FEW_CONTAINERS + (sum(map(len, different)) + len(different) - 1) // _CHARACTERS
        ordered, containers = list[str](), 1  # at most: the outermost, and all others of each path
        for text in map(_narrow, _joined(different)):  # without a call for each path
            containers += text.count("/") - text.count("\n")
            if containers > most or "/~" in text or "\0" in text:
                return cls._by_part(sorted(different, key=_by_parts), most)
            ordered += text.replace("/", "\0").replace("\n", "\0\n").split("\n")[:-1]
        if len(ordered) != len(different):  # a path with a newline
            return cls._by_part(sorted(different, key=_by_parts), most)
        ordered.sort()
        if not any(map(str.startswith, itertools.islice(ordered, 1, None), ordered)):
            return cls(False, [], [])
        pairs = itertools.pairwise(ordered)
        return cls(False, [_widened(a[:-1]).replace("\0", "/") for a, b in pairs if b.startswith(a)], [])

    @classmethod
    @no_collections()
    def _by_part(cls, ordered: Sequence[str], most: int) -> Containers:
        count, leaves, mixed = 0, list[str](), dict[str, None]()
        before, kinds = [""], list[str]()  # the kinds of the containers that the path before leads through
        lengths, places, named = list[int](), 0, 0  # of these containers, if they are lists; of all; in all paths
        for path in ordered:
            parts = path.split("/")
            common = next((i for i, (a, b) in enumerate(zip(parts, before, strict=False)) if a != b), len(before))
            if common == len(before) > 1:
                leaves.append("/".join(before))
            places += sum(lengths[common:])
            has_kinds = "/~" in path
            if has_kinds:
                named += path.count("/~l") + path.count("/~t")
            del kinds[common:], lengths[common:]
            for i in range(common, len(parts)):
                kind = parts[i][:2] if has_kinds and parts[i].startswith(("~l", "~t", "~r")) else "dict"
                if len(kinds) == i - 1:
                    kinds.append(kind)
                    lengths.append(0)
                    count += 1
                elif kinds[i - 1] != kind:
                    mixed["/".join(parts[:i])] = None
                if kind in ("~l", "~t"):
                    lengths[i - 1] = max(lengths[i - 1], int(parts[i][2:]) + 1)
            if count > most:
                return cls(True, leaves, list(mixed))
            before = parts
        return cls(False, leaves, list(mixed), places + sum(lengths) > named + _FEW_PLACES)


def _by_parts(path: str) -> str:
    """What to sort paths by to have those that are in one container together."""
    if "\0" in path or "\1" in path:
        path = path.replace("\1", "\1\2").replace("\0", "\1\1")
    return path.replace("/", "\0")


def plain_key(path: str) -> str:
    """A path's parts joined by dots: its flat key unless another path has the same, and what messages call it."""
    if "~" not in path:
        return path[1:].replace("/", ".")
    return ".".join(part if isinstance(part, str) else str(_number(part)) for part in parse_path(path))


def unstorable(paths: Iterable[str]) -> list[str]:
    """Why nothing can be stored at some of these paths, a line each."""
    return [
        f"{plain_key(path)!r}: a key with a lone surrogate cannot be stored"
        for path in itertools.filterfalse(str.isascii, paths)
        if _LONE_SURROGATE.search(path)
    ]


def plain_keys(paths: Sequence[str]) -> list[str]:
    """The :func:`plain_key` of each path."""
    if occurs("~", paths):
        return list(map(plain_key, paths))
    return [path[1:].replace("/", ".") for path in paths]


def escaped_key(path: str) -> str:
    """The flat key that a path has where another one has its plain key, see :func:`flat_keys`."""
    words = []
    for part in parse_path(path):
        if isinstance(part, str):
            words.append(part.replace("\\", "\\\\").replace(".", "\\."))
        else:
            words.append(f"\\{_SIGNS[type(part)][1]}{_number(part)}")
    return ".".join(words)


def without_escapes(key: str) -> str:
    """The plain key of what a flat key was escaped for."""
    return re.sub(r"\\(.)", r"\1", key)
