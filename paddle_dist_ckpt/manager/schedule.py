"""Which training steps are due for a save if time or a signal decides: the same on all ranks, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.protocols import Appointments, ControlHub

__all__ = ["Schedule"]


class Schedule:
    """Says at which steps to save. Every rank makes one and asks it at the same steps, once a step.

    Ranks may be several steps apart; see :class:`paddle_dist_ckpt.core.protocols.Appointments`.

    Args:
        hub: Of the ranks.
        topic: The same on all ranks; schedules of one topic are matched in the order in which they are made.
        timeout: Longest wait for a decision, in seconds.
        interval_seconds: Time from one save to the next; None if time does not matter. The coordinator's counts.
        clock: Monotonic time, in seconds.
    """

    def __init__(
        self,
        hub: ControlHub,
        topic: str,
        timeout: float,
        *,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval_seconds
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
        """Whether to save at this step: true once for each decision, at the same steps on every rank.

        Asked again about the same step, it says the same. It takes microseconds. Only a rank that comes to its next
        step while a decision is being made waits for it, for one exchange of messages.

        Raises:
            RankFailureError: the rank had to wait, but the connection to the coordinator is lost.
            CheckpointTimeoutError: the rank waited in vain.
            CheckpointError: the hub is closed.
        """
        timed = self._interval is not None and self._is_time(step, self._interval)
        return self._is_stop(step) or timed

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

    def saved(self) -> None:
        """Tell that a step was saved, for whatever reason: the interval begins anew."""
        self._saved_at = self._clock()

    def restart(self) -> None:
        """Begin anew, since the steps do, on all ranks. A request that was not served is made again."""
        self.close()
        self._begin()

    def close(self) -> None:
        """End it: from here on nothing is due. On the coordinator that goes for all ranks; none waits any more."""
        self._timed.close()
        self._stops.close()
