"""Which training steps are due for a save, by their numbers, time or a signal: the same on all ranks, nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..core.protocols import Appointments, ControlHub

__all__ = ["Schedule"]


class Schedule:
    """Says at which steps to save. Every rank makes one and asks it at the same steps, once a step.

    Ranks may be several steps apart; see :class:`paddle_dist_ckpt.core.protocols.Appointments`.

    Args:
        hub: Of the ranks.
        topic: The same on all ranks; schedules of one topic are matched in the order in which they are made.
        timeout: Longest wait for a decision, in seconds.
        interval_steps: Multiples of this are due; None if the steps' numbers do not matter.
        interval_seconds: Time from one save to the next; None if time does not matter. The coordinator's counts.
        clock: Monotonic time, in seconds.
    """

    def __init__(
        self,
        hub: ControlHub,
        topic: str,
        timeout: float,
        *,
        interval_steps: int | None = None,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_steps, self._interval_seconds = interval_steps, interval_seconds
        self._decided: tuple[int, bool] | None = None  # the step that came last, and whether it is due
        self._clock = clock
        self._make: Callable[[str], Appointments] = lambda what: hub.appointments(f"{topic}: {what}", timeout)
        self._requests = 0
        self._served = 0
        self._begin()

    def _begin(self) -> None:
        self._timed = self._make("time")
        self._stops = self._make("stop")
        self._saved_at = self._clock()
        self._wished = False
        self._passed_on = self._served
        self.stopping = False

    def is_due(self, step: int) -> bool:
        """Whether to save at this step, the same on every rank: at multiples, and once for each decision.

        Asked again about the same step, it says the same, until that is saved. It takes microseconds. Only a rank that
        comes to its next step while a decision is being made waits for it, for one exchange of messages.

        Raises:
            RankFailureError: the rank had to wait, but the connection to the coordinator is lost.
            CheckpointTimeoutError: the rank waited in vain.
            CheckpointError: the hub is closed.
        """
        if self._decided is None or self._decided[0] != step:
            timed = self._interval_seconds is not None and self._is_time(step, self._interval_seconds)
            self._decided = (step, self._is_stop(step) or timed or self._is_multiple(step))
        return self._decided[1]

    def is_due_about(self, given: Any) -> bool:
        """Whether a save is due, and so on all ranks, where a rank gives for its step what is none.

        Its step may be the last one that it came to, if that is due yet, or what ``given`` says as far as it is a
        number, or else the next one. See :meth:`is_due`.
        """
        step, due = self._decided or (0, False)
        with suppress(Exception):  # whatever such things raise
            due = due or self._is_multiple(int(given))
        return due or self.is_due(step + 1)

    def _is_multiple(self, step: int) -> bool:
        return self._interval_steps is not None and step % self._interval_steps == 0

    def _is_time(self, step: int, interval: float) -> bool:
        over = self._timed.leads and not self._wished and self._clock() - self._saved_at >= interval
        due = self._timed.reach(step, wish=over)
        self._wished = (self._wished or over) and not due
        if due:
            self._saved_at = self._clock()
        return due

    def _is_stop(self, step: int) -> bool:
        requests = self._requests
        due = self._stops.reach(step, wish=requests > self._passed_on)
        self._passed_on = requests
        if due:
            self._served, self.stopping = requests, True
        return due

    def request(self) -> None:
        """Ask for one save, at the next step that all ranks can agree on, at which they are to stop.

        Any rank may, on any thread or in a signal handler. The others learn of it by this rank's next :meth:`is_due`.
        """
        self._requests += 1

    def saved(self, step: int) -> None:
        """Tell that a step was saved, for whatever reason: it is not due any more, and the interval begins anew."""
        self._decided = (step, False)
        self._saved_at = self._clock()

    def failed(self, step: int) -> None:
        """Tell that the save of a step has failed: whether it is due is as it was before that had begun."""
        if self._decided == (step, False):
            self._decided = None

    def restart(self, step: int) -> None:
        """Begin anew behind a step, since the steps do, on all ranks. A request that was not served is made again."""
        self.close()
        self._begin()
        self._decided = (step, False)

    def close(self) -> None:
        """End it: from here on nothing is due. On the coordinator that goes for all ranks; none waits any more."""
        self._timed.close()
        self._stops.close()
