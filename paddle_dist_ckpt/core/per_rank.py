"""Values of which every rank keeps its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank"]


@dataclass(slots=True)
class PerRank:
    """A value of which every rank keeps its own: a random generator's state, a position in the data.

    Other values are stored once for all ranks. Each rank's own is stored with its data, and comes back to the rank of
    that number; see ``LoadOptions.per_rank`` for a job of another size.

    Attributes:
        value: What can be a value in a state_dict; no tensors. (Numpy arrays are values here.)
    """

    value: Any
