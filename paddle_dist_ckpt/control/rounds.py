"""Rounds of a session in typed messages: what a rank asks, and what the coordinator answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ..core.messages import decode, encode
from ..core.protocols import ControlSession

__all__ = ["Messages", "ask", "check_same", "only_on"]

C = TypeVar("C")
T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)
Messages = Mapping[int, bytes]
"""By rank."""


def only_on(coordinator: C | None, answer: Callable[[C, Messages], Messages]) -> Callable[[Messages], Messages]:
    """How a round is answered: by a method of an object that there is on the coordinator alone."""

    def combine(messages: Messages) -> Messages:
        assert coordinator is not None, "only the coordinator answers"
        return answer(coordinator, messages)

    return combine


def check_same(
    names: Sequence[str],
    passed: Mapping[int, tuple[object, ...]],
    coordinator: int,
    shown: Callable[[object], str] = repr,
) -> None:
    """All ranks must have passed the same arguments.

    Args:
        names: What the arguments are called.
        passed: What each rank has passed, in the order of the names.
        coordinator: The rank with which the others are compared.
        shown: Writes an argument.

    Raises:
        ValueError: they did not; says what two of them have passed.
    """
    if len(set(passed.values())) == 1:
        return  # as nearly always; of many ranks this is seen faster
    ours = passed[coordinator]
    for rank, theirs in sorted(passed.items()):
        for name, one, other in zip(names, theirs, ours, strict=True):
            if one != other:
                raise ValueError(
                    f"rank {rank} passed {name}={shown(one)}, rank {coordinator} {name}={shown(other)}; all ranks must "
                    "pass the same"
                )


def ask(
    session: ControlSession,
    name: str,
    local: Callable[[], tuple[T, msgspec.Struct]],
    kind: type[A],
    answer: Callable[[Messages], Messages],
) -> tuple[T, A]:
    """A round of a session, in typed messages.

    Args:
        session: The session.
        name: The round's name.
        local: Does this rank's part; returns what came of it for this rank, and what the coordinator is asked.
        kind: The type of the coordinator's answer.
        answer: Answers all ranks, on the coordinator.

    Returns:
        What came of this rank's part, and the coordinator's answer.
    """
    results: list[T] = []

    def request() -> bytes:
        result, message = local()
        results.append(result)
        return encode(message)

    reply = session.gather_scatter(name, request, answer)
    return results[0], decode(reply, kind)
