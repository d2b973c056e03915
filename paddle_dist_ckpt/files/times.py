"""How long a save took, phase by phase on each of its ranks, as `.metadata` keeps it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from ..core.columns import Column, IntArray, column_size, pack_column, unpack_column
from ..errors import CheckpointCorruptedError

__all__ = ["SaveTimes"]

_MOST_PHASES = 100
_MOST = 2**53  # ms, and integers below it are exact in every reader's JSON


class SaveTimes(msgspec.Struct, frozen=True):
    """How long each phase took on each rank, up to when it had written its files.

    Attributes:
        ranks: The global ranks.
        milliseconds: By phase, in the order in which they came: a number for each of the ranks.
    """

    ranks: Column
    milliseconds: dict[str, Column]

    @classmethod
    def of(cls, seconds: Mapping[int, Mapping[str, float]]) -> SaveTimes:
        """The times of ranks in seconds, by rank and phase. A phase that a rank did not have took it no time."""
        phases = dict.fromkeys(phase for times in seconds.values() for phase in times)
        columns = {
            phase: pack_column([round(1000 * max(0.0, times.get(phase, 0.0))) for times in seconds.values()])
            for phase in phases
        }
        return cls(pack_column(list(seconds)), columns)

    def check(self, world_size: int) -> None:
        """See that they are the times of so many ranks at most, without an object for each.

        Raises:
            CheckpointCorruptedError: they are not.
        """
        ranks = unpack_column(self.ranks, column_size(self.ranks, "times"), _MOST, "times")
        if len(ranks) > world_size or len(np.unique(ranks)) < len(ranks) or len(self.milliseconds) > _MOST_PHASES:
            raise CheckpointCorruptedError("times of more ranks or phases than there may be")
        for column in self.milliseconds.values():
            unpack_column(column, len(ranks), _MOST, "times")

    def columns(self) -> tuple[IntArray, dict[str, IntArray]]:
        """The ranks, and by phase the milliseconds of each.

        Raises:
            CheckpointCorruptedError: the columns are not what they should be.
        """
        size = column_size(self.ranks, "times")
        phases = {phase: unpack_column(column, size, _MOST, "times") for phase, column in self.milliseconds.items()}
        return unpack_column(self.ranks, size, _MOST, "times"), phases

    def seconds(self) -> dict[int, dict[str, float]]:
        """By rank and phase, in seconds.

        Raises:
            CheckpointCorruptedError: the columns are not what they should be.
        """
        ranks, columns = self.columns()
        phases = {phase: (column / np.float64(1000)).tolist() for phase, column in columns.items()}
        return {rank: {phase: times[i] for phase, times in phases.items()} for i, rank in enumerate(ranks.tolist())}
