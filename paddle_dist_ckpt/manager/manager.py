"""A manager of training steps: when to save, where, which steps to keep, which one to start from.

    root/step-00000100/     a checkpoint of its own, which can be copied away; its unique_id is the step
    root/step-00000200/

The coordinator decides what must be the same on all ranks: which steps exist, which is the latest or the best one, and
which may go. So all ranks make the same calls in the same order. Only :meth:`CheckpointManager.should_save` waits for
nobody; :mod:`.control.appointment` explains how it can know.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ..control.session import Ending
from ..core.protocols import ControlSession
from ..core.threads import after_fork
from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, DurabilityUnknownError
from ..folder.delete import Deletion
from ..folder.nothing import steps_text
from ..options import LoadOptions, SaveOptions, as_integer, as_number
from ..reports import SaveReport
from ..saving.async_save import AsyncSave
from ..saving.save import After
from ..storage import LocalStorage, bounded_folders, local_path
from ..wiring import (
    Find,
    check_bool,
    connected,
    enter_with,
    load_with,
    paddles,
    pass_over_last_save,
    refuse,
    save_kind,
    save_with,
)
from .agreement import agree
from .held_log import held_back
from .preparation import Preparation
from .removal import remove_together
from .retention import Retention, checked_count
from .schedule import Schedule
from .sigterm import on_sigterm
from .steps import NOTE, Steps, check_seconds, checked_metrics, checked_step, step_folder

__all__ = ["CheckpointManager"]

_logger = logging.getLogger("paddle_dist_ckpt")
_ALONE = (
    "the ranks of a manager restore together, so LoadOptions(no_dist=True) has no effect; load_state_dict(state, "
    "path, options=...) of a step's folder loads on one rank alone"
)


class CheckpointManager:
    """Saves a training job's state at some of its steps, keeps some of them, and finds the one to resume from.

    Every rank creates one, with the same arguments, and makes the same calls in the same order. Leaving its ``with``
    block closes it.

    Args:
        root: The folder of the steps' folders: a str or a PathLike. Hosts may have folders of their own.
        keep_last: How many of the latest steps to keep; None keeps all.
        keep_every: Also keep the steps that are multiples of this, for good.
        best: Also keep the best step: the name of a metric, and whether ``"min"`` or ``"max"`` is best.
        save_interval_steps: Save at multiples of this.
        save_interval_seconds: Save when this much time has passed since the last save. With neither interval, every
            step is saved.
        async_save: Save in the background.
        options: How to save. Its ``timeout`` applies to all of the manager's calls, except that ``restore`` loads with
            the options passed to it. Its ``user_metadata`` is stored in addition to the manager's own.
        process_group: The Paddle group whose ranks train together; None for the default group.
        coordinator_rank: Global rank of the coordinator, which decides; must be the same on every rank.
        save_on_sigterm: If a rank gets SIGTERM, save at the next step that all ranks can agree on, and set
            :attr:`stopping`. Launchers repeat the signal; one that arrives more than 10 seconds later ends the process
            as if there were no manager. That goes for what follows :meth:`close` too. Such a manager must be created on
            the main thread.

    Raises:
        ValueError: an argument is out of range, or not the same on every rank; or ``root`` is a file, a step's
            folder, or a checkpoint's.
        CheckpointTimeoutError: a rank did not join the call.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import CheckpointManager
        >>> state = {"model": paddle.nn.Linear(4, 2)}
        >>> with CheckpointManager("run", save_interval_steps=10, keep_last=2, async_save=False) as manager:
        ...     for step in range((manager.restore(state) or 0) + 1, 41):
        ...         saved = manager.save(step, state)  # None if the step is not due
        ...     manager.all_steps()
        [30, 40]
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
        save_interval_steps: int | None = None,
        save_interval_seconds: float | None = None,
        async_save: bool = True,
        options: SaveOptions | None = None,
        process_group: Any = None,
        coordinator_rank: int = 0,
        save_on_sigterm: bool = False,
    ) -> None:
        self._options, check = enter_with(options, SaveOptions)
        self._ranks = connected(process_group, coordinator_rank, self._options)
        self._async_save = async_save
        self._preparation = Preparation(self._ranks, self._options, async_save)
        arguments = self._arguments = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "best": best,
            "save_on_sigterm": save_on_sigterm,
            "save_interval_steps": save_interval_steps,
            "save_interval_seconds": save_interval_seconds,
        }
        with self._session("CheckpointManager") as made, made as session:
            check()  # all of this in the session, so that the other ranks hear of it
            check_bool("async_save", async_save)
            place = root.location if isinstance(root, LocalStorage) else local_path(root, "root")
            self._root = Path(place)  # absolute, for the working directory may change
            self._retention = Retention(keep_last, keep_every, best)
            save_interval_steps = checked_count("save_interval_steps", save_interval_steps)
            check_seconds(save_interval_seconds)
            if save_on_sigterm and threading.current_thread() is not threading.main_thread():
                raise ValueError("a manager with save_on_sigterm can only be made on the main thread")
            self._steps = Steps(self._root)
            self._folders = functools.partial(bounded_folders, self._options.progress_timeout, self._ranks.rank)
            plain = {name: as_number(value) for name, value in arguments.items()}  # who was told them may have numpy's
            said = {name: repr(value if plain[name] is None else plain[name]) for name, value in arguments.items()}
            said["async_save"] = repr(async_save)
            with self._folders() as opened:  # ranks may have folders of their own
                self._steps.check_root(opened)
            name = agree(session, said, self._root.name)
            if (idle := self._retention.idle) and session.rank == session.coordinator:
                _logger.warning("%s: without keep_last every step is kept, with or without %s", self._root, idle)
        every_step = save_interval_steps is None and save_interval_seconds is None
        self._interval = 1 if every_step else save_interval_steps
        topic = f"steps of {name}"  # the coordinator's name for them, as ranks' own may differ
        self._schedule = Schedule(self._ranks.hub, topic, self._options.timeout, interval_seconds=save_interval_seconds)
        self._renew_lock()
        after_fork(self._renew_lock)  # one that a thread has held, which is not there, would stay so for ever
        self._reading: int | None = None
        self._decided: tuple[int, bool] | None = None  # the step that came last, and whether a save of it is due
        self._pending: AsyncSave | None = None
        self._pending_step = -1
        self._closed = False
        self._is_behind = True  # no save was committed since it was made, or since one has failed
        self._told: set[str] = set()  # what was warned of, which is said once
        self._end_of_sigterm = on_sigterm(self._schedule.request) if save_on_sigterm else None

    def _renew_lock(self) -> None:
        # Guards what is being read against the removal of steps in the background. A handler of a signal may ask, or
        # save, while the same thread asks.
        self._lock = threading.RLock()

    # -- when

    def should_save(self, step: int) -> bool:
        """Whether a save is due at this step, the same on every rank. Call it once per step, with increasing steps.

        It waits for nobody and takes microseconds. Only if time or a signal decides, a rank that reaches its next step
        while the ranks are being asked how far they are waits for the decision.
        """
        step = checked_step(step)
        if self._pending is not None and self._pending.raised:
            self._reconsider(self._pending)
        if self._decided is None or self._decided[0] != step:
            self._preparation.begin()
            announced = self._schedule.is_due(step)
            self._decided = (step, announced or (self._interval is not None and step % self._interval == 0))
        return self._decided[1]

    def _reconsider(self, pending: AsyncSave) -> None:
        """When all ranks have been told how a save has ended: if it has failed, its step is due as before it began."""
        if not pending.failed:
            return
        self._steps.forget(self._pending_step)
        if self._decided == (self._pending_step, False):
            self._decided = None

    @property
    def stopping(self) -> bool:
        """Whether a rank got SIGTERM and the resulting save is due or done: time to leave the loop."""
        return self._schedule.stopping

    # -- save

    def save(
        self, step: int, state: dict[Any, Any], metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> AsyncSave | SaveReport | None:
        """Save a step if it is due.

        Args:
            step: The step; from 0 to below 10**18.
            state: What :func:`paddle_dist_ckpt.save_state_dict` takes.
            metrics: Numbers by name that tell how good the step is; the coordinator's are used.
            force: Save even if it is not due; the same on every rank.

        Returns:
            What save_state_dict returns; None if the step is not due.

        Raises:
            DurabilityUnknownError: the step is committed, and counts, but a crash of the machine might undo that.
            CheckpointError: see save_state_dict. Also the failure of an earlier background save whose result nobody has
                asked for; but not when :attr:`stopping`.
        """
        if self._closed:
            raise CheckpointError("the manager is closed")
        try:
            step = checked_step(step)
        except ValueError as error:
            if force or self._interval == 1:  # the other ranks save, and wait for this one
                refuse(self._ranks, self._options, error, save_kind(self._async_save))
            raise
        if not self.should_save(step) and not force:
            if self._pending is not None and self._pending_step == step:
                _logger.info(
                    "a save of step %d was begun just now; wait() tells how it ends, force=True repeats it", step
                )
            elif self._steps.has_just_met(step):
                _logger.info("step %d was saved, or restored, just now: force=True saves it again", step)
            return None
        if self.stopping:
            self._pass_over_failures()
        note: dict[str, Any] = {"step": step, "metrics": {}}
        wrong: Exception | None = None
        try:
            note["metrics"] = checked_metrics(metrics)
        except Exception as error:
            wrong = error
        options = dataclasses.replace(self._options, user_metadata={**(self._options.user_metadata or {}), NOTE: note})
        find = paddles(self._ranks, state, check=functools.partial(self._check_save, wrong), of_any_mode=True)
        after = After(functools.partial(self._retain, step), self._was_behind, self._remove_abandoned)
        folder = step_folder(self._root, step)
        try:
            saved = save_with(self._ranks, find, folder, step, self._async_save, options, after)
        except DurabilityUnknownError:  # it is there, and counts
            self._is_behind = False
            self._has_saved(step)
            raise
        except BaseException:  # an interrupt, too: it is an error to the other ranks
            if self._decided == (step, False):  # it was to be saved by force
                self._decided = None
            raise
        if isinstance(saved, AsyncSave):
            self._pending, self._pending_step = saved, step
        self._has_saved(step)
        return saved

    def _check_save(self, wrong: Exception | None) -> None:
        """Raises what is wrong with the arguments, where the other ranks hear of it, and looks for the root."""
        if wrong is not None:
            raise wrong
        with self._folders() as opened:
            self._steps.check_same(opened)

    def _was_behind(self) -> bool:
        """Whether a save begins that no committed one came before. Until it is committed, the next one is behind.

        Asked when no other save of the group goes on, and so when it is known how the last one ended.
        """
        was_behind, self._is_behind = self._is_behind, True
        return was_behind

    def _has_saved(self, step: int) -> None:
        self._meet(step)
        self._decided = (step, False)  # to save a step twice would be of no use
        self._schedule.saved()

    def _meet(self, step: int) -> None:
        with self._folders() as opened, suppress(OSError, CheckpointError):  # the step is saved, or restored
            self._steps.meet(step, opened)

    def _pass_over_failures(self) -> None:
        """Failures of earlier saves are logged, and must not prevent the last one, whatever and whose they are."""
        with suppress(Exception):
            self.wait()
        with suppress(Exception):
            pass_over_last_save(self._ranks)  # it may be another manager's

    def prepare(self, state: dict[Any, Any]) -> None:
        """Let a thread prepare the memory for the first background save, which would stop training to allocate it.

        It takes as much as this rank's part, at most ``snapshot_bytes``, and nothing if the host, or the container, has
        less than twice as much free or the state is on a device; it stops where less than as much is left. After
        :meth:`restore`, :meth:`should_save` does this by itself, for what the state had then: optimizers may make their
        variables in their first step.
        """
        self._preparation.expect(state)
        self._preparation.begin()

    def _remove_abandoned(self, session: ControlSession) -> None:
        """Remove steps that a run before has not finished: a first save may need their room, or one after a failure."""

        def begin() -> dict[int, Deletion]:
            with held_back(_logger), self._lock:
                try:
                    self._steps.check_same(opened)
                    littered = self._steps.littered(opened)
                    return self._steps.begin_removals(self._steps.abandoned(opened), littered, opened)
                except CheckpointTimeoutError:
                    raise
                except (OSError, CheckpointError) as error:  # which prevents the save as well, or nothing
                    _logger.warning("%s: steps that were never committed are left for now: %s", self._root, error)
                    return {}

        with self._folders() as opened:
            remove_together(session, self._root, begin, opened)

    def _retain(self, step: int, session: ControlSession) -> None:
        """After the commit of a step: remove the steps that are not to be kept, on every host."""
        self._is_behind = False

        def begin() -> dict[int, Deletion]:
            with held_back(_logger), self._lock:
                self._steps.look(opened)
                self._retention.warn(self._root, self._steps.metrics, step, self._told)
                doomed = self._retention.doomed(self._steps.metrics, step, [self._reading])
                doomed = self._steps.removable(doomed, opened)
                littered = [one for one in self._steps.littered(opened, anew=False) if one not in doomed]
                return self._steps.begin_removals([*doomed, *self._steps.abandoned(opened)], littered, opened)

        with self._folders() as opened:
            remove_together(session, self._root, begin, opened)

    # -- what there is

    def all_steps(self) -> list[int]:
        """The committed steps, ascending. All ranks call it."""
        return self._ask("all_steps", lambda: sorted(self._steps.metrics))

    def latest_step(self) -> int | None:
        """The latest committed step; None if there is none. All ranks call it.

        Raises:
            CheckpointError: a step that may be the latest cannot be read, or is in the folder of another rank alone.
        """
        return self._ask("latest_step", self._steps.latest, self._latest_seen)

    def best_step(self) -> int | None:
        """The committed step that is best by the metric (of equals the later), or None. All ranks call it.

        Raises:
            CheckpointError: a step that may be the best cannot be read.
        """
        return self._ask("best_step", lambda: self._steps.best(self._retention))

    def _ask(self, what: str, choose: Callable[[], Any], seen: Callable[[], int | None] = lambda: None) -> Any:
        """What the coordinator chooses from the steps that there are; no rank has ``seen`` a step that is later."""
        with self._session(what) as made, made as session:
            return self._choose(session, what, choose, seen)

    def _choose(
        self, session: ControlSession, what: str, choose: Callable[[], Any], seen: Callable[[], int | None]
    ) -> Any:
        """A round for :meth:`_ask`."""

        def tell() -> bytes:
            return json.dumps((seen(), str(self._root))).encode()

        def answer(messages: Mapping[int, bytes]) -> dict[int, bytes]:
            with held_back(_logger), self._lock, self._folders() as opened:
                self._steps.look(opened)
                chosen = choose()
            for rank, data in sorted(messages.items()):
                step, root = json.loads(data)
                if rank != self._ranks.rank and step is not None and (chosen is None or step > chosen):
                    raise CheckpointError(
                        f"{root} on rank {rank} has step {step}, and {self._root} on the coordinator, rank "
                        f"{self._ranks.rank}, has {'none' if chosen is None else f'step {chosen} as its latest'}: do "
                        f"the ranks run on other hosts than before? coordinator_rank={rank} goes on from step {step}; "
                        "restore(state, step=...) takes what the coordinator has"
                    )
            return dict.fromkeys(messages, json.dumps(chosen).encode())

        return json.loads(session.gather_scatter(what, tell, answer))

    def _latest_seen(self) -> int | None:
        """The latest step of which this rank has the `.metadata`, if ranks may have roots of their own."""
        if not self._options.separate_folders:
            return None
        with self._folders() as opened:
            return self._steps.highest(opened)

    # -- restore

    def restore(
        self, state: dict[Any, Any], step: int | None = None, options: LoadOptions | None = None, path: Any = None
    ) -> int | None:
        """Fill a state from a step, or from a checkpoint elsewhere. All ranks call it.

        If another manager removes the latest step at that moment, the latest remaining one is restored.

        Args:
            state: What :func:`paddle_dist_ckpt.load_state_dict` takes.
            step: Which step; None for the latest.
            options: How to load. With ``no_dist`` in a job of several ranks it is refused, for they restore together.
            path: Load a checkpoint from elsewhere instead of a step, of any format that can be loaded.

        Returns:
            The step; None if there is none and none was asked for (nothing is touched then); None with ``path``.

        Raises:
            CheckpointNotFoundError: there is no such step.
            CheckpointError: a step that may be the latest cannot be read, or is in the folder of another rank alone;
                and see load_state_dict.
            ValueError: an argument is invalid.
        """
        separate = self._options.separate_folders
        given = LoadOptions(timeout=self._options.timeout, separate_folders=separate) if options is None else options
        options, check_options = enter_with(given, LoadOptions)
        alone = options.no_dist and self._ranks.count > 1

        def check() -> None:  # called where the other ranks hear of it
            check_options()
            if alone:
                raise ValueError(_ALONE)
            if step is not None and path is not None:
                raise ValueError("restore takes a step or a path, not both")
            if step is not None:
                checked_step(step)

        find = paddles(self._ranks, state, options.staging_bytes, check)
        if path is not None:
            load_with(self._ranks, find, path, None, options)
            restored = None
        else:
            restored = self._restore_step(find, check, step, options)
        if restored is not None:  # otherwise it is a new job, whose first save is to come as well
            if self._decided is not None:  # the steps begin anew
                self._schedule.restart()
            self._decided = (restored, False)
            self._meet(restored)
        self._preparation.expect(state)
        return restored

    def _restore_step(
        self, find: Find, check: Callable[[], None], step: int | None, options: LoadOptions
    ) -> int | None:
        """Load a step, or the latest one; returns which that was, None if there is none and none was asked for.

        ``check`` raises what is wrong with this rank's arguments.
        """
        number = as_integer(step)  # Python's, as the other ranks are told of it

        def choose() -> int | None:  # what is being read is not removed meanwhile
            self._reading = self._steps.latest() if step is None else number
            return self._reading

        def seen() -> int | None:
            check()
            return self._latest_seen() if step is None else None

        what = "restore" if step is None else f"restore step {step if number is None else number!r:.50}"
        gone: tuple[int, CheckpointNotFoundError] | None = None
        try:
            while True:
                chosen: int | None = None
                try:
                    # One session, for of a rank that is interrupted between two the others would not hear.
                    with self._ranks.session(what, options.timeout) as made, made as session:
                        chosen = self._choose(session, what, choose, seen)
                        if gone is not None:
                            if chosen in (None, gone[0]):
                                raise gone[1]
                            _logger.warning("step %d is gone, so step %d is restored", gone[0], chosen)
                        if chosen is not None:
                            ranks = dataclasses.replace(self._ranks, within=session)
                            load_with(ranks, find, step_folder(self._root, chosen), chosen, options)
                        return chosen
                except CheckpointNotFoundError as error:  # perhaps removed just now; nothing is touched
                    if chosen is None or (gone is not None and error is gone[1]):
                        raise
                    if step is not None:
                        there = steps_text(self.all_steps())
                        raise CheckpointNotFoundError(f"{error}; {self._root} has {there}") from None
                    gone = chosen, error
        finally:
            self._reading = None

    # -- the end

    def wait(self) -> None:
        """Wait until the background save, if there is one, is committed; raises CheckpointError if it failed."""
        pending = self._pending
        if pending is not None:
            pending.wait()
        self._pending = None  # and not before: what an interrupt does not wait for stays pending
        if pending is not None:
            self._reconsider(pending)
            if not pending.raised:
                pending.result()

    def close(self) -> None:
        """Wait for the background save, and restore the handling of SIGTERM. The manager cannot save any more then.

        If a SIGTERM made it stop, repetitions within 10 seconds of that still do not count. One that came and did not,
        as there was no further step, now does what it would have done without a manager, unless an exception is raised.

        Raises:
            CheckpointError: the save in the background failed.
        """
        self._close(False)

    def _close(self, raising: bool) -> None:
        """See :meth:`close`; whether an exception is on its way, which a signal is not to hide."""
        self._closed = True
        try:
            self._schedule.close()  # again, if that was interrupted
            self.wait()
        except BaseException:
            raising = True
            raise
        finally:
            if self._end_of_sigterm is not None:  # and not before: a launcher repeats the signal during the last save
                self._end_of_sigterm(self._schedule.stopping, raising)
            self._end_of_sigterm = None

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._arguments.items() if value not in (None, False))
        return f"CheckpointManager({str(self._root)!r}{given})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close(kind is not None)
        except Exception:
            if kind is None:
                raise
            _logger.exception("the save in the background failed as well")  # what the block raised comes first

    def _session(self, what: str) -> Ending:
        return self._ranks.session(what, self._options.timeout)
