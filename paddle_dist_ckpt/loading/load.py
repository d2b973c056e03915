"""A load, as each of its ranks runs it.

    request   every rank says what it wants; the coordinator reads `.metadata` and tells each what there is of it
    decide    every rank plans and opens the files that it needs; what does not fit is raised on all, nothing touched
    exchange  if not everyone can read for itself: who reads what for whom
    open      ... and whether the readers have their files
    staged    values stored as entries, and tied tensors, are read to buffers and looked at
    read      everything else is read to where it belongs
    restore   if there are objects: they are given their states

If files are gone because a save has replaced the checkpoint meanwhile, the load starts again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ..control.rounds import Messages, ask, only_on
from ..core.messages import encode
from ..errors import CheckpointError
from ..options import LoadOptions
from ..reports import LoadReport
from ..tree.paths import plain_key
from ..tree.state_dict import Leaves, assign_all, flatten
from .context import LoadContext
from .fit import Fit
from .load_coordinator import LoadCoordinator
from .messages import (
    DecideAnswer,
    DecideRequest,
    DoneRequest,
    ExchangeAnswer,
    ExchangeRequest,
    GoOnAnswer,
    LoadAnswer,
    LoadRequest,
    OpenAnswer,
    OpenRequest,
    ReadAnswer,
    StagedRequest,
    WantedPaths,
)
from .own_values import OwnValues
from .reading import DataFiles, Reading, Tally
from .restore import collect_values
from .wanted import WantedState, collect

__all__ = ["load", "load_leaves"]

_logger = logging.getLogger("paddle_dist_ckpt")
_PARTLY = "\nTargets are partly written: load again, or do not use them."
_COMPARED = ("exchange", "strict", "cast", "per_rank", "staging_bytes")  # options that are the same on all ranks
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)


def load(state_dict: dict[Any, Any], context: LoadContext, unique_id: int | None, options: LoadOptions) -> LoadReport:
    """Fill a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.load_state_dict`."""
    scan = functools.cache(lambda: flatten(state_dict, context.adapter))

    def restore(values: Mapping[str, Any], missing: Container[str]) -> None:
        for opened, state in assign_all(state_dict, scan(), values):
            if opened.path in missing:
                continue
            try:
                context.adapter.restore(opened.value, state)
            except Exception as error:
                raise CheckpointError(
                    f"{plain_key(opened.path)}: the {type(opened.value).__name__} did not take its state: "
                    f"{type(error).__name__}: {error}"
                ) from error

    return load_leaves(scan, restore, context, unique_id, options, _PARTLY)


def load_leaves(
    scan: Callable[[], Leaves],
    restore: Callable[[Mapping[str, Any], Container[str]], None],
    context: LoadContext,
    unique_id: int | None,
    options: LoadOptions,
    warning: str = "",
) -> LoadReport:
    """Fill the tensors among the leaves that ``scan`` finds, and have the values for the others restored.

    Args:
        scan: Finds what is to be filled. Called again if the load starts again; it must return the same then.
        restore: Given the values by path; also the paths of which the checkpoint has nothing, or something else.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        options: How to load.
        warning: Added to the message of an error that came after a tensor may have been touched.
    """
    tally = Tally()
    coordinator = LoadCoordinator(context.storage, context.session, options) if context.is_coordinator else None
    while True:
        with DataFiles(context.storage, context.session.rank, tally) as files:
            try:
                report = _Attempt(scan, restore, context, unique_id, options, warning, coordinator, files, tally).run()
            except _Replaced:
                continue
        level = logging.INFO if context.is_coordinator else logging.DEBUG
        _logger.log(level, "loaded id %d from %s: %s", report.unique_id, report.path, report)
        return report


class _Replaced(Exception):
    """The checkpoint was replaced meanwhile; raised on all ranks alike."""


@dataclass(frozen=True, slots=True)
class _Fitted:
    """What this rank wants, what there is of it, and how the two fit."""

    wanted: WantedState
    answer: LoadAnswer
    fit: Fit
    skipped: list[str]

    @property
    def untouched(self) -> set[str]:
        """The paths of which nothing is loaded."""
        return {*self.answer.unfit, *self.answer.skipped, *self.wanted.skipped}


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One rank's part in one attempt to load: a method a round. Each takes what the rounds before it have come to."""

    scan: Callable[[], Leaves]
    restore: Callable[[Mapping[str, Any], Container[str]], None]
    context: LoadContext
    unique_id: int | None
    options: LoadOptions
    warning: str
    coordinator: LoadCoordinator | None
    files: DataFiles
    tally: Tally

    def run(self) -> LoadReport:
        """All rounds."""
        with self.tally.phase("plan"):
            wanted, answer = self._ask("request", self._request, LoadAnswer, LoadCoordinator.request)
            plan = functools.partial(self._plan, wanted, answer)
            fitted, decision = self._ask("decide", plan, DecideAnswer, LoadCoordinator.decide)
        if decision.restart:
            raise _Replaced
        self.files.look_into_cache(decision.shared)
        order = self._agree_on_exchange(fitted.fit, decision) if decision.exchange else None
        reading = self._reading(fitted)
        skipped = list(fitted.skipped)
        if decision.staged:
            staged = functools.partial(self._read_staged, fitted, reading, order)
            problems, _ = self._ask("staged", staged, GoOnAnswer, LoadCoordinator.staged)
            skipped += problems
        try:
            with self.tally.phase("read"):
                read = functools.partial(self._read, fitted, reading, order)
                values, last = self._ask("read", read, ReadAnswer, LoadCoordinator.done)
                self._restore(values, fitted.untouched, decision.objects)
        except CheckpointError as error:
            error.args = (f"{error.args[0]}{self.warning}",)
            raise
        except OSError as error:  # of a process that works alone; from several it comes as RankFailureError
            raise CheckpointError(f"reading failed: {error}{self.warning}") from error
        return self._report(answer, skipped, last)

    def _ask(
        self,
        name: str,
        local: Callable[[], tuple[T, msgspec.Struct]],
        kind: type[A],
        answer: Callable[[LoadCoordinator, Messages], Messages],
    ) -> tuple[T, A]:
        return ask(self.context.session, name, local, kind, only_on(self.coordinator, answer))

    def _request(self) -> tuple[WantedState, LoadRequest]:
        wanted = collect(self.scan(), self.context.adapter, self.options.key_map)
        try:
            folder = self.context.folder()
        except OSError:  # this rank has no such folder; others may read for it
            folder = None
        tensors, others = wanted.tensors, wanted.others
        names = [*tensors.names, *others.values()]
        paths = WantedPaths(tensors.paths, list(wanted.values.items()), list(others), names, wanted.moved)
        choices = {name: str(getattr(self.options, name)) for name in _COMPARED}
        choices["offload"] = str(self.context.offload)
        return wanted, LoadRequest(self.unique_id, choices, folder, encode(paths))

    def _plan(self, wanted: WantedState, answer: LoadAnswer) -> tuple[_Fitted, DecideRequest]:
        session, options = self.context.session, self.options
        own = OwnValues.choose(
            [path for path in answer.tensors.paths if path not in wanted.values],
            answer.saved_by,
            session.rank,
            session.ranks,
            options.per_rank,
        )
        fit = Fit(answer, wanted, options.cast, own, self.context.adapter)
        needed = fit.file_bytes()
        unreachable: dict[str, str] = {}
        if options.exchange != "always" or len(session.ranks) == 1:
            unreachable = self.files.open({name: fit.stored.files[name] for name in needed})
        fitted = _Fitted(wanted, answer, fit, fit.problems + own.skipped + fit.skipped)
        staged = bool(fit.targets.staged.any())
        return fitted, DecideRequest(fit.problems, needed, unreachable, staged, wanted.has_objects)

    def _agree_on_exchange(self, fit: Fit, decision: DecideAnswer) -> ExchangeAnswer:
        """Rounds ``exchange`` and ``open``."""
        counted = zip(decision.files, decision.block_counts, strict=True)
        expected = {info.name: (info, count) for info, count in counted}

        def reach() -> tuple[None, ExchangeRequest]:
            if decision.probe:
                self.files.open(expected)
            return None, ExchangeRequest(sorted(self.files.opened.keys() & expected.keys()), fit.shard_needs())

        def open_mine() -> tuple[None, OpenRequest]:
            return None, OpenRequest(self.files.open({name: expected[name] for name in order.files}))

        with self.tally.phase("open"):
            _, order = self._ask("exchange", reach, ExchangeAnswer, LoadCoordinator.exchange)
            if order.restart or self._ask("open", open_mine, OpenAnswer, LoadCoordinator.opened)[1].restart:
                raise _Replaced
        return order

    def _reading(self, fitted: _Fitted) -> Reading:
        answer, rank = fitted.answer, self.context.session.rank
        on_host = answer.ranks_on_host.get(rank, 1)
        files, tally = self.files.opened, self.tally
        return Reading(self.context, self.options, fitted.fit, files, answer.block_bytes, on_host, tally)

    @staticmethod
    def _read_staged(
        fitted: _Fitted, reading: Reading, order: ExchangeAnswer | None
    ) -> tuple[list[str], StagedRequest]:
        reading.run(True, order.staged if order is not None else None)
        problems = fitted.fit.targets.compare_shared()
        return problems, StagedRequest(problems)

    @staticmethod
    def _read(fitted: _Fitted, reading: Reading, order: ExchangeAnswer | None) -> tuple[dict[str, Any], DoneRequest]:
        reading.run(False, order.main if order is not None else None)
        targets = fitted.fit.targets
        targets.finish(reading.copies)
        return collect_values(fitted.wanted, fitted.answer, targets), DoneRequest()

    def _restore(self, values: Mapping[str, Any], untouched: Container[str], objects: bool) -> None:
        """Hand the values over: in a round, if objects of some rank may refuse them."""

        def restore() -> tuple[None, DoneRequest]:
            self.restore(values, untouched)
            return None, DoneRequest()

        if objects:
            self._ask("restore", restore, GoOnAnswer, LoadCoordinator.restored)
        else:
            restore()

    def _report(self, answer: LoadAnswer, skipped: list[str], last: ReadAnswer) -> LoadReport:
        return LoadReport(
            path=self.context.storage.location,
            unique_id=answer.unique_id,
            bytes_read=self.tally.bytes_read,
            bytes_received=self.tally.bytes_received,
            files_opened=self.tally.files_opened,
            skipped=tuple(skipped),
            unused_keys=tuple(last.unused),
            seconds=self.tally.seconds,
        )
