"""The coordinator's side of a schedule: what it decides, and how far ahead it announces. No I/O, threads or clocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

__all__ = ["NEVER", "Announcement", "Decision", "Horizon", "Request"]

NEVER = -(1 << 62)
"""A step before all others."""
_LEAST_CALLS = 2
_MOST_CALLS = 10_000
_AHEAD_SECONDS = 0.25
_GROWTH_CALLS = 2
_KEPT_DECISIONS = 32
_KEPT_REASONS = 4


class Decision(msgspec.Struct, array_like=True, frozen=True):
    """Save at the first step that is at least ``step``; for which ``reasons``, if ranks have requested it."""

    step: int
    reasons: tuple[str, ...] = ()


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """All that is due up to a step.

    It repeats the latest decisions, so that one announcement makes up for others that got lost with a connection.

    Attributes:
        horizon: Nothing but ``decisions`` is due up to this step.
        decisions: The latest decisions, ascending.
        forgotten: The step of the last decision that is not repeated.
        ended: Nothing is due beyond the horizon either, whatever was said before.
    """

    horizon: int
    decisions: tuple[Decision, ...] = ()
    forgotten: int = NEVER
    ended: bool = False


class Request(msgspec.Struct, array_like=True, frozen=True):
    """A rank's wish for a save, which a decision for any step beyond ``after`` fulfils."""

    after: int
    reasons: tuple[str, ...]


class _Pace:
    """How the steps go: their strides, and how many calls there are in a second."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=6)
        self._calls = 0
        self._since = -math.inf
        self._ahead = 0

    def call(self, step: int) -> None:
        """Count a call."""
        self._steps.append(step)
        self._calls += 1

    def ahead(self, now: float) -> int:
        """How many calls the horizon should be ahead from now on: twice as long as it is to be at the least.

        It shrinks at once and grows slowly, since a horizon that was announced cannot be taken back: a loop that
        hurries through the first steps, to find its place, must not put off all decisions for the slow ones after.
        """
        seconds = max((now - self._since) / max(self._calls, 1), 1e-9)
        self._calls, self._since = 0, now
        enough = int(2 * _AHEAD_SECONDS / seconds)
        self._ahead = max(_LEAST_CALLS, min(enough, self._ahead + _GROWTH_CALLS, _MOST_CALLS))
        return self._ahead

    def stride(self) -> int:
        """The largest of the last few strides but one: a single leap is not the rule."""
        strides = [later - earlier for earlier, later in zip(self._steps, list(self._steps)[1:], strict=False)]
        return sorted([1, 1, *strides])[-2]


class Horizon:
    """What the coordinator has decided and announced.

    Args:
        interval: Seconds from one save to the next; None if time does not matter.
        alone: There is no other rank, so nothing needs to be announced ahead.
        now: Monotonic time, in seconds; the interval begins here.
    """

    def __init__(self, interval: float | None, alone: bool, now: float) -> None:
        self._interval = math.inf if interval is None else interval
        self._alone = alone
        self._saved_at = now
        self._pace = _Pace()
        self._step = NEVER
        self._horizon = NEVER
        self._extend_after = NEVER
        self._decisions: deque[Decision] = deque(maxlen=_KEPT_DECISIONS)
        self._forgotten = NEVER
        self._pending: int | None = None
        self._requested = NEVER

    def saved(self, now: float) -> None:
        """The ranks have saved; the interval begins anew."""
        self._saved_at = now

    def call(self, step: int, now: float, requests: Iterable[Request]) -> Announcement | None:
        """Count the coordinator's call for ``step``, and decide.

        Returns:
            What is to be announced before the coordinator itself acts; None if that suffices which was announced.
        """
        if self._step == NEVER:
            self._horizon = step - 1
        self._step = step
        self._pace.call(step)
        decided = self._decide(step, now, requests)
        if not decided and step <= self._extend_after:
            return None
        self._extend(step, now)
        return Announcement(self._horizon, tuple(self._decisions), self._forgotten)

    def _decide(self, step: int, now: float, requests: Iterable[Request]) -> bool:
        if self._pending is not None and step >= self._pending:
            self._pending = None
            self._saved_at = now
        open_requests = [request for request in requests if request.after >= self._requested]
        reasons = dict.fromkeys(reason for request in open_requests for reason in request.reasons)
        if not reasons and (self._pending is not None or now - self._saved_at < self._interval):
            return False
        if len(self._decisions) == _KEPT_DECISIONS:
            self._forgotten = self._decisions[0].step
        # Whatever is within the horizon, a rank may have passed already.
        self._horizon = self._pending = self._horizon + 1
        self._decisions.append(Decision(self._horizon, tuple(reasons)[:_KEPT_REASONS]))
        if reasons:
            self._requested = self._horizon
        return True

    def _extend(self, step: int, now: float) -> None:
        calls = 0 if self._alone else self._pace.ahead(now)
        stride = self._pace.stride()
        self._horizon = max(self._horizon, step + calls * stride)
        least = max(_LEAST_CALLS, calls // 2) if calls else 0
        self._extend_after = self._horizon - least * stride

    def end(self) -> Announcement:
        """What is to be announced when the coordinator makes no more calls."""
        decisions = tuple(decision for decision in self._decisions if decision.step <= self._step)
        return Announcement(self._step, decisions, min(self._forgotten, self._step), ended=True)
