"""What a save works with on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..folder.context import Context
from .save_memory import SaveMemory

__all__ = ["SaveContext"]


@dataclass(frozen=True, slots=True)
class SaveContext(Context):
    """One rank's surroundings in a save.

    Attributes:
        memory: What is remembered from one save to the next.
        replace_newest: Whether a save without an id replaces the newest checkpoint.
    """

    memory: SaveMemory = field(default_factory=SaveMemory)
    replace_newest: bool = False
