"""For tests, this library's and others': numpy tensors, ranks as threads, a storage with faults."""

from .arrays import NumpyAdapter, ShardedArray, shard_array
from .faults import FaultyStorage
from .in_process import InProcessWorld
from .simulation import SimulatedRank, run_ranks

__all__ = [
    "FaultyStorage",
    "InProcessWorld",
    "NumpyAdapter",
    "ShardedArray",
    "SimulatedRank",
    "run_ranks",
    "shard_array",
]
