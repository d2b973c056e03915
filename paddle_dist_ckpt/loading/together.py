"""What the ranks of a load want together, and whether that is the same for all that have parts of one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..core.parts import Arranged, WantedTensor
from ..tree.paths import containers_of, plain_key
from .flat_keys import nested_key
from .key_map import OWN_KEY
from .messages import WantedPaths, WantedRecord

__all__ = ["check_arranged_alike", "check_same_sources", "containers_in", "found_nowhere", "keys_of", "wanted_together"]


def found_nowhere(by_rank: Iterable[Mapping[str, bool]]) -> list[str]:
    """The keys that are there on some rank and found on none; by rank whether each is found."""
    found: dict[str, bool] = {}
    for keys in by_rank:
        for key, here in keys.items():
            found[key] = here or found.get(key, False)
    return [key for key, anywhere in found.items() if not anywhere]


def keys_of(wanted: Iterable[WantedPaths]) -> set[str]:
    """The flat keys under which what ranks want would be stored."""
    pairs = {(one.moved.get(path), path) for one in wanted for path in (*one.tensors, *one.values, *one.kept)}
    return {moved or plain_key(path) for moved, path in pairs}  # of each once, for ranks mostly want the same


def containers_in(wanted: Iterable[WantedPaths]) -> set[str]:
    """The paths of the containers in which ranks want something."""
    return containers_of(path for one in wanted for path in (*one.tensors, *one.values, *one.kept))


def check_arranged_alike(wanted: Sequence[WantedPaths], arranged: Mapping[str, Mapping[str, Arranged | None]]) -> None:
    """See that ranks with different rules make a tensor that they both want of the same, if it has no recipe.

    Raises:
        ValueError: they do not. A tensor would be put together of several.
    """
    rules_of: dict[str, str] = {}
    for paths in wanted if len(arranged) > 1 else ():
        made = set(paths.made)
        for key in (record.key for path, record in paths.records.items() if path not in made):
            ours, theirs = arranged[paths.rules], arranged[rules_of.setdefault(key, paths.rules)]
            if ours.get(key, OWN_KEY) != theirs.get(key, OWN_KEY):
                raise ValueError(
                    f"aoa_config: by the statements of some ranks {key} is made of other things than by those of others"
                )


def check_same_sources(wanted: Mapping[int, WantedPaths]) -> None:
    """See that the ranks that have parts of one tensor take them of one thing; by rank what each wants.

    A rank that has neither recipes nor a key_map takes what is stored under a tensor's own key. Ranks may have a tensor
    nested in different dicts, unless one of them has several paths of its key.

    Raises:
        ValueError: they do not. A tensor would be put together of several.
    """
    if not any(paths.instead for paths in wanted.values()):
        return
    of_ranks: dict[int, Collection[str]] = {
        rank: paths.instead or (() if paths.moved or paths.made else paths.tensors) for rank, paths in wanted.items()
    }
    several = {key for here in of_ranks.values() for key, count in Counter(map(nested_key, here)).items() if count > 1}
    first: dict[str, str] = {}  # a path of each tensor
    said: dict[str, dict[str, int]] = {}  # of what each tensor is made, each with a rank that says so
    for rank, here in of_ranks.items():
        for path in here:
            key = nested_key(path)
            one = first.setdefault(path if key in several else key, path)
            said.setdefault(one, {}).setdefault(wanted[rank].instead.get(path, OWN_KEY), rank)
    lines = [
        f"{plain_key(path)}: {'; '.join(f'rank {rank}: {what}' for what, rank in found.items())}"
        for path, found in sorted(said.items())
        if len(found) > 1
    ]
    if lines:
        raise ValueError(
            "recipes and key_map make a tensor, of which ranks have parts, of different things:\n" + "\n".join(lines)
        )


def wanted_together(wanted: Sequence[WantedPaths]) -> dict[str, WantedTensor]:
    """What is said of each tensor to whoever arranges what it is made of, by flat key.

    Raises:
        ValueError: ranks want one in different shapes.
    """
    records: dict[str, list[WantedRecord]] = {}
    for record in (record for paths in wanted for record in paths.records.values()):
        records.setdefault(record.key, []).append(record)
    together: dict[str, WantedTensor] = {}
    for key, said in records.items():
        shape, dtype = said[0].shape, said[0].dtype
        if any(record.shape != shape for record in said):
            shapes = sorted({str(list(record.shape)) for record in said})
            raise ValueError(f"aoa_config: ranks want {key} in different shapes: {', '.join(shapes)}")
        offsets = sorted({record.offset for record in said if record.offset is not None})
        together[key] = WantedTensor(shape, dtype, offsets or [(0,) * len(shape)])
    return together
