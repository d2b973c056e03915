"""What a checkpoint has of the values that ranks want, and of what they are in: objects, lists of these, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..core.cached import cached_property
from ..core.columns import Mask
from ..core.parts import Arranged
from ..files.metadata import Metadata
from ..tree.names import SCHEDULER, scheduler_of
from ..tree.paths import containers_of, is_own, parent_of, plain_key, rank_of
from ..tree.stored_values import is_dict
from .hints import Hints
from .messages import Hint, WantedPaths
from .stored_paths import StoredPaths
from .wording import DICTS, MISSING, NOT_STORED, OF_TENSORS, value_text

__all__ = ["Draft", "Places", "ValueAnswers"]

Places = dict[str, int | None]
"""The place in the table of what was found for a tensor, by its wanted path."""
_NO_KEYS = ("~l", "~t", "~r")  # how what is below a list, a tuple or ranks' own values goes on


@dataclass(slots=True)
class Draft:
    """What was found so far for one rank, in terms of :class:`.messages.LoadAnswer`; tensors by place in the table."""

    tensors: Mask  # of all in the table
    arrays: set[int] = field(default_factory=set)  # of the tensors, those that objects have as numpy arrays
    values: dict[str, Any] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Arranged] = field(default_factory=dict)
    hints: dict[str, list[Hint]] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # of entries that one rank alone takes, by stored path, that rank


class ValueAnswers:
    """Looks up in one checkpoint what ranks want as values.

    Args:
        metadata: What `.metadata` says.
        stored: What stands where in it.
        hints: What may be meant by keys that are missing.
        ranks: The ranks that load.
        may_be_missing: Whether what has a flat key need not be there.
        find_containers: Finds the containers, by path, in which any rank wants something.

    Attributes:
        asked: The stored paths of values, and of arrays of objects, that ranks were given.
        without_tensors: The stored paths of containers in which a rank's state_dict has no entries, or none but of a
            learning rate's scheduler, as that of an optimizer before its first step.
    """

    def __init__(
        self,
        metadata: Metadata,
        stored: StoredPaths,
        hints: Hints,
        ranks: frozenset[int],
        may_be_missing: Callable[[str], bool],
        find_containers: Callable[[], Collection[str]],
    ) -> None:
        self._metadata, self._stored, self._hints, self._ranks = metadata, stored, hints, ranks
        self._may_be_missing, self._find_containers = may_be_missing, find_containers
        self.asked: set[str] = set()
        self.without_tensors: set[str] = set()

    @cached_property
    def _containers(self) -> Collection[str]:
        return self._find_containers()

    def answer(self, wanted: WantedPaths, moved: Mapping[str, str], places: Callable[[], Places], found: Draft) -> None:
        """Add what is stored of the values; ``moved`` has the stored paths of what is elsewhere than where it is
        wanted, and ``places`` says what was found for tensors."""
        schedulers = {scheduler for path in wanted.values if (scheduler := scheduler_of(path)) is not None}
        self.without_tensors.update(scheduler.removesuffix(SCHEDULER) for scheduler in schedulers)
        asked: dict[str, int | None] = {}
        apart = set[str]()
        if "object" in wanted.values.values():
            asked = dict.fromkeys(wanted.tensors) | places()
            apart = {path for path, present in wanted.values.items() if present not in ("empty", "nothing")}
            apart.update(wanted.spared, schedulers)
        for path, present in wanted.values.items():
            source = moved.get(path) or self._scheduler_at(path, schedulers)
            if "/~l" in source or "/~t" in source:
                for above, below in self._stored.take_apart(source).items():
                    if above in self.asked:
                        self.asked.update(below)
            if present == "object":
                self._answer_object(path, source, asked, apart, wanted.others, found)
            else:
                self._answer_value(path, source, present, wanted.others, found)
        self._answer_parts_of_schedulers(wanted, moved, schedulers, found)

    def _answer_value(self, path: str, source: str, present: str, arrays: Container[str], found: Draft) -> None:
        """A value that is wanted at a path, and would be stored at ``source``; ``arrays``: see ``_answer_object``."""
        stored, of_scheduler = self._stored.values.get(source), scheduler_of(path) is not None
        is_apart = source in self._stored.apart
        is_array = of_scheduler and self._stored.is_array(source) and present not in DICTS
        if of_scheduler and self._stored.looks_like_array(source) and (present == "none" or path in arrays):
            found.arrays.add(self._stored.index[source])
            is_array = True
        is_tensor = source in self._stored.index and not self._stored.is_value(source)
        if present == "own":
            self._answer_own(path, source, found)
        elif present == "bare" and not is_tensor and path in self._containers:
            pass  # as on a rank without a part of what is there, whose empty list a save leaves out
        elif (
            (source in self._stored.values or is_apart) and present != "none" and (present in DICTS) != is_dict(stored)
        ):
            found.unfit[path] = value_text(is_dict(stored))
        elif self._stored.is_value(source) or is_array:
            self._take(source, path, found)
        elif present == "none" or (present in ("list", "bare") and self._stored.is_list(source)) or is_apart:
            self._answer_subtree(path, source, found)
        elif present == "empty" and not is_tensor:
            self._answer_empty(path, source, found)
        elif present == "nothing" and not is_tensor:
            self.without_tensors.add(source)
        elif present == "optional":
            found.skipped[path] = NOT_STORED
        else:
            self.lack(path, source, found)

    def _answer_object(
        self,
        path: str,
        source: str,
        asked: Mapping[str, int | None],
        apart: Container[str],
        arrays: Container[str],
        found: Draft,
    ) -> None:
        """All values and arrays at or below a path, but for those that are ``apart``, as those of objects in this one
        are, which may be stored elsewhere; the tensors there have to be wanted by themselves.

        In other formats an array may look like a tensor; ``arrays`` has the paths at which the object has one.
        ``asked`` has the place that was found for each wanted tensor.
        """
        below = [source] if self._stored.is_value(source) else self._stored.below(source)
        is_list = bool(below) and below[0].startswith(_NO_KEYS, len(source) + 1)
        if not below or is_list or (source in self._stored.values and not is_dict(self._stored.values[source])):
            self.lack(path, source, found)
            return
        inside: set[int | None] | None = None
        for stored in below:
            wanted = path + stored[len(source) :]
            above = wanted
            while above != path and above not in apart:
                above = parent_of(above)
            if above != path:
                continue
            if self._stored.is_value(stored) or self._stored.is_array(stored):
                self._take(stored, wanted, found)
            elif self._stored.looks_like_array(stored) and wanted in arrays:
                found.arrays.add(self._stored.index[stored])
                self._take(stored, wanted, found)
            elif wanted not in asked:
                if inside is None:  # where objects in this one call a tensor otherwise
                    inside = {place for one, place in asked.items() if one.startswith(f"{path}/")}
                if self._stored.index[stored] not in inside:
                    found.unfit[wanted] = self._stored.what_is(stored)

    def _answer_own(self, path: str, source: str, found: Draft) -> None:
        """What every rank has of its own at a path."""
        below = self._stored.below(source)
        if not below or not all(is_own(stored) and parent_of(stored) == source for stored in below):
            self.lack(path, source, found)
            return
        for stored in below:
            self._take(stored, path + stored[len(source) :], found)
        of_rank = {stored: rank_of(stored) for stored in below if stored in self._stored.index}
        if self._metadata.world_size == len(self._ranks) and self._ranks.issubset(of_rank.values()):
            found.own |= of_rank

    def _answer_subtree(self, path: str, source: str, found: Draft) -> None:
        """All that is below a path, if that is values alone."""
        below = self._stored.below(source)
        held = [stored for stored in below if not self._stored.is_value(stored)]
        if held:
            found.unfit[path] = f"{OF_TENSORS}, such as {self._metadata.key(held[0])}"
        elif not below:
            self.lack(path, source, found)
        else:
            for stored in below:
                self._take(stored, path + stored[len(source) :], found)

    def _answer_empty(self, path: str, source: str, found: Draft) -> None:
        """The values below a dict that is empty here, if it has values alone; else it wants nothing."""
        below = self._stored.below(source) if source else []  # all of a checkpoint is asked for by name
        is_dict = below and not any(stored.startswith(_NO_KEYS, len(source) + 1) for stored in below)
        if is_dict and all(map(self._stored.is_value, below)):
            for stored in below:
                self._take(stored, path + stored[len(source) :], found)
        else:
            self.without_tensors.add(source)

    def _answer_parts_of_schedulers(
        self, wanted: WantedPaths, moved: Mapping[str, str], schedulers: set[str], found: Draft
    ) -> None:
        """What else is stored in the dicts that a learning rate's scheduler has now: one may add to them as it goes.

        Lists stay as long as they are, and what is of another kind than what is stored was looked at by itself.
        """
        places = dict[str, str]()
        for path, present in wanted.values.items() if schedulers else ():
            scheduler = scheduler_of(path)
            if scheduler is None or present in ("none", "object"):
                continue
            source, rest = moved.get(path) or self._scheduler_at(path, schedulers), path[len(scheduler) :]
            if rest and source.endswith(rest):
                name = rest.split("/", 2)[1]
                places[f"{scheduler}/{name}"] = f"{source.removesuffix(rest)}/{name}"
        everything = chain(wanted.values, wanted.others, wanted.tensors) if places else ()
        here = {path for path in everything if SCHEDULER in path}
        containers = containers_of(here)
        dicts = containers | {path for path in here if wanted.values.get(path) in ("empty", "nothing")}
        here |= containers
        for path, source in places.items():
            for stored in self._stored.below(source):
                of_path = added = path + stored[len(source) :]
                while parent_of(added) not in dicts:
                    added = parent_of(added)
                fits = added not in here and not added.startswith(_NO_KEYS, added.rindex("/") + 1)
                if fits and (self._stored.is_value(stored) or self._stored.is_array(stored)):
                    self._take(stored, of_path, found)

    def _scheduler_at(self, path: str, wanted: set[str]) -> str:
        """Where a value is stored: at its path; or in the only scheduler there is, which may be elsewhere than the only
        one that is wanted."""
        scheduler = scheduler_of(path) if len(wanted) == 1 else None
        if scheduler is None or len(self._stored.schedulers) != 1:
            return path
        (stored,) = self._stored.schedulers
        return stored + path[len(scheduler) :]

    def _take(self, stored: str, wanted: str, found: Draft) -> None:
        """Take a value, or an array of an object."""
        self.asked.add(stored)
        if stored in self._stored.values:
            found.values[wanted] = self._stored.values[stored]
        else:
            found.tensors[self._stored.index[stored]] = True
            found.renamed.setdefault(stored, []).append(wanted)

    def lack(self, path: str, source: str, found: Draft, is_tensor: bool = False) -> None:
        """What is wanted at a path is not what is stored at ``source``, if anything is."""
        if self._may_be_missing(plain_key(path)) and not self._stored.is_there(source):
            found.skipped[path] = NOT_STORED
        else:
            found.unfit[path] = self._stored.what_is(source, hint=False)
            if found.unfit[path] == MISSING:
                found.hints[path] = self._hints.of(plain_key(source), is_tensor)
