"""The coordinator's side of one session: a state machine without I/O, threads or clocks.

It is told what arrives, whose connection is lost and what time it is, and calls ``emit`` for what is to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from ..core.text import ranks_text
from . import failures, wire
from .wire import ErrorRecord, Message

__all__ = ["BEATS_PER_TIMEOUT", "GRACE", "CoordinatorSession", "Emit", "Links"]

GRACE = 0.25
"""Seconds that the first failure waits for those of other ranks, so that the error can name them all; if it is an error
of a rank's own, from when all have come."""
BEATS_PER_TIMEOUT = 10

Emit = Callable[[int, Message, bytes], None]
"""Sends a message and its payload to a rank."""


@dataclass(slots=True)
class Links:
    """What a hub knows of the ranks' connections, as it changes; all but ``lost`` on the coordinator alone.

    Attributes:
        lost: The ranks whose connections are lost.
        absent: Those that have never connected.
        unproven: Those that somebody said to be who was turned away; if they are missing in the end, that may be why.
        differing: The protocols of those that cannot connect, for they speak another one.
    """

    lost: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    unproven: set[int] = field(default_factory=set)
    differing: dict[int, int] = field(default_factory=dict)


class CoordinatorSession:
    """One session: who has arrived, the current round's answers, and what has gone wrong.

    Times are monotonic, in seconds. Silence is counted from the first news of the session, ``now``.

    Attributes:
        kinds: What each rank that has opened it says that it is doing.
        resume: The number of the session that ranks open after this one has failed, if it is not the next.
        verdict: Why it has failed, once that is decided.
    """

    def __init__(
        self, number: int, ranks: tuple[int, ...], coordinator: int, links: Links, emit: Emit, now: float
    ) -> None:
        self._number = number
        self._ranks = ranks
        self._coordinator = coordinator
        self._links = links
        self._emit = emit
        self._timeout = math.inf
        self._shortest = math.inf  # of all ranks' timeouts
        self._next_beat = math.inf
        self._due = now
        self._heard = dict.fromkeys(ranks, now)  # but for ranks that have closed it
        self.kinds: dict[int, str] = {}
        self._versions: dict[int, str] = {}  # by rank that has opened it, or cannot
        self._opened_unlike = False  # by different calls, or versions of this library
        self._round = 0
        self._names: dict[int, str] = {}
        self._answers: dict[int, bytes] = {}
        self._failures: dict[int, ErrorRecord] = {}
        self._outside_rounds = False
        self._is_cut = False  # there is more than errors of ranks' own, and nobody need be waited for
        self._moved = False
        self.resume = 0
        self._judged_at = math.inf
        self._holds_until = -math.inf  # after a sleep no round ends before: those who wait may have given up
        self._now = now  # when it was told something last
        self.verdict: ErrorRecord | None = None

    @property
    def abandoned(self) -> bool:
        """The coordinator has closed it, and no verdict is being awaited."""
        return self._coordinator not in self._heard and not self.failing

    @property
    def failing(self) -> bool:
        """Something has gone wrong; the verdict is there or awaits the other ranks' errors."""
        return not math.isinf(self._judged_at)

    @property
    def waits(self) -> bool:
        """It has failed by errors of ranks' own, and waits for the ranks that have not come yet."""
        return self.failing and not self._is_cut and self.verdict is None

    @property
    def listening(self) -> set[int]:
        """Until the coordinator closes it: the other ranks that got a reply and may still need what is sent to them."""
        return self._heard.keys() - {self._coordinator} if self._round and self._coordinator in self._heard else set()

    def handle(self, rank: int, message: Message, payload: bytes, now: float) -> None:
        """Take in a message. A rank that has closed the session sends nothing more in it."""
        if rank not in self._heard:
            return
        self._notice_own_sleep(now)
        self._heard[rank] = now
        self._moved = self._moved or (isinstance(message, wire.Beat) and message.moved)
        if isinstance(message, wire.Open):
            self._on_open(rank, message)
        elif isinstance(message, wire.Answer):
            self._on_answer(rank, message, payload)
        elif isinstance(message, wire.Fail):
            self._on_fail(rank, message)
        elif isinstance(message, wire.Bye):
            self._on_bye(rank)
        self._judge_if_due()

    def hear(self, rank: int, now: float) -> None:
        """Note that a part of a message has come from ``rank``. It is no news of a session that the rank is not in."""
        if rank in self.kinds and rank in self._heard:
            self._notice_own_sleep(now)
            self._heard[rank] = now

    def _on_open(self, rank: int, message: wire.Open) -> None:
        # The longest timeout counts until the coordinator's own is known.
        if rank == self._coordinator or not self.kinds:
            self._timeout = message.timeout
        elif self._coordinator not in self.kinds:
            self._timeout = max(self._timeout, message.timeout)
        self.kinds[rank] = message.kind
        self._versions[rank] = message.version
        # Beats come as often as the rank needs them that waits least; and all answer them, see MemberSession.handle.
        self._shortest = min(self._shortest, message.timeout)
        if rank == self._coordinator:
            self._next_beat = self._now
        elif self._coordinator in self.kinds:
            self._next_beat = min(self._next_beat, self._now + self._shortest / BEATS_PER_TIMEOUT)
        if self.waits:  # it may fail as those have that have waited for it
            self._judged_at = self._now + GRACE
        first = next(iter(self.kinds))
        if (message.kind, message.version) != (self.kinds[first], self._versions[first]):
            self._opened_unlike = self._is_cut = True
            self._begin_judging()

    def _on_answer(self, rank: int, message: wire.Answer, payload: bytes) -> None:
        if message.round != self._round:
            text = f"answered round {message.round} while the session was in round {self._round}"
            self.fail_rank(rank, failures.record(text), self._now)
            return
        self._names[rank] = message.name
        self._answers[rank] = payload
        if len(set(self._names.values())) > 1:
            self._is_cut = True
            self._begin_judging()
        self._blame_those_who_left()

    def _on_fail(self, rank: int, message: wire.Fail) -> None:
        if message.name and message.round == self._round:
            self._names[rank] = message.name
        else:  # or in one that is over
            self._outside_rounds = True
        self._note(rank, message.error)

    def _on_bye(self, rank: int) -> None:
        del self._heard[rank]
        self._is_cut = self._is_cut or rank in self._failures  # it has not waited
        if rank == self._coordinator and not self.failing:
            for other in self._heard:
                self._emit(other, wire.Bye(self._number), b"")
        self._blame_those_who_left()

    def _blame_those_who_left(self) -> None:
        """A rank that has closed the session is no failure, unless a round still waits for it."""
        if not self._answers or len(self._heard) == len(self._ranks):
            return
        for rank in set(self._ranks) - self._heard.keys() - self._answers.keys():
            name = next(iter(self._names.values()))
            self.fail_rank(rank, failures.record(f"closed the session before round {name!r}"), self._now)

    def fail_rank(self, rank: int, error: ErrorRecord, now: float) -> None:
        """Note that ``rank`` has failed, by what is no error of its own."""
        self._now, self._is_cut = now, True
        self._note(rank, error)

    def _note(self, rank: int, error: ErrorRecord) -> None:
        self._failures.setdefault(rank, error)  # the first error of a rank counts
        self._begin_judging()

    def lose(self, rank: int, now: float) -> None:
        """Note that the connection to ``rank`` is lost. Nothing to a session that the rank has closed."""
        if rank in self._heard:
            self.fail_rank(rank, failures.record(failures.LOST), now)
            self._judge_if_due()

    def differ(self, rank: int, protocol: int, now: float) -> None:
        """Note that ``rank`` runs a version that speaks another protocol, and so cannot take part."""
        if rank in self._heard:
            self._versions[rank] = f"one with version {protocol} of the control messages"
            self.fail_rank(rank, failures.record(f"runs {self._versions[rank]}"), now)
            self._judge_if_due()

    def _begin_judging(self) -> None:
        self._judged_at = min(self._judged_at, self._now + GRACE)

    def tick(self, now: float) -> float:
        """Send the beats that are due and see who is missing.

        Returns:
            When to call again, as monotonic time.
        """
        self._notice_own_sleep(now)
        if self._missing():
            self._begin_judging()
        self._judge_if_due()
        if self.verdict is not None or self.abandoned:
            return math.inf
        if now >= self._next_beat:
            self._next_beat = now + self._shortest / BEATS_PER_TIMEOUT
            for rank in self._heard:
                self._emit(rank, wire.Beat(self._number, self._moved), b"")
            self._moved = False
        missing = self._missing()
        silence = min((heard for rank, heard in self._heard.items() if rank not in missing), default=math.inf)
        later = [time for time in (self._judged_at, self._holds_until) if time > now]
        self._due = min(self._next_beat, silence + self._timeout, *later)
        return self._due

    def _notice_own_sleep(self, now: float) -> None:
        """If this process itself has slept, as one that is frozen does, let in first what the others sent meanwhile.

        They are not silent, unless they were found so before; and they may have given up on the round, which must not
        end without them then.
        """
        self._now = now
        if now > self._due + GRACE and (self._failures or not self.failing):
            self._due, self._holds_until, least = now, now + GRACE, now + GRACE - self._timeout
            self._heard = {rank: max(heard, least) for rank, heard in self._heard.items()}

    def _judge_if_due(self) -> None:
        if self.verdict is not None or not self.failing:
            return
        said = self.kinds if self._opened_unlike else self._answers
        awaited = self._heard.keys() - self._failures.keys() - said.keys() - self._missing()
        # Ranks that have not come yet are waited for, as in a session that goes well: when they came to one that is
        # over, the others would be in their next, and out of step.
        to_come = awaited - self.kinds.keys() if self.waits else set()
        if (self._now >= self._judged_at and not to_come) or not awaited:
            self.judge(self._now)

    def _missing(self) -> set[int]:
        """The silent ranks. One that fell silent together with them may have sent its last beat an interval later."""
        if self._now - min(self._heard.values(), default=self._now) <= self._timeout:
            return set()
        silence = self._timeout * (1 - 1 / BEATS_PER_TIMEOUT)
        return {rank for rank, heard in self._heard.items() if self._now - heard > silence}

    def judge(self, now: float) -> None:
        """Decide on the session's failure and tell every rank."""
        self._now = now
        self.verdict = failures.sendable(self._disagreement() or self._failure())
        for rank in self._heard:
            if rank in self.kinds:
                self._emit(rank, wire.Verdict(self._number, self.verdict, self.resume), b"")

    def _disagreement(self) -> ErrorRecord | None:
        named = self._different_versions() or self._different_coordinators()
        if named is not None:
            return named
        for said, what in ((self.kinds, "the call"), (self._names, f"round {self._round}")):
            if len(set(said.values())) > 1:
                lines = ", ".join(f"rank {rank} calls {said[rank]!r}" for rank in sorted(said))
                advice = "all ranks must make the same calls in the same order"
                raised = "".join(
                    f"; rank {rank} failed: {failures.described(error)}"
                    for rank, error in sorted(self._failures.items())
                )
                return failures.record(f"ranks disagree about {what}: {lines}; {advice}{raised}")
        return None

    def _different_versions(self) -> ErrorRecord | None:
        """Ranks whose messages may mean something else to each other; whatever else they disagree about follows."""
        ranks: dict[str, list[int]] = {}
        for rank, version in sorted(self._versions.items()):
            ranks.setdefault(version, []).append(rank)
        if len(ranks) <= 1:
            return None
        lines = ", ".join(f"{ranks_text(those)}: {version}" for version, those in ranks.items())
        return failures.record(
            f"ranks run different versions of paddle_dist_ckpt ({lines}); install the same one on every rank"
        )

    def _different_coordinators(self) -> ErrorRecord | None:
        """Ranks whose calls name another coordinator, unless all name the same one. Ranks that name none mean this."""
        said = {rank: kind.partition(wire.NAMED_COORDINATOR)[::2] for rank, kind in self.kinds.items()}
        named = {rank: number or str(self._coordinator) for rank, (_, number) in said.items()}
        if len(set(named.values())) <= 1:  # none, where a rank was only heard to leave
            return None
        lines = ", ".join(
            f"rank {rank} calls {said[rank][0]!r} with coordinator_rank={named[rank]}" for rank in sorted(said)
        )
        text = f"ranks disagree about the coordinator: {lines}; all ranks must pass the same coordinator_rank"
        return ErrorRecord("ValueError", text, shared=True)

    def _failure(self) -> ErrorRecord:
        own = self._failures.get(self._coordinator)
        if own is not None and own.shared and self._coordinator in self._answers:
            return own  # raised by its combine, about what all ranks have said
        kind = next(iter(self.kinds.values()), "session")
        name = next(iter(self._names.values()), "")
        place = f" in round {name!r}" if name and not self._outside_rounds else ""
        missing = self._missing() - self._failures.keys()
        if not self._failures:
            return self._timed_out(f"{kind}{place}", missing)
        silent = {rank: self._timed_out("it", {rank}) for rank in missing}
        return failures.failure_of_ranks(f"{kind} failed{place}", self._failures | silent, self._ranks)

    def _timed_out(self, doing: str, missing: Set[int]) -> ErrorRecord:
        return failures.timeout_error(doing, missing, self._timeout, self._links.unproven, self._links.absent)

    def parts(self) -> Mapping[int, bytes] | None:
        """The current round's answers, once every rank's is there, nothing has failed, and no sleep has just ended."""
        is_over = len(self._answers) == len(self._ranks) and not self.failing and self._now >= self._holds_until
        return self._answers if is_over else None

    def reply(self, replies: Mapping[int, bytes]) -> None:
        """End the round with a reply for every rank. After a failure nothing is sent: the verdict is the reply."""
        if self.failing:
            return
        for rank in self._ranks:
            self._emit(rank, wire.Reply(self._number, self._round), replies[rank])
        self._round += 1
        self._names, self._answers = {}, {}
