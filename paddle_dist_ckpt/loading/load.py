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

import bisect
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
from ..core.text import encodable
from ..errors import CheckpointError
from ..files.metadata import Metadata
from ..files.room import Room, bytes_on_disk
from ..folder.checkpoint import read_checkpoint
from ..reports import LoadReport, loaded_line
from ..tree.building import assign_all, build_tree
from ..tree.paths import is_own, parent_of, plain_key
from ..tree.state_dict import Adapter, Leaves, PerRank, flatten
from ..tree.values import from_jsonable
from .exchange_orders import ExchangeRound
from .exchange_parts import ExchangeParts, Replaced
from .fit import Fit
from .in_flight import check_none_in_flight
from .load_coordinator import LoadCoordinator
from .messages import (
    DecideAnswer,
    DecideRequest,
    DoneRequest,
    GoOnAnswer,
    LoadAnswer,
    LoadRequest,
    Mismatch,
    WantedPaths,
)
from .mismatches import some_of
from .reading import DataFiles, LoadContext, Reading
from .stored import StoredShards
from .wanted import WantedState, collect
from .wording import LEFT, NOT_TAKEN

__all__ = ["LeavesLoad", "load"]

_logger = logging.getLogger("paddle_dist_ckpt")
_PARTLY = "\nTargets are partly written: load again, or do not use them."
# Options that are the same on all ranks, some of them as sequences of any kind.
_COMPARED = ("exchange", "strict", "cast", "per_rank")
_NO_END = 1 << 62
_NO_FOLDER = (FileNotFoundError, NotADirectoryError, PermissionError)
_SEQUENCES = ("allow_missing", "allow_unused")
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)


def load(
    state_dict: dict[Any, Any],
    context: LoadContext,
    unique_id: int | None,
    scan: Any = None,
    read: Callable[[int | None], Metadata] | None = None,
    thaws: bool = True,
) -> LoadReport:
    """Fill a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.load_state_dict`.

    Args:
        state_dict: This rank's.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        scan: Finds the leaves that are asked for, and is cached; None for all of the state_dict.
        read: See :class:`LeavesLoad`.
        thaws: Whether optimizers make entries for parameters that are not trained now, if the checkpoint has such.
    """
    if scan is None:
        scan = functools.cache(lambda: flatten(state_dict, context.adapter))
    thaw = functools.partial(_thaw, scan, context.adapter) if thaws else None

    def restore(values: Mapping[str, Any], missing: Container[str]) -> list[Mismatch]:
        left = list[Mismatch]()
        for opened, state in assign_all(state_dict, scan(), values):
            if opened.path in missing:
                continue
            key, kind = plain_key(opened.path), type(opened.value).__name__
            try:
                not_taken = context.adapter.restore(opened.value, state)
            except Exception as error:
                raise CheckpointError(
                    f"{key}: the {kind} did not take its state: {type(error).__name__}: {error}; "
                    f"LoadOptions(key_map={{{key!r}: None}}) leaves it as it is"
                ) from error
            left += [
                Mismatch(f"{key}.{name}", f"{key}.{name}: {LEFT}, for the {kind} {NOT_TAKEN}") for name in not_taken
            ]
        if left and context.is_coordinator:
            _logger.warning("%s: %s", context.storage.location, some_of(map(str, left)))
        return left

    def change(untouched: Container[str]) -> None:
        paths, tensors = scan().tensor_paths, scan().tensors
        context.adapter.change([one for path, one in zip(paths, tensors, strict=True) if path not in untouched])

    def renew(untouched: Container[str], lacking: Container[str]) -> set[str]:
        leaves, adapter = scan(), context.adapter
        tokens = dict(zip(leaves.tensor_paths, map(adapter.token, leaves.tensors), strict=True))
        filled = {token for path, token in tokens.items() if path not in untouched}
        try:
            found = adapter.renew(leaves, filled, {token for path, token in tokens.items() if path in lacking})
        except Exception as error:
            raise CheckpointError(f"master weights that are not stored could not be set: {error}") from error
        return {path for path, token in tokens.items() if path in lacking and token in found}

    return LeavesLoad(scan, restore, context, unique_id, _PARTLY, read, renew, thaw, change).run()


def _thaw(scan: Any, adapter: Adapter, pairs: Sequence[tuple[str, str]]) -> None:
    """See :attr:`LeavesLoad.thaw`. ``scan`` is cached, and finds the leaves anew afterwards."""
    leaves = scan()
    tensors = dict(zip(leaves.tensor_paths, leaves.tensors, strict=True))
    for opened in leaves.objects:
        parameters = [tensors[path] for optimizer, path in pairs if optimizer == opened.path and path in tensors]
        if parameters:
            adapter.make_entries(opened.value, list(map(adapter.token, parameters)))
    scan.cache_clear()


@dataclass(slots=True)
class LeavesLoad:
    """One rank's part in a load that fills tensors among leaves, and has the values for the others restored.

    Attributes:
        scan: Finds the leaves. Called again if the load starts again.
        restore: Given the values by path; also the paths of which the checkpoint has nothing, or something else. May
            return what objects have not taken.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        warning: Added to the message of an error that came after a tensor may have been touched.
        read: On the coordinator, reads the `.metadata` of the checkpoint with this unique_id; after ``scan``.
        renew: Sets what follows from what was filled; given the paths of which nothing is loaded, and those among them
            for which nothing was stored. Returns the paths of what it has set.
        thaw: Has optimizers make entries for parameters that are not trained now, if the checkpoint has such. Given the
            paths of optimizers and parameters; ``scan`` finds the entries from then on. None if that is not wanted.
        change: Told, before any is filled, that all tensors will be but those at these paths.
    """

    scan: Callable[[], Leaves]
    restore: Callable[[Mapping[str, Any], Container[str]], Sequence[Mismatch] | None]
    context: LoadContext
    unique_id: int | None
    warning: str = ""
    read: Callable[[int | None], Metadata] | None = None
    renew: Callable[[Container[str], Container[str]], set[str]] | None = None
    thaw: Callable[[Sequence[tuple[str, str]]], None] | None = None
    change: Callable[[Container[str]], None] | None = None
    _files: DataFiles = field(init=False)
    _coordinator: LoadCoordinator | None = None
    _touched: bool = False

    def run(self) -> LoadReport:
        """Load."""
        context = self.context
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
                        error.args = (f"{error}{self.warning}",)
                    raise
                # The system's, or Paddle's of a device, in one process alone; from several it is RankFailureError.
                except (OSError, RuntimeError) as error:
                    if self._touched:
                        location = context.storage.location
                        raise CheckpointError(f"reading {location} failed: {error}{self.warning}") from error
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
        on_host = fit.answer.ranks_on_host.get(self.context.session.rank, 1)
        reading = Reading(self.context, fit.needs, self._files, on_host)
        skipped = fit.skipped + fit.leave(decision.left)
        if decision.staged:
            with reading.one_pass(True) as run:
                read = functools.partial(run, parts.last(True, run))
                staged = functools.partial(_read_staged, fit, read)
                problems, answered = self._ask("staged", staged, GoOnAnswer, LoadCoordinator.done)
            skipped += problems + fit.leave(answered.left)
        with reading.one_pass(False) as run:
            read = functools.partial(run, parts.last(False, self._touching(run)))
            self._touched = True
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

    def _touching(self, run: Callable[[Sequence[ExchangeRound]], None]) -> Callable[[Sequence[ExchangeRound]], None]:
        """What runs rounds that write to tensors."""

        def noted(rounds: Sequence[ExchangeRound]) -> None:
            self._touched = True
            run(rounds)

        return noted

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
        if answer.thawed and self.thaw is not None:
            self.thaw(answer.thawed)
            self.thaw = None  # once: if entries were not made now, there are none
            return self._wanted()
        return wanted, answer

    def _request(self) -> tuple[WantedState, LoadRequest]:
        wanted = collect(self.scan(), self.context.adapter, self.context.options, self.context.arranger)
        try:
            folder = self.context.storage.identity()
        except _NO_FOLDER:  # others may read for this rank
            folder = None
        tensors = wanted.tensors
        made = wanted.made
        moved, recipes = wanted.moved, [path for path in tensors.paths if path in made.recipes]
        paths = WantedPaths(
            tensors.paths,
            wanted.values,
            tensors.names,
            wanted.others,
            moved,
            recipes,
            made.sources,
            wanted.instead(),
            wanted.records,
            wanted.kept,
            tensors.tied(),
            [] if self.thaw is None else wanted.frozen,
            sorted(wanted.skipped) if "object" in wanted.values.values() else [],
            "" if self.context.arranger is None else self.context.arranger.rules,
        )
        choices = {name: repr(getattr(self.context.options, name)) for name in _COMPARED}
        choices |= {name: repr(list(getattr(self.context.options, name))) for name in _SEQUENCES}
        choices["staging_bytes"] = str(int(self.context.options.staging_bytes))
        choices["resize"] = str(list((self.context.options.resize or {}).items()))
        choices["offload"] = str(self.context.offload)
        choices["aoa_config"] = "None" if self.context.arranger is None else "statements"
        location = encodable(self.context.storage.location)
        return wanted, LoadRequest(
            self.unique_id,
            choices,
            folder,
            encode(paths),
            made.patterns,
            wanted.complete,
            location,
            wanted.key_map,
            this_host() if folder is None else "",
        )

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
        if self.change is not None:
            self.change(fit.untouched)
        read()
        fit.targets.finish(reading.copies)
        renewed = set[str]()
        if self.renew is not None and (lacking := fit.lacking):
            paths = self.renew(fit.untouched, lacking)
            renewed = set(map(plain_key, paths)) - set(map(plain_key, fit.untouched - paths))
        values = _values(fit, Room(lambda: self._bytes_there(fit.answer), fit.answer.cost))
        return (values, renewed), DoneRequest()

    def _restore(self, fit: Fit, values: Mapping[str, Any]) -> tuple[Sequence[Mismatch], DoneRequest]:
        """Give values, and objects their states; returns what was not taken."""
        return self.restore(values, fit.untouched) or [], DoneRequest()


def _read_staged(fit: Fit, read: Callable[[], None]) -> tuple[list[Mismatch], DoneRequest]:
    """Read what is looked at before anything is touched; returns what does not fit."""
    read()
    problems = fit.look_at_staged()
    return problems, DoneRequest(problems=problems, torn=fit.torn(problems))


def _values(fit: Fit, room: Room) -> dict[str, Any]:
    """The values by path: those of `.metadata`, and those that were read from entries of data files. The answer's lists
    become those of the values.

    Where the state_dict has a value, or an empty dict, at a path below which values are stored, these become one tree.
    """
    ours = fit.answer.values.items()
    values = {path: from_jsonable(tree, kept=False) for path, tree in ours if path not in fit.refused}
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
        if present in ("none", "empty", "list", "other") and path not in values:
            first, last = bisect.bisect_left(paths, path + "/"), bisect.bisect_left(paths, path + "0")
            if first < last:
                values[path] = build_tree((p[len(path) :], values.pop(p)) for p in paths[first:last])
    return values
