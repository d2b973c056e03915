"""What a rank keeps of a plan, to use it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .copies import CopyPlan
from .file_plan import FilePlan
from .messages import Transfer

__all__ = ["KnownPlan"]


@dataclass(frozen=True, slots=True, eq=False)
class KnownPlan:
    """One rank's part of a plan, with all that can be used again while the plan stays the same.

    Attributes:
        plan_id: Names the plan; 0 for none.
        fingerprint: The digest of the structure for which it is right,
        block_bytes: and the block size.
        total_bytes: All that the ranks write together.
        transfers: What the ranks send each other of partial tensors.
        files: This rank's.
        copies: What it has twice with others.
    """

    plan_id: int = 0
    fingerprint: bytes = b""
    block_bytes: int = 0
    total_bytes: int = 0
    transfers: Sequence[Transfer] = ()
    files: Sequence[FilePlan] = ()
    copies: CopyPlan = field(default_factory=CopyPlan.of_nothing)
