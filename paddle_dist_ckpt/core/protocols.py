"""What the engine needs from its surroundings, as Protocols: ranks that talk, and bulk transfers.

Each has at least two implementations: a real one and the in-process or faulty twin that tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol, TypeVar

from .memory import Bytes1D

__all__ = ["Appointments", "ControlHub", "ControlSession", "Operations", "Transfers", "Transport"]

T = TypeVar("T")


class ControlSession(Protocol):
    """One save or load as one of its ranks sees it: rounds of messages, the same rounds in the same order everywhere.

    Ranks are global ranks. Every member of ``ranks`` opens the session; ``coordinator`` is one of them.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def coordinator(self) -> int: ...

    @property
    def doubtful(self) -> bool:
        """On the coordinator: whether an earlier session was given up for lack of ranks, and none has succeeded since.

        Sessions are matched by counting. A rank that was late for that one, and one that left it out, look alike; if
        ranks do not meet between their calls, they may by now be at different ones.
        """
        ...

    def gather_scatter(
        self,
        name: str,
        local: Callable[[], bytes],
        combine: Callable[[Mapping[int, bytes]], Mapping[int, bytes]],
    ) -> bytes:
        """Run ``local`` on every rank, ``combine`` on the coordinator, and give each rank its part of the result.

        Args:
            name: Names the round in errors; the same on every rank.
            local: Makes this rank's message. If it raises on any rank, the round fails on every rank.
            combine: Called on the coordinator alone with every rank's message; returns one reply for every rank.

        Returns:
            The reply for this rank.

        Raises:
            CheckpointTimeoutError: a rank was silent for longer than the session's timeout.
            RankFailureError: a rank failed, or its connection was lost.
            CheckpointError: of the type that was raised, where that error is one that all ranks share.
        """
        ...

    def check(self) -> None:
        """Raise if the session has failed elsewhere, so that long work can stop early."""
        ...

    def end_collectives(self) -> None:
        """Say that :meth:`run_collectives` will not be called any more, so that later sessions need not wait for it."""
        ...

    def run_collectives(self, transport: Transport, work: Callable[[Transfers], T]) -> T:
        """Run ``work``, which may block in collectives, on a helper thread, watching the other ranks meanwhile.

        It waits for the sessions that other threads of this rank have opened before this one, until they are closed or
        have ended their collectives: so these meet on all ranks in the order in which the sessions are numbered.

        Args:
            transport: Whose operations are the collectives. It is abandoned if ``work`` raises or is given up; and on
                every rank, once the session closes, if the session has failed with a CollectiveError.
            work: Is given the same operations, watched and verified. If it is in one for longer than the session's
                timeout, while no rank of the session begins another or works outside of one, the collective is taken to
                hang.

        Raises:
            What ``work`` raised; or what made the session fail on another rank while ``work`` was still blocked.
            CollectiveError: on every rank, if a collective hangs; on those to which other bytes came than were sent.
        """
        ...


class Appointments(Protocol):
    """Steps at which all ranks do something, such as a save, agreed on while they go on with their steps.

    Every rank tells the steps that it comes to, the same ones in the same order, not necessarily at the same time.
    """

    @property
    def leads(self) -> bool:
        """Whether this rank is the coordinator."""
        ...

    def reach(self, step: int, wish: bool = False) -> bool:
        """Come to a step, not negative.

        It waits only if another step was reached since an appointment was wished for and not yet decided on, which
        takes one exchange of messages with all ranks' hubs. It may be repeated for the same step.

        Args:
            step: If steps fall back, there are no appointments before the steps that had been reached.
            wish: Wish for an appointment beyond this step. Those of several ranks may be fulfilled by the same one.

        Returns:
            Whether there is an appointment at this step, which is so on all ranks. Then a wish is fulfilled.

        Raises:
            RankFailureError: it had to wait, but the connection to the coordinator is lost.
            CheckpointTimeoutError: it waited in vain.
            CheckpointError: it had to wait, but the hub is closed.
        """
        ...

    def close(self) -> None:
        """This rank has no more appointments; if it is the coordinator, no rank has, beyond where it is."""
        ...


class ControlHub(Protocol):
    """The long-lived connection among a group's ranks. Sessions are opened in the same order on every rank.

    Several may be open at once. One may be opened on one thread, used and closed on another; a failure of one is none
    of the others, unless a connection is lost.
    """

    def session(self, kind: str, timeout: float) -> AbstractContextManager[ControlSession]:
        """Make the next session, which is opened on entry and closed on exit.

        On exit nothing is done if it is closed already, or was never entered: :class:`..control.session.Ending`.

        Args:
            kind: What is being done ("save", "load"); ranks that disagree all raise.
            timeout: Longest silence of a rank, in seconds.
        """
        ...

    def appointments(self, topic: str, timeout: float) -> Appointments:
        """Make appointments, which may outlive sessions.

        A rank's first ones of a topic belong to the other ranks' first ones, its second to their second ones.

        Args:
            topic: At most 1024 characters.
            timeout: Longest wait for a decision, in seconds.
        """
        ...

    def close(self) -> None: ...


class Operations(Protocol):
    """Move bulk bytes between ranks. Every rank of the group takes part in every operation, in the same order.

    That all take part is what the weakest backend demands: Paddle's gloo group numbers its operations on each rank and
    matches them by number, so ranks that had done different numbers of them would wait for each other for ever.
    """

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """Send ``data`` from ``source`` to every rank of the group; the others' ``data`` is filled.

        Args:
            data: The bytes, in host memory.
            source: The rank that sends.
            most: The most memory of a device that may be used, in bytes; the same on every rank.
        """
        ...

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
    ) -> None:
        """Send one message from each of some ranks to each of some others.

        Args:
            outgoing: What this rank sends, by destination.
            incoming: To be filled with what it gets, by sender.
            senders: The ranks that send anything, each with the size of its largest message; the same on every rank.
            most: See :meth:`broadcast`.
        """
        ...

    def try_out(self) -> list[str]:
        """Try what the backend has with a few bytes; returns the names of what fails here, or delivers other bytes."""
        ...


class Transport(Operations, Protocol):
    """Moves bulk bytes between ranks by a backend that is not trusted.

    Attributes:
        tried: Whether ranks have agreed on what the backend can do.
    """

    tried: bool

    def get_ready(self) -> None:
        """Have what the first operation needs of this rank alone, before others wait for it in there.

        Raises:
            CheckpointError: it cannot be had. It may be asked for again.
        """
        ...

    def rely_on_others(self, failing: Mapping[str, Sequence[int]]) -> None:
        """Use nothing that fails on any rank.

        Args:
            failing: The ranks on which each has failed that has; the same on every rank.

        Raises:
            CollectiveError: there is nothing else.
        """
        ...

    def abandon(self) -> None:
        """It cannot be relied on any more: let later operations raise CollectiveError."""
        ...


class Transfers(Protocol):
    """What work in collectives is given: a Transport's operations. What arrives is compared with what was sent.

    Other ranks wait for this one's part in all of them, so what is wrong is raised when the work is done.
    """

    def broadcast(
        self,
        data: Bytes1D,
        source: int,
        most: int,
        what: Callable[[], str],
        digest: int | None = None,
        block_bytes: int = 0,
        kept: bool = False,
    ) -> None:
        """See :class:`Operations`.

        Args:
            data, source, most: See there.
            what: Names what is sent, for an error on a rank that receives it.
            digest: On the source, the message's, if it is known: a :func:`..control.verified.digest_of`.
            block_bytes: By what blocks that is taken; the same on every rank.
            kept: Whether the memory stays as it is until the work is done, so that it can be hashed beside.
        """
        ...

    def exchange(
        self,
        outgoing: Mapping[int, Bytes1D],
        incoming: Mapping[int, Bytes1D],
        senders: Sequence[tuple[int, int]],
        most: int,
        what: Callable[[int], str],
        digests: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """See :class:`Operations`; ``what`` names what comes from a rank. ``digests`` are those of the messages to some
        ranks, if they are known."""
        ...

    def try_out(self) -> list[str]:
        """See :class:`Operations`."""
        ...
