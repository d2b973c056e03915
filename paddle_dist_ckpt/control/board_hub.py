"""A hub as user threads use it, over a :class:`Board`, whatever carries the messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..errors import CheckpointError
from . import failures, wire
from .board import Board
from .session import Session

__all__ = ["BoardAppointments", "BoardHub", "check_topic"]


def check_topic(topic: str) -> str:
    """Return ``topic`` if it can be one.

    Raises:
        ValueError: it is too long.
    """
    if len(topic) > wire.MAX_TOPIC:
        raise ValueError(f"the topic has {len(topic)} characters; a topic may have {wire.MAX_TOPIC}")
    return topic


class BoardAppointments:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Appointments`.

    Args:
        board: This rank's switchboard.
        topic: What they are about.
        timeout: Longest wait, in seconds.
    """

    def __init__(self, board: Board, topic: str, timeout: float) -> None:
        self._board = board
        self._timeout = timeout
        self._attendance = board.attend(check_topic(topic))
        self._closed = False

    @property
    def leads(self) -> bool:
        return self._board.rank == self._board.coordinator

    def reach(self, step: int, wish: bool = False) -> bool:
        """See :class:`paddle_dist_ckpt.core.protocols.Appointments`."""
        return not self._closed and self._board.reach(self._attendance, step, wish, self._timeout)

    def close(self) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Appointments`."""
        if not self._closed:
            self._closed = True
            self._board.end_attendance(self._attendance)


class BoardHub:
    """Implements :class:`paddle_dist_ckpt.core.protocols.ControlHub`. A process forked from this one cannot use it.

    Args:
        board: This rank's switchboard.
        on_abandon: Called when ``run_collectives`` gives up on work that goes on running; see :class:`Session`.
    """

    def __init__(self, board: Board, on_abandon: Callable[[], None] | None) -> None:
        self._board = board
        self._on_abandon = on_abandon
        self._pid = os.getpid()

    def session(self, kind: str, timeout: float) -> AbstractContextManager[Session]:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlHub`.

        Raises:
            CheckpointError: this process was forked from the one that made the hub.
        """
        self._check_process()
        return Session(self._board, kind, timeout, self._on_abandon)

    def appointments(self, topic: str, timeout: float) -> BoardAppointments:
        """See :class:`paddle_dist_ckpt.core.protocols.ControlHub`.

        Raises:
            CheckpointError: this process was forked from the one that made the hub.
            ValueError: the topic is too long.
        """
        self._check_process()
        return BoardAppointments(self._board, topic, timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError("the control hub belongs to the process that this one was forked from; make another")

    def close(self) -> None:
        """End the connection. Sessions that are open fail, here and on the other ranks."""
        self._board.shut(failures.record("the control hub was closed"))
