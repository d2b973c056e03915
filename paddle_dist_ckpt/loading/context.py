"""What a load works with on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..folder.context import Context

__all__ = ["LoadContext"]


@dataclass(frozen=True, slots=True)
class LoadContext(Context):
    """One rank's surroundings in a load.

    Attributes:
        threads: How many threads it reads with; None for this rank's part of the host's cores.
        offload: Whether its transport was chosen for host memory.
    """

    threads: int | None = None
    offload: bool = False
