"""The notes of one rank's channels: what has arrived and was not heard yet, and what was announced last."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from weakref import WeakValueDictionary

from .wire import Note

__all__ = ["KEPT", "Box", "Boxes"]

KEPT = 1000
"""How many notes are kept for a channel that does not hear them; beyond that, the oldest are dropped."""
_EARLY_CHANNELS = 100

_LOG = logging.getLogger(__name__)


class Box:
    """The notes of one channel.

    Args:
        label: Goes with each of them.
        notes: What has arrived before the channel was made.

    Attributes:
        notes: What has arrived and was not heard yet: the sender's rank and the payload.
        last: What this rank announced last.
    """

    def __init__(self, label: Note, notes: Iterable[tuple[int, bytes]]) -> None:
        self.label = label
        self.notes: deque[tuple[int, bytes]] = deque(notes, KEPT)
        self.last: bytes | None = None


class Boxes:
    """The boxes of all channels of one rank. Guarded by the board's lock.

    A box lives as long as its channel does; notes that come later are dropped.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[str, int] = {}
        self._boxes: WeakValueDictionary[Note, Box] = WeakValueDictionary()
        self._early: dict[Note, deque[tuple[int, bytes]]] = {}
        self._warned = False

    def make(self, topic: str) -> Box:
        """The box of the topic's next channel."""
        number = self._made.get(topic, 0)
        self._made[topic] = number + 1
        label = Note(topic, number)
        box = Box(label, self._early.pop(label, ()))
        self._boxes[label] = box
        return box

    def put(self, label: Note, source: int, data: bytes) -> None:
        """Keep a note until it is heard."""
        box = self._boxes.get(label)
        if box is not None:
            notes = box.notes
        elif label.number >= self._made.get(label.topic, 0):
            notes = self._early_notes(label)
        else:
            return  # its channel is gone
        if len(notes) == KEPT:
            self._warn(label.topic)
        notes.append((source, data))

    def _early_notes(self, label: Note) -> deque[tuple[int, bytes]]:
        if label not in self._early and len(self._early) == _EARLY_CHANNELS:
            oldest = next(iter(self._early))
            self._warn(oldest.topic)
            del self._early[oldest]
        return self._early.setdefault(label, deque(maxlen=KEPT))

    def _warn(self, topic: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("rank %d drops the oldest of the notes about %r, as nobody hears them", self._rank, topic)

    def last(self) -> list[tuple[Note, bytes]]:
        """What this rank announced last on each of its channels."""
        return [(box.label, box.last) for box in list(self._boxes.values()) if box.last is not None]
