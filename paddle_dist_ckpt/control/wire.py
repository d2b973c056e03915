"""The messages between ranks, and their bytes.

A message is one msgpack array, whose first item is its class's name; an ``Answer`` or ``Reply``
has its payload beside it, so that tens of megabytes are neither packed nor unpacked. All but ``Whereabouts`` and
``Appointed`` belong to a session; sessions are numbered in the order of opening, the same on every rank, and the rounds
of a session are numbered from 0.

    member -> coordinator     Open, Answer, Fail, Beat, Bye, Received, Whereabouts
    coordinator -> member     Reply, Verdict, Beat, Bye, Appointed
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "BEFORE",
    "MAX_PAYLOAD",
    "MAX_PROBLEMS",
    "MAX_TEXT",
    "MAX_TOPIC",
    "NAMED_COORDINATOR",
    "Answer",
    "Appointed",
    "Beat",
    "Bye",
    "ErrorRecord",
    "Fail",
    "Label",
    "Message",
    "Open",
    "Received",
    "Reply",
    "Verdict",
    "Whereabouts",
    "decode",
    "encode",
]

MAX_PAYLOAD = 1 << 30
"""Longest payload of a message, in bytes: no peer can make a rank allocate more."""
MAX_TOPIC = 1024
MAX_TEXT = 1 << 20
MAX_PROBLEMS = 100_000
MAX_RANKS = 1 << 20

NAMED_COORDINATOR = " with coordinator_rank="
"""Stands in what a session is doing before the rank that a caller named, where that is not the hub's coordinator."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""What is counted, or a rank: one more can be sent as well."""
BEFORE = -1
"""A step before all others."""
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Ranks = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_RANKS)]
Label = tuple[Annotated[str, msgspec.Meta(max_length=MAX_TOPIC)], Number]
"""A topic, and a number among its labels."""
Problems = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PROBLEMS)]


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """An exception on its way to other ranks.

    Attributes:
        type_name: Name of its class.
        message: Its text.
        shared: It concerns all ranks alike, so that each raises this type rather than RankFailureError.
        problems: See StateDictMismatchError.
        missing_ranks: See CheckpointTimeoutError.
        failures: See RankFailureError.
        path, unique_id: See DurabilityUnknownError.
    """

    type_name: Text
    message: Text
    shared: bool = False
    problems: Problems = ()
    missing_ranks: Ranks = ()
    failures: Annotated[tuple[tuple[Number, ErrorRecord], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    path: Text = ""
    unique_id: Number = 0


class Open(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """I have opened the session; ``kind`` is what I am doing, ``timeout`` (seconds) my longest silence, and ``version``
    that of this library which I run."""

    session: Number
    kind: Text
    timeout: float
    version: Annotated[str, msgspec.Meta(max_length=MAX_TOPIC)]


class Answer(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """My message for a round; the payload is the next frame."""

    session: Number
    round: Number
    name: Text


class Fail(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """I failed, in the round called ``name``, or outside of rounds if ``name`` is empty.

    ``round``: the number of that round. It is over if its reply was on the way to me.
    """

    session: Number
    name: Text
    error: ErrorRecord
    round: int = -1


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """I am alive and the session is still open here.

    ``moved``: work that may block in collectives gets on here, or if the coordinator says it, on some rank.
    """

    session: Number
    moved: bool = False


class Bye(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """I have closed the session and will send nothing more in it."""

    session: Number


class Received(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All that you sent in the session has come: your farewell, or your verdict, was the last of it."""

    session: Number


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """What ``combine`` made for you; the payload is the next frame."""

    session: Number
    round: Number


class Verdict(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The session has failed, on every rank, with this error.

    ``resume``: the number of the session that you open next, if it is not the one after this.
    """

    session: Number
    error: ErrorRecord
    resume: Number = 0


class Whereabouts(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All that a rank says about appointments.

    ``answered``: how many questions. ``step``: how far it was then, or is. ``wish``: the last step at which it wished
    for an appointment beyond.
    """

    label: Label
    answered: Number
    step: int
    wish: int


class Appointed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All that the coordinator says about appointments.

    ``asked``: how many questions; ``open``: the last awaits the decision. ``decided``: how many appointments; the last
    is at the first step ``after`` that. ``end``: how far the coordinator came, if there will be no more.
    """

    label: Label
    asked: Number = 0
    open: bool = False
    decided: Number = 0
    after: int = BEFORE
    end: int | None = None


Message = Open | Answer | Fail | Beat | Bye | Received | Reply | Verdict | Whereabouts | Appointed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Pack ``message``."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message:
    """Unpack what :func:`encode` packed.

    Raises:
        msgspec.DecodeError: not a message, or something in it is of a wrong type or out of bounds.
        RecursionError: nested too deeply to be one.
    """
    return _DECODER.decode(frame)
