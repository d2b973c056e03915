"""What a load's caller wants filled on one rank, as the rest of the load knows it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.local_tensors import LocalTensors
from ..core.text import ranks_text
from ..tree.paths import own_among, parent_of, rank_of
from .messages import LoadAnswer, Mismatch
from .recipes import Matching

__all__ = ["WantedState"]


@dataclass(slots=True)
class WantedState:
    """What a state_dict wants of a checkpoint, on one rank.

    Attributes:
        tensors: The tensors that are to be filled.
        values: The paths of values, with what is there now: ``"none"``, ``"empty"`` (a dict without entries),
            ``"nothing"`` (one that is of an object), ``"dict"`` (another), ``"list"`` (or a tuple), ``"bare"``
            (one of these without items), ``"own"`` (a PerRank), ``"object"`` (one of any values), ``"optional"`` (of a
            program) or ``"other"``.
        problems: What cannot be loaded.
        moved: The stored flat key of each path that the key_map says is stored under another.
        skipped: The paths that the key_map says are left as they are.
        left: What else is left as it is, by choice.
        made: The tensors that have recipes.
        has_objects: Whether there are objects to be given their states in the end.
        own: The values of its own that this rank has now, by path.
        left_own: Those of them that are left as they are, which an object is given back with what is stored for it.
        repeated: See :class:`..tree.state_dict.Leaves`.
        needed: The entries that objects have now which refuse a state without one of them, by the objects' paths.
        may_be_disabled: Those of them that are left as they are if an empty state is stored.
        tied: The paths of each tensor that has several.
        may_be_missing: Whether a flat key need not be stored.
    """

    tensors: LocalTensors = field(default_factory=LocalTensors)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[Mismatch] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    left: list[Mismatch] = field(default_factory=list)
    made: Matching = field(default_factory=Matching)
    has_objects: bool = False
    own: dict[str, Any] = field(default_factory=dict)
    left_own: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)
    needed: dict[str, list[str]] = field(default_factory=dict)
    may_be_disabled: set[str] = field(default_factory=set)
    tied: list[list[str]] = field(default_factory=list)
    may_be_missing: Callable[[str], bool] = lambda key: False

    def choose_own(self, answer: LoadAnswer, rank: int, ranks: tuple[int, ...], choice: str) -> set[str]:
        """Choose which rank's value this rank takes, of those of which every rank keeps its own, by what
        ``LoadOptions.per_rank`` says. Returns the stored paths that it does not take."""
        stored: dict[str, dict[int, str]] = {}
        for path in own_among(path for path in answer.tensors.paths if path not in self.values):
            stored.setdefault(parent_of(path), {})[rank_of(path)] = path
        same_size, others = answer.saved_by == len(ranks), set[str]()
        for own in stored.values():
            taken, problem, left = None, "", ""
            if rank in own and (same_size or choice == "by_rank"):
                taken = own[rank]
            elif same_size and own.keys() <= set(ranks) and not self._asks_for_own(own, answer):
                others |= set(own.values())  # entries that an object, or a subtree of values, has on others
                continue
            elif same_size and own.keys() <= set(ranks) and choice != "by_rank":
                verb = "has" if len(own) == 1 else "have"
                problem = f"rank {rank} has saved no value of its own, only {ranks_text(own)} {verb}"
            elif choice == "coordinator":
                taken = own[min(own)]
            elif choice == "by_rank":
                left = f"left as it is, for no rank {rank} has saved its own"
            else:
                problem = (
                    f"every rank has saved its own, on {answer.saved_by} ranks ({ranks_text(own)}), and now there are "
                    f"{len(ranks)}; LoadOptions(per_rank='by_rank') or 'coordinator' says which to take"
                )
            if taken is None:
                paths = (path for one in own.values() for path in answer.renamed.get(one, [one]))
                for path in dict.fromkeys(map(parent_of, paths)):
                    (self.problems if problem else self.left).append(Mismatch.at(path, problem or left))
                    if path in self.own:
                        self.left_own[path] = self.own[path]
            others |= {path for path in own.values() if path != taken}
        return others

    def _asks_for_own(self, own: Mapping[int, str], answer: LoadAnswer) -> bool:
        """Whether there is something here for which a value of ranks' own is stored, at these paths."""
        asked = {parent_of(path) for one in own.values() for path in answer.renamed.get(one, [one])}
        return not (asked.isdisjoint(self.own) and asked.isdisjoint(self.values))
