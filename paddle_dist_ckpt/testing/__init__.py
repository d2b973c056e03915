"""For tests, this library's and others': numpy tensors, ranks as threads, faults, and tests for storages and hubs.

:mod:`.storage_conformance` and :mod:`.hub_conformance` need pytest.
"""

from ..core.box import Box
from .arrays import NumpyAdapter, ShardedArray, shard_array
from .faults import FaultyStorage, Stall
from .in_process import InProcessWorld
from .simulation import SimulatedRank, run_ranks

__all__ = [
    "Box",
    "FaultyStorage",
    "InProcessWorld",
    "NumpyAdapter",
    "ShardedArray",
    "SimulatedRank",
    "Stall",
    "run_ranks",
    "shard_array",
]
