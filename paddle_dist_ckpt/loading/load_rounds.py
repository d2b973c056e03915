"""A load, as each of its ranks runs it.

    request   every rank says what it wants; the coordinator reads `.metadata` and tells each what there is of it
              (a second time if optimizers have made entries for frozen parameters, since such are stored)
    decide    every rank plans and opens the files that it needs; what does not fit is raised on all, nothing touched
    exchange  if not everyone can read for itself: who reads what for whom
    open      ... and whether the readers have their files
    collectives  what there is to move data by, and whether it works
    staged    values stored as entries, and tied tensors, are read to buffers and looked at
    read      everything else is read to where it belongs (if it is in exchanges of very many shards, part by part:
              each but the last one comes with the next ``exchange``)
    restore   if there are objects: they are given their states

If files are gone because a save has replaced the checkpoint meanwhile, the load starts again.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgspec

from ..control.rounds import Messages, ask, only_on
from ..core.garbage import no_collections
from ..core.host import this_host
from ..core.messages import encode
from ..core.parts import Arranger
from ..core.text import encodable
from ..errors import CheckpointError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..files.room import Room, bytes_on_disk
from ..folder.checkpoint import read_checkpoint
from ..reports import LoadReport, loaded_line
from ..tree.building import build_tree
from ..tree.paths import below, is_own, parent_of, plain_key
from ..tree.state_dict import Leaves, PerRank
from .collecting import collect
from .exchange_orders import ExchangeRound
from .exchange_parts import ExchangeParts, Replaced
from .fit import Fit
from .in_flight import check_none_in_flight
from .load_coordinator import LoadCoordinator
from .messages import (
    NO_STATEMENT,
    STATEMENTS,
    DecideAnswer,
    DecideRequest,
    DoneRequest,
    GoOnAnswer,
    LoadAnswer,
    LoadRequest,
    Mismatch,
)
from .reading import DataFiles, LoadContext, Reading
from .stored import StoredShards
from .wanted import WantedState

__all__ = ["Holder", "LeavesLoad"]

_logger = logging.getLogger("paddle_dist_ckpt")
# Options that are the same on all ranks, some of them as sequences of any kind.
_COMPARED = ("exchange", "strict", "cast", "per_rank")
_NO_END = 1 << 62
_NO_FOLDER = (FileNotFoundError, NotADirectoryError, PermissionError)
_SEQUENCES = ("allow_missing", "allow_unused")
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)


class Holder:
    """What has the leaves that a load fills, on one rank. Of one that has more to it, more methods do something.

    Attributes:
        warning: Added to the message of an error that came after a tensor may have been touched.
        thaws: Whether optimizers make entries for parameters that are not trained now, if the checkpoint has such.
    """

    warning = ""
    thaws = False

    def scan(self) -> Leaves:
        """Find the leaves. Called again if the load starts again."""
        raise NotImplementedError

    def thaw(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Have optimizers make entries, given the paths of each with those of a parameter; :meth:`scan` finds them."""

    def change(self, untouched: Container[str]) -> None:
        """Told, before any is filled, that all tensors will be but those at these paths."""

    def renew(self, untouched: Container[str], lacking: Container[str]) -> set[str]:
        """Set what follows from what was filled.

        Args:
            untouched: The paths of which nothing is loaded.
            lacking: Those among them for which nothing was stored.

        Returns:
            The paths of what was set.
        """
        return set()

    def restore(self, values: Mapping[str, Any], untouched: Container[str]) -> Sequence[Mismatch]:
        """Take the values, by path, and give objects their states; ``untouched`` are the paths of which nothing is
        loaded. Returns what objects have not taken."""
        raise NotImplementedError


@dataclass(slots=True)
class LeavesLoad:
    """One rank's part in a load.

    Attributes:
        holder: Has what is filled.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        read: On the coordinator, reads the `.metadata` of the checkpoint with this unique_id, when the leaves were
            found; None for the one in the folder.
    """

    holder: Holder
    context: LoadContext
    unique_id: int | None
    read: Callable[[int | None], Metadata] | None = None
    _files: DataFiles = field(init=False)
    _coordinator: LoadCoordinator | None = None
    _touched: bool = False
    _thaws: bool = field(init=False)

    def run(self) -> LoadReport:
        """Load."""
        context, self._thaws = self.context, self.holder.thaws
        if context.is_coordinator:
            read = self.read or functools.partial(read_checkpoint, context.storage)
            self._coordinator = LoadCoordinator(context, read)
        with DataFiles(context) as self._files:
            while True:
                try:
                    report = self._attempt()
                except Replaced:
                    self._files.forget()
                    continue
                except CheckpointError as error:
                    if self._touched:
                        error.args = (f"{error}{self.holder.warning}",)
                    raise
                # The system's, or Paddle's of a device, in one process alone; from several it is RankFailureError.
                except (OSError, RuntimeError) as error:
                    if self._touched:
                        location = context.storage.location
                        raise CheckpointError(f"reading {location} failed: {error}{self.holder.warning}") from error
                    raise
                level = logging.INFO if context.is_coordinator and not context.is_part else logging.DEBUG
                _logger.log(level, "%s", loaded_line(report))
                return report

    def _attempt(self) -> LoadReport:
        """All rounds. Each takes what those before it have come to."""
        tally = self._files.tally
        with tally.phase("plan"):
            fit, decision = self._fit()
        if decision.restart:
            raise Replaced
        self._files.look_into_cache(decision.shared)
        parts = ExchangeParts(self.context, fit.needs, self._files, decision, self._ask)
        reading = Reading(self.context, fit.needs, self._files, decision.ranks_on_host)
        skipped = fit.skipped + fit.leave(decision.left)
        if decision.staged:
            with reading.one_pass(True) as run:
                read = functools.partial(run, parts.last(True, run))
                staged = functools.partial(_read_staged, fit, read)
                problems, answered = self._ask("staged", staged, GoOnAnswer, LoadCoordinator.done)
            skipped += problems + fit.leave(answered.left)
        with reading.one_pass(False) as run:

            def touch(rounds: Sequence[ExchangeRound] | None) -> None:
                self._touched = True
                run(rounds)

            read = functools.partial(touch, parts.last(False, touch))
            with tally.phase("read"):
                fill = functools.partial(self._fill, fit, reading, read)
                (values, renewed), _ = self._ask("read", fill, GoOnAnswer, LoadCoordinator.done)
        with tally.phase("read"):
            restore = functools.partial(self._restore, fit, values)
            if decision.objects:  # which may refuse their states
                skipped += self._ask("restore", restore, GoOnAnswer, LoadCoordinator.done)[0]
            else:
                restore()
        return LoadReport(
            path=self.context.storage.location,
            unique_id=fit.answer.unique_id,
            skipped=tuple(one.renewed if one.key in renewed else str(one) for one in skipped),
            skipped_keys=tuple(dict.fromkeys(one.key for one in skipped)),
            unused_keys=tuple(decision.unused),
            **asdict(tally),
        )

    def _bytes_there(self, answer: LoadAnswer) -> int:
        """What the checkpoint has on the disk, as far as this rank sees it. One that sees nothing, for which others
        read, has to believe what is said of the files that these have opened."""
        if not answer.save_id:
            return _NO_END
        try:
            there = bytes_on_disk(self.context.storage, answer.save_id)
        except OSError:
            there = 0
        return there or sum(info.size for info, _ in answer.files)

    def _ask(
        self,
        name: str,
        local: Callable[[], tuple[T, msgspec.Struct]],
        kind: type[A],
        answer: Callable[[LoadCoordinator, Messages], Messages],
    ) -> tuple[T, A]:
        return ask(self.context.session, name, local, kind, only_on(self._coordinator, answer))

    def _wanted(self) -> tuple[WantedState, LoadAnswer]:
        """What this rank wants, and what there is of it."""
        wanted, answer = self._ask("request", self._request, LoadAnswer, LoadCoordinator.request)
        if answer.gone:
            raise CheckpointNotFoundError(answer.gone)
        if answer.thawed:
            self.holder.thaw(answer.thawed)
            self._thaws = False  # once: if entries were not made now, there are none
            return self._wanted()
        return wanted, answer

    def _request(self) -> tuple[WantedState, LoadRequest]:
        context, options = self.context, self.context.options
        wanted, paths = collect(self.holder.scan(), context.adapter, options, context.arranger, self._thaws)
        if self._coordinator is not None:
            self._coordinator.own = wanted.tensors.paths
        try:
            folder = context.storage.identity()
        except _NO_FOLDER:  # others may read for this rank
            folder = None
        choices = {name: repr(getattr(options, name)) for name in _COMPARED}
        choices |= {name: repr(list(getattr(options, name))) for name in _SEQUENCES}
        choices["staging_bytes"] = str(int(options.staging_bytes))
        choices["resize"] = str(list((options.resize or {}).items()))
        choices["offload"] = str(context.offload)
        choices["aoa_config"] = _said_of(context.arranger)
        location = encodable(context.storage.location)
        host = this_host() if folder is None else ""
        return wanted, LoadRequest(self.unique_id, choices, folder, encode(paths), location, host)

    def _fit(self) -> tuple[Fit, DecideAnswer]:
        """How what this rank wants fits to what is stored, and how all ranks go on."""
        wanted, answer = self._wanted()
        answers = [answer]  # to be taken from there: who plans drops the columns where they have been read
        plan = functools.partial(self._plan, wanted, answers)
        del answer
        return self._ask("decide", plan, DecideAnswer, LoadCoordinator.decide)

    @no_collections()
    def _plan(self, wanted: WantedState, answers: list[LoadAnswer]) -> tuple[Fit, DecideRequest]:
        session, options, answer = self.context.session, self.context.options, answers.pop()
        left_out = wanted.choose_own(answer, session.rank, session.ranks, options.per_rank)
        stored, answer = StoredShards(answer, wanted.tensors.paths), answer.without_table()
        fit = Fit(stored, answer, wanted, options.cast, left_out, self.context.adapter.devices, options.resize or {})
        check_none_in_flight(fit.targets)
        needed = fit.needs.file_bytes()
        unreachable: dict[str, str] = {}
        if options.exchange != "always" or len(session.ranks) == 1:
            unreachable = self._files.open([fit.stored.files[name] for name in needed])
        staged = bool(fit.targets.staged.any())
        torn = fit.torn(fit.problems)
        return fit, DecideRequest(fit.problems, needed, unreachable, staged, wanted.has_objects, torn)

    def _fill(
        self, fit: Fit, reading: Reading, read: Callable[[], None]
    ) -> tuple[tuple[dict[str, Any], set[str]], DoneRequest]:
        """Read all that is not staged; returns the values by path, and the keys of what was set to what was filled."""
        self.holder.change(fit.untouched)
        read()
        fit.targets.finish(reading.copies)
        renewed = set[str]()
        if lacking := fit.lacking:
            paths = self.holder.renew(fit.untouched, lacking)
            renewed = set(map(plain_key, paths)) - set(map(plain_key, fit.untouched - paths))
        values = _values(fit, Room(lambda: self._bytes_there(fit.answer), fit.answer.cost))
        return (values, renewed), DoneRequest()

    def _restore(self, fit: Fit, values: Mapping[str, Any]) -> tuple[Sequence[Mismatch], DoneRequest]:
        """Give values, and objects their states; returns what was not taken."""
        return self.holder.restore(values, fit.untouched), DoneRequest()


def _said_of(arranger: Arranger | None) -> str:
    """Whether this rank has statements, in words that are compared with those of others."""
    if arranger is None:
        return repr(None)
    return NO_STATEMENT if arranger.idles else STATEMENTS


def _read_staged(fit: Fit, read: Callable[[], None]) -> tuple[list[Mismatch], DoneRequest]:
    """Read what is looked at before anything is touched; returns what does not fit."""
    read()
    problems = fit.look_at_staged()
    return problems, DoneRequest(problems=problems, torn=fit.torn(problems))


def _values(fit: Fit, room: Room) -> dict[str, Any]:
    """The values by path: those of `.metadata`, and those that were read from entries of data files.

    Where the state_dict has a value, or an empty dict, at a path below which values are stored, these become one tree.
    """
    values = fit.values  # nobody else needs them
    for path in fit.refused:
        values.pop(path, None)
    values |= {
        path: value if i == 0 else copy.deepcopy(value)
        for stored, value in fit.targets.entries(room).items()
        for i, path in enumerate(fit.answer.renamed.get(stored, [stored]))
        if path not in fit.refused
    }
    for path in [path for path in values if is_own(path) and path not in fit.wanted.values]:
        values[parent_of(path)] = PerRank(values.pop(path))
    values |= fit.wanted.left_own
    paths = sorted(values)
    for path, present in fit.wanted.values.items():
        if present in ("none", "empty", "list", "bare", "other") and path not in values:
            inside = paths[below(path, paths)]
            if inside:
                values[path] = build_tree((p[len(path) :], values.pop(p)) for p in inside)
    return values
