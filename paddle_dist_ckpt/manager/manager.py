"""A manager of training steps: when to save, where, which steps to keep, which one to start from.

    root/step-00000100/     a checkpoint of its own, which can be copied away; its unique_id is the step
    root/step-00000200/

The coordinator decides what must be the same on all ranks: which steps exist, which is the latest or the best one, and
which may go. So all ranks make the same calls in the same order. Only :meth:`CheckpointManager.should_save` waits for
nobody; :mod:`.control.appointment` explains how it can know.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..control.ranks import Ranks
from ..control.session import Ending
from ..errors import CheckpointError, DurabilityUnknownError
from ..options import LoadOptions, SaveOptions
from ..reports import SaveReport
from ..saving.async_save import AsyncSave
from ..storage import LocalStorage, local_path
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
from .arguments import check_seconds, checked_count, checked_metrics, checked_step
from .preparation import Preparation
from .retention import Retention
from .schedule import Schedule
from .shared_steps import SharedSteps
from .sigterm import on_sigterm
from .steps import NOTE, Steps

__all__ = ["CheckpointManager"]

_logger = logging.getLogger("paddle_dist_ckpt")
_SAVE = "CheckpointManager.save"  # what the session of a save is called
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
        best: Also keep the best step: the name of a metric, and whether ``"min"`` or ``"max"`` is best; behind them,
            how many of the best to keep, if more than one.
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
        best: tuple[str, Literal["min", "max"]] | tuple[str, Literal["min", "max"], int] | None = None,
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
            root = Path(place)  # absolute, for the working directory may change
            self._retention = Retention(keep_last, keep_every, best)
            save_interval_steps = checked_count("save_interval_steps", save_interval_steps)
            check_seconds(save_interval_seconds)
            if save_on_sigterm and threading.current_thread() is not threading.main_thread():
                raise ValueError("a manager with save_on_sigterm can only be made on the main thread")
            self._steps = SharedSteps(root, self._retention, self._options, self._ranks.rank)
            told = {**arguments, "best": self._retention.best, "async_save": async_save}
            name = agree(session, told, root.name)
            if (idle := self._retention.idle) and session.rank == session.coordinator:
                _logger.warning("%s: without keep_last every step is kept, with or without %s", root, idle)
        self._schedule = Schedule(
            self._ranks.hub,
            f"steps of {name}",  # the coordinator's name for them, as ranks' own may differ
            self._options.timeout,
            interval_steps=1 if save_interval_steps is save_interval_seconds is None else save_interval_steps,
            interval_seconds=save_interval_seconds,
        )
        self._pending: tuple[int, AsyncSave] | None = None  # the step that is saved in the background, or was
        self._closed = False
        self._end_of_sigterm = on_sigterm(self._schedule.request) if save_on_sigterm else None

    # -- when

    def should_save(self, step: int) -> bool:
        """Whether a save is due at this step, the same on every rank. Call it once per step, with increasing steps.

        It waits for nobody and takes microseconds. Only if time or a signal decides, a rank that reaches its next step
        while the ranks are being asked how far they are waits for the decision.
        """
        step = checked_step(step)
        pending = self._pending  # a handler of a signal may wait for it meanwhile
        if pending is not None and pending[1].raised:  # all ranks have been told how it has ended
            self._reconsider(*pending)
        self._preparation.begin()
        return self._schedule.is_due(step)

    def _reconsider(self, step: int, pending: AsyncSave) -> None:
        if pending.failed:
            self._steps.known.forget(step)
            self._schedule.failed(step)

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
        try:
            step = checked_step(step)
        except ValueError as error:
            if force or self._schedule.is_due_about(step):  # the other ranks save, and wait for this one
                self._refuse(error)
            raise
        if not self.should_save(step) and not force:
            self._check_open()  # here, for the other ranks make no call
            if self._pending is not None and self._pending[0] == step:
                _logger.info(
                    "a save of step %d was begun just now; wait() tells how it ends, force=True repeats it", step
                )
            elif self._steps.known.has_just_met(step):
                _logger.info("step %d was saved, or restored, just now: force=True saves it again", step)
            return None
        if self.stopping:
            self._pass_over_failures()
        try:
            find, options = self._what_to_save(step, state, metrics)
            folder, after = self._steps.known.folder(step), self._steps.after_save(step)
            saved = save_with(self._ranks, find, folder, step, self._async_save, options, after, kind=_SAVE)
        except DurabilityUnknownError:  # it is there, and counts
            self._steps.is_behind = False
            self._has_saved(step)
            raise
        except BaseException:  # an interrupt, too: it is an error to the other ranks
            self._schedule.failed(step)
            raise
        if isinstance(saved, AsyncSave):
            self._pending = step, saved
        self._has_saved(step)
        return saved

    def _what_to_save(
        self, step: int, state: dict[Any, Any], metrics: Mapping[str, float] | None
    ) -> tuple[Find, SaveOptions]:
        """What finds the state, and has looked for the root before, and the options that have the step's metrics."""
        try:
            self._check_open()
            note = {"step": step, "metrics": checked_metrics(metrics)}
        except Exception as error:
            self._refuse(error)
        options = dataclasses.replace(self._options, user_metadata={**(self._options.user_metadata or {}), NOTE: note})
        return paddles(self._ranks, state, check=self._steps.check_same), options

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("the manager is closed")

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise what is wrong with this rank's call on all ranks, which save."""
        refuse(self._ranks, self._options, error, save_kind(self._async_save, _SAVE))

    def _has_saved(self, step: int) -> None:
        self._steps.meet(step)
        self._schedule.saved(step)  # to save it twice would be of no use

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

    # -- what there is

    def all_steps(self) -> list[int]:
        """The committed steps, ascending. All ranks call it."""
        return self._ask("all_steps", lambda steps: sorted(steps.metrics))

    def latest_step(self) -> int | None:
        """The latest committed step; None if there is none. All ranks call it.

        Raises:
            CheckpointError: a step that may be the latest cannot be read, or is in the folder of another rank alone.
        """
        return self._ask("latest_step", Steps.latest, self._steps.latest_seen)

    def best_step(self) -> int | None:
        """The committed step that is best by the metric (of equals the later), or None. All ranks call it.

        Raises:
            CheckpointError: a step that may be the best cannot be read.
        """
        return self._ask("best_step", lambda steps: steps.best(self._retention))

    def _ask(self, what: str, choose: Callable[[Steps], Any], seen: Callable[[], int | None] = lambda: None) -> Any:
        with self._session(what) as made, made as session:
            return self._steps.ask(session, what, choose, seen)

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

            def load(ranks: Ranks, chosen: int) -> None:
                load_with(ranks, find, self._steps.known.folder(chosen), chosen, options)

            restored = self._steps.restore(self._ranks, step, options.timeout, check, load)
        if restored is not None:  # otherwise it is a new job, whose first save is to come as well
            self._schedule.restart(restored)
            self._steps.meet(restored)
        self._preparation.expect(state)
        return restored

    # -- the end

    def wait(self) -> None:
        """Wait until the background save, if there is one, is committed; raises CheckpointError if it failed."""
        pending = self._pending  # a handler of a signal may wait for it meanwhile
        if pending is None:
            return
        step, saving = pending
        saving.wait()
        self._pending = None  # and not before: what an interrupt does not wait for stays pending
        self._reconsider(step, saving)
        if not saving.raised:
            saving.result()

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
        return f"CheckpointManager({str(self._steps.known.root)!r}{given})"

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
