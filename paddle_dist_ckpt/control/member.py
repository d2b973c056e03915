"""Any rank's side of one session: a state machine without I/O, threads or clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from . import failures, wire
from .coordinator import BEATS_PER_TIMEOUT, GRACE, CoordinatorSession
from .wire import ErrorRecord, Message

__all__ = ["MemberSession"]

_COORDINATOR_MARGIN = GRACE + 0.1
"""Extra silence, in seconds, that the coordinator may keep: if it lives, its own verdict names who is missing."""


class MemberSession:
    """What this rank has heard in a session, and whether the session has failed. Times are monotonic, in seconds.

    Attributes:
        number, kind, timeout: See :class:`.wire.Open`.
        lead: If this rank is the coordinator, that side of the session, unless it was over when this rank opened it.
        verdict: Why the session has failed, once it has.
        own_error: What this rank itself raised, if it did.
        round: The number of the round that this rank is in, or was in last; -1 before the first one.
        round_name: Of the round that this rank is in; empty between rounds.
        moved_since: Tells whether work that may block in collectives gets on here since some time; None without any.
        group_moved: When some rank last said that it does.
        opener: Which thread opened the session.
        may_collect: Whether work that blocks in collectives may still come.
        is_followed: Whether the session with the coordinator that its kind names has been opened after it.
    """

    def __init__(self, number: int, kind: str, rank: int, coordinator: int, timeout: float, now: float) -> None:
        self.lead: CoordinatorSession | None = None
        self.number = number
        self.kind = kind
        self.verdict: ErrorRecord | None = None
        self.own_error: BaseException | None = None
        self._rank = rank
        self._coordinator = coordinator
        self.timeout = timeout
        self._heard = now
        self._last_beat = now
        self._next_beat = self._due = now + timeout / BEATS_PER_TIMEOUT
        self.moved_since: Callable[[float], bool] | None = None
        self.group_moved = now
        self._coordinator_came = False
        self._coordinator_left = False
        self.opener = 0
        self.may_collect = True
        self.is_followed = False
        self.round = -1
        self.round_name = ""
        self._replies: dict[int, bytes] = {}

    def handle(self, message: Message, payload: bytes, now: float) -> None:
        """Take in a message from the coordinator."""
        self._heard = now
        self._coordinator_came = True
        if isinstance(message, wire.Beat):
            self._next_beat = min(self._next_beat, now)  # the coordinator may wait less long than this rank
            if message.moved:
                self.group_moved = now
        if isinstance(message, wire.Reply):
            self._replies[message.round] = payload
        elif isinstance(message, wire.Verdict):
            self.fail(message.error)
        elif isinstance(message, wire.Bye):
            self._coordinator_left = True
            self._give_up_on_round()

    def hear(self, now: float) -> None:
        """Note that a part of a message has come. It is no news of a session that the coordinator has not come to."""
        if self._coordinator_came:
            self._heard = now

    def fail(self, error: ErrorRecord) -> None:
        """End the session; the first verdict counts."""
        self.verdict = self.verdict or error

    def lose_coordinator(self) -> None:
        """The connection to the coordinator is lost. Nothing to a session that the coordinator has closed."""
        if not self._coordinator_left:
            self._fail_for_coordinator(failures.LOST)

    def begin_round(self, name: str) -> int:
        """Number the next round. It fails at once if the coordinator has closed the session."""
        self.round += 1
        self.round_name = name
        self._give_up_on_round()
        return self.round

    def _give_up_on_round(self) -> None:
        if self._coordinator_left and self.round_name and self.round not in self._replies:
            self._fail_for_coordinator(f"closed the session before the end of round {self.round_name!r}")

    def _fail_for_coordinator(self, text: str) -> None:
        failed = {self._coordinator: failures.record(text)}
        # Of several ranks at least, so that this is RankFailureError.
        self.fail(failures.failure_of_ranks(f"{self.kind} failed", failed, (self._coordinator, self._rank)))

    def tick(self, now: float) -> tuple[wire.Beat | wire.Fail | None, float]:
        """Let time pass.

        Returns:
            What to send to the coordinator, and when to call again.
        """
        if self.verdict is not None:
            return None, math.inf
        if now > self._due + GRACE:  # this process itself was frozen: let in first what was sent meanwhile
            self._heard = max(self._heard, now - self.timeout)
        listens = self._rank != self._coordinator and not self._coordinator_left
        silence_ends = self._heard + self.timeout + _COORDINATOR_MARGIN if listens else math.inf
        if now > silence_ends:
            error = failures.timeout_error(self.kind, [self._coordinator], self.timeout)
            self.fail(error)
            # IMPORTANT: should the coordinator wake up, this is what keeps it from going on without this rank.
            return wire.Fail(self.number, "", error), math.inf
        beat = None
        if now >= self._next_beat:
            since = now - 1.5 * (now - self._last_beat)
            self._last_beat, self._next_beat = now, now + self.timeout / BEATS_PER_TIMEOUT
            moved = self.moved_since is not None and self.moved_since(since)
            beat = wire.Beat(self.number, moved)
        self._due = min(self._next_beat, silence_ends)
        return beat, self._due

    def take_reply(self) -> bytes | None:
        """The reply of the round, which ends it for this rank; None if it has not come."""
        reply = self._replies.pop(self.round, None)
        if reply is not None:
            self.round_name = ""
        return reply

    def led_parts(self) -> tuple[CoordinatorSession, Mapping[int, bytes]] | None:
        """On the coordinator: that side of the session and all ranks' answers to its round, once they are there."""
        parts = None if self.lead is None else self.lead.parts()
        return None if self.lead is None or parts is None else (self.lead, parts)

    def error(self) -> Exception:
        """A fresh exception for the verdict, as this rank raises it."""
        assert self.verdict is not None
        return failures.raisable(self.verdict, self._rank, self.own_error)
