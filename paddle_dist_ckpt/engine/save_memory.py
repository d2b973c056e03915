"""What is remembered from one save to the next of the same group, so that an unchanged state is not planned again."""

from __future__ import annotations

from dataclasses import dataclass, field

from .describe import KnownState
from .messages import Transfer
from .part import FilePart
from .planned_save import PlannedSave

__all__ = ["SaveMemory"]


@dataclass(slots=True, eq=False)
class SaveMemory:
    """One rank's memory, kept with its connection to the group.

    Attributes:
        known: The state that was saved last.
        plan_id: Names the plan by which ``parts`` were made, 0 for none.
        block_bytes: The block size by which they were made.
        total_bytes: All that the ranks write together by that plan.
        transfers: What the ranks send each other of partial tensors.
        parts: This rank's files.
        planned: On the coordinator: the last plan.
    """

    known: KnownState | None = None
    plan_id: int = 0
    block_bytes: int = 0
    total_bytes: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    parts: list[FilePart] = field(default_factory=list)
    planned: PlannedSave | None = None
