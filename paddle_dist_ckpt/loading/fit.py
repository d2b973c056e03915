"""How this rank's targets and a checkpoint fit together, and what does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType
from typing import Any

from ..core.cached import cached_property
from ..core.device_memory import DeviceAccess
from ..core.shards import Kind
from ..tree.paths import containers_of, join, plain_key
from ..tree.values import values_of
from .messages import LoadAnswer, Mismatch
from .needs import Needs
from .part_targets import expand
from .repeated import differing
from .resize import Resizing, Rules
from .stored import StoredShards
from .targets import Targets
from .wanted import WantedState
from .wording import (
    A_TENSOR,
    DICTS,
    LEFT_BY_AOA,
    LEFT_EMPTY,
    MEANT,
    MISSING,
    NEEDED,
    NO_ENTRY,
    NOT_STORED,
    OF_TENSORS,
    value_text,
)

__all__ = ["Fit"]

_EMPTY = {"dict": list[Any]()}  # an empty dict, as it is stored


class Fit:
    """A load's plan on one rank: what it needs, and what does not fit.

    ``answer`` may be without what ``stored`` has of it. ``left_out`` are stored values that this rank does not take,
    ``devices`` reaches the memory of devices, if tensors are there, ``resize`` is ``LoadOptions.resize``.

    Raises:
        CheckpointCorruptedError: a value in `.metadata` is none.

    Attributes:
        targets: What is filled.
        needs: What it is filled from.
        problems: What does not fit.
        skipped: What is left as it is, if the load does not fail.
        values: Those of `.metadata`, by path.
        refused: The paths of values that are not taken, as :meth:`look_at_staged` has found.
        stored: What is stored of it.
    """

    def __init__(
        self,
        stored: StoredShards,
        answer: LoadAnswer,
        wanted: WantedState,
        cast: bool,
        left_out: Collection[str],
        devices: DeviceAccess | None,
        resize: Rules = MappingProxyType({}),
    ) -> None:
        self.stored, self.answer, self.wanted = stored, answer, wanted
        self._table = self.stored.table
        self.refused: set[str] = set()
        self._incomplete: set[str] = set()  # paths of objects that are left as they are
        self.problems = wanted.problems + _unfit(answer, wanted) + self._refuse_differing(answer.values)
        self._incomplete |= self._incomplete_objects()
        self.problems += [Mismatch(key, f"{key}: a recipe, and no rank has such a tensor") for key in answer.unmatched]
        resizing = Resizing(resize)
        parts = expand(wanted, answer, self._table, cast, resizing)
        answer.skipped.update(dict.fromkeys(parts.missing, NOT_STORED))
        unread = answer.unread if (self._table.kinds != Kind.TENSOR).any() else ()  # there may be very many
        self.targets = Targets(parts, self._table, {*left_out, *unread}, devices, resizing)
        self.problems += parts.problems + list(dict.fromkeys(self.targets.problems))
        del parts  # there may be very many
        self._table.forget()
        self.needs = Needs(stored, self.targets, answer.block_bytes)
        self.problems += list(map(self._uncovered, self.needs.uncovered))
        left = [Mismatch.at(path, reason) for path, reason in answer.skipped.items()]
        self.skipped = self.problems + wanted.left + left + resizing.notes
        # Now, before anything is touched, for they may be damaged. Their lists become those of the values.
        self.values = values_of(answer.values.items(), kept=bool(wanted.repeated))

    def _incomplete_objects(self) -> set[str]:
        """The paths of objects that would refuse what is stored for them, which is a problem unless it may be missing.

        They would do so when all tensors are filled. It is none if what is stored for a scaler is empty, as it is of a
        disabled one: Paddle disables each in the first step of a model that is not in float16.
        """
        wanted, found = self.wanted, set[str]()
        if not wanted.needed:
            return found
        renamed, untouched = chain.from_iterable(self.answer.renamed.values()), self.untouched
        stored = {*self.answer.values, *self._table.paths, *renamed}
        stored |= containers_of(stored)
        for path, entries in wanted.needed.items():
            lacking = [entry for entry in entries if join(path, entry) not in stored]
            if path in untouched or not lacking:
                continue
            found.add(path)
            key = plain_key(path)
            if path in wanted.may_be_disabled and self.answer.values.get(path) == _EMPTY:
                wanted.left.append(Mismatch(key, f"{key}: {LEFT_EMPTY}"))
                continue
            problem = Mismatch(key, f"{key}: what is stored lacks {', '.join(lacking)}, {NEEDED}")
            is_left = wanted.may_be_missing(key) or all(wanted.may_be_missing(f"{key}.{entry}") for entry in lacking)
            (wanted.left if is_left else self.problems).append(problem)
        return found

    def _uncovered(self, row: int) -> Mismatch:
        """The problem with a target of which not everything is stored, or something repeatedly."""
        path, source = self.targets.path(row), self._table.paths[self.targets.tensor[row]]
        of_what = "" if path == source else f" of {plain_key(source)}"
        region = f"the region {self.targets.box(row)}{of_what}"
        return Mismatch.at(path, f"the checkpoint does not hold {region} exactly once")

    def look_at_staged(self) -> list[Mismatch]:
        """The problems with targets that share memory and with values, by what was read for them."""
        found = self.targets.compare_shared() + self._refuse_values()
        self.problems += found
        return found

    def _refuse_values(self) -> list[Mismatch]:
        """Refuse values, read from entries, that are dicts where the state_dict has something else, or the reverse.

        Values in `.metadata` are not looked at: the coordinator has done that. Returns the problems.
        """
        problems = []
        for stored, is_dict in self.targets.are_dicts():
            for path in self.answer.renamed.get(stored, [stored]):
                kind = self.wanted.values.get(path)
                if kind not in (None, "none", "own") and is_dict != (kind in (*DICTS, "object")):
                    self.refused.add(path)
                    self._incomplete |= {path} if kind == "object" else set()
                    found = value_text(is_dict)
                    text = f"the state_dict has {_PRESENT[kind]}, in the checkpoint it is {found}"
                    problems.append(Mismatch.at(path, text))
        if not self.wanted.repeated:
            return problems
        entries = {
            path: content
            for stored, content in self.targets.contents()
            for path in self.answer.renamed.get(stored, [stored])
        }
        return problems + (self._refuse_differing({**self.answer.values, **entries}) if entries else [])

    def _refuse_differing(self, values: Mapping[str, object]) -> list[Mismatch]:
        """Refuse values that differ and are of one thing in the state_dict; see :func:`.repeated.differing`."""
        wanted, problems = self.wanted, list[Mismatch]()
        if not wanted.repeated:
            return problems
        given = {path for path, present in wanted.values.items() if present == "object"}
        given -= self.answer.unfit.keys() | self.answer.skipped.keys()
        objects = {path for path, first in wanted.repeated.items() if given >= {path, first}}
        for path, other in differing(wanted.repeated, objects, values):
            if path not in self.refused:
                self.refused.add(path)
                self._incomplete |= {one for one in objects if f"{path}/".startswith(f"{one}/")}  # it wants all or none
                text = f"is the same as {plain_key(other)} in the state_dict, but the stored values differ"
                problems.append(Mismatch.at(path, text))
        return problems

    @property
    def untouched(self) -> set[str]:
        """The paths of which nothing is loaded."""
        found = {*self.answer.unfit, *self.answer.skipped, *self.wanted.skipped, *self._unfit_tensors}
        return found | self._incomplete

    @property
    def lacking(self) -> set[str]:
        """The paths of which nothing is loaded, but for those that the caller wants to be left."""
        left = {path for path, reason in self.answer.skipped.items() if reason == LEFT_BY_AOA}
        return {*self.answer.unfit, *self.answer.skipped, *self._unfit_tensors} - left

    @property
    def _unfit_tensors(self) -> set[str]:
        unfit = {problem.path for problem in self.problems}
        return unfit.intersection(self.wanted.tensors.paths) if unfit else set()

    def torn(self, problems: Sequence[Mismatch]) -> list[str]:
        """The paths of distributed tensors that this rank leaves because of these problems, while other ranks may load
        their parts: none that are filled under another path. Problems that the coordinator has found are left out: all
        ranks know of them."""
        paths = {problem.path for problem in problems}.difference(self.answer.unfit)
        untouched = self.untouched if paths else set()
        return self._distributed({path for path in paths if untouched.issuperset(self._tied.get(path, ()))})

    def leave(self, problems: Sequence[Mismatch]) -> list[Mismatch]:
        """Leave the distributed tensors as they are that other ranks have these problems with, some of them perhaps
        nested otherwise there; returns those of the problems that are new to this rank."""
        others = {problem.path: problem for problem in problems}
        here = set(self.wanted.tensors.paths) if problems else set()
        if nested := {one.key: one for path, one in others.items() if path not in here}:
            others |= {path: nested[key] for path in here if path not in others and (key := plain_key(path)) in nested}
        also = {one: problem for path, problem in others.items() for one in self._tied.get(path, ())}
        others = {one: Mismatch.at(one, f"the same tensor as {problem}") for one, problem in also.items()} | others
        known = {*self.answer.skipped, *(problem.path for problem in self.problems)}
        paths = self._distributed(others.keys() - known)
        self.targets.leave(set(paths))
        found = [Mismatch(others[path].key, others[path].text, path) for path in paths]
        self.problems += found
        return found

    @cached_property
    def _tied(self) -> dict[str, list[str]]:
        """All paths of the tensor at each path that is not the only one of its."""
        return {path: group for group in self.wanted.tied for path in group}

    def _distributed(self, paths: Set[str]) -> list[str]:
        """Those of these paths at which distributed tensors are wanted."""
        tensors = self.wanted.tensors
        columns = zip(tensors.paths, tensors.geometry, strict=True) if paths else ()
        return [p for p, number in columns if p in paths and not tensors.geometries[number].plain]


_PRESENT = {
    "none": "None",
    "empty": "a dict",
    "nothing": "a dict",
    "dict": "a dict",
    "list": "a value",
    "bare": "a value",
    "own": "a PerRank",
    "object": "an object",
    "other": "a value",
    "optional": "a value",
}


def _unfit(answer: LoadAnswer, wanted: WantedState) -> list[Mismatch]:
    """The problems with wanted paths at which something of another kind is stored, or nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    if answer.unfit:
        columns = zip(wanted.tensors.paths, wanted.tensors.geometry, strict=True)
        shapes = {path: wanted.tensors.geometries[number].shape for path, number in columns}
    problems = []
    for path, found in answer.unfit.items():
        if answer.foreign and 0 in shapes.get(path, ()) and found.startswith(MISSING):
            continue  # Paddle's own saves leave out what has no elements, and its loads miss nothing
        present = _PRESENT.get(wanted.values.get(path, ""), NO_ENTRY)
        has = "a tensor" if path in shapes else present
        fitting = [hint.key for hint in answer.hints.get(path, ()) if hint.shape in (None, shapes.get(path))]
        moved = wanted.moved.get(path)
        looked = "" if moved is None else f" (looked up as {moved!r})"
        hint = f"; is {fitting[0]!r} {MEANT}" if len(fitting) == 1 else ""
        if present == _PRESENT["none"] and found.startswith((A_TENSOR, OF_TENSORS)):
            key = moved or plain_key(path)
            which = f"prefix={key!r}" if found.startswith(OF_TENSORS) else f"keys={key!r}"
            hint = (
                "; None takes values only: pass tensors or numpy arrays to be filled, or call "
                f"load_merged_state_dict(path, {which})"
            )
        text = f"the state_dict has {has}, in the checkpoint it is {found}{looked}{hint}"
        problems.append(Mismatch.at(path, text))
    return problems
