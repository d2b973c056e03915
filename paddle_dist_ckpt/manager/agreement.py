"""What managers on all ranks must have in common."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ..arguments import as_number
from ..core.protocols import ControlSession

__all__ = ["agree"]


def agree(session: ControlSession, arguments: Mapping[str, Any], name: str) -> str:
    """All ranks must have made the manager with the same arguments.

    Args:
        session: The session of all ranks.
        arguments: This rank's, by name. Numbers of numpy are the same as Python's.
        name: What this rank calls the manager.

    Returns:
        What the coordinator calls it, and no other one: the same on all ranks, which may see its folder under several
        names, and may have made other managers of this one, as a rank that was interrupted has not.

    Raises:
        ValueError: they have not.
    """

    def compare(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        said = {rank: json.loads(data) for rank, data in sorted(messages.items())}
        expected = said[session.coordinator]
        for rank, theirs in said.items():
            for argument, value in theirs.items():
                if value != expected[argument]:
                    raise ValueError(
                        f"the manager's arguments must be the same on every rank: {argument} is "
                        f"{expected[argument]} on rank {session.coordinator}, {value} on rank {rank}"
                    )
        return dict.fromkeys(messages, f"{name} ({secrets.token_hex(4)})".encode(errors="replace"))

    numbers = {argument: as_number(value) for argument, value in arguments.items()}
    ours = {
        argument: repr(value if numbers[argument] is None else numbers[argument])
        for argument, value in arguments.items()
    }
    return session.gather_scatter("agree", lambda: json.dumps(ours).encode(), compare).decode()
