"""A channel as user threads use it, over a :class:`Board`, whatever carries the notes."""

from __future__ import annotations

from . import wire
from .board import Board

__all__ = ["BoardChannel", "check_note", "check_topic"]


def check_note(data: object) -> bytes:
    """Return ``data`` if it can be announced.

    Raises:
        TypeError: it is not bytes.
        ValueError: it is longer than a note may be.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"a note must be bytes, not {type(data).__name__}")
    if len(data) > wire.MAX_NOTE:
        raise ValueError(f"the note has {len(data)} bytes; a note may have {wire.MAX_NOTE}")
    return data


def check_topic(topic: str) -> str:
    """Return ``topic`` if it can be one.

    Raises:
        ValueError: it is too long.
    """
    if len(topic) > wire.MAX_TOPIC:
        raise ValueError(f"the topic has {len(topic)} characters; a topic may have {wire.MAX_TOPIC}")
    return topic


class BoardChannel:
    """Implements :class:`paddle_dist_ckpt.core.protocols.Channel`.

    Args:
        board: This rank's switchboard.
        topic: What the notes are about.
    """

    def __init__(self, board: Board, topic: str) -> None:
        self._board = board
        self._box = board.make_box(check_topic(topic))
        self._notes = self._box.notes

    @property
    def rank(self) -> int:
        return self._board.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._board.ranks

    @property
    def coordinator(self) -> int:
        return self._board.coordinator

    def announce(self, data: bytes) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Channel`."""
        self._board.announce(self._box, check_note(data))

    def heard(self) -> list[tuple[int, bytes]]:
        """See :class:`paddle_dist_ckpt.core.protocols.Channel`."""
        return self._board.hear(self._box) if self._notes else []

    def wait(self, timeout: float) -> None:
        """See :class:`paddle_dist_ckpt.core.protocols.Channel`."""
        self._board.wait_for_note(self._box, timeout)
