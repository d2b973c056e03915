"""Functions that test_fleet.py sends to ranks: a model of fleet's layers and its optimizer, on any hybrid strategy.

All ranks of the world call each of them, since fleet's topologies are of all ranks; the first ones are those of the
strategy, and the others repeat them as further data-parallel replicas, which neither save nor load.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)

from paddle_dist_ckpt import load_state_dict, save_state_dict
from paddle_dist_ckpt.paddle_adapter.optimizers import make_accumulators
from test.paddle.layouts import Array, Spread, part_of
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import NUMPY_DTYPES, dist_tensor, local_array
from test.ranks.fleet import topology
from test.ranks.groups import group_of

State = dict[str, dict[str, Any]]
Table = dict[str, dict[str, tuple[tuple[int, ...], str]]]  # by part and key: global shape and dtype

VOCABULARY, HIDDEN, INNER, EXPERTS = 28, 12, 20, 4
_WORLD = 4


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees of parallelism; their product is the number of ranks.

    Attributes:
        data: Replicas.
        tensor: Parts of each layer.
        stages: Of the pipeline.
        experts: Parts of the set of experts.
        sharding: Parts of the optimizer's state, cut anywhere within parameters.
        whole_parameters: Whether sharding gives each parameter's state to one rank instead, as its version 1 does.
        fleet_experts: Whether fleet's own expert groups are used, which are laid over the tensor-parallel ones, and
            experts are not cut. Else a group of data-parallel replicas divides the experts.
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    experts: int = 1
    sharding: int = 1
    whole_parameters: bool = False
    fleet_experts: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.stages * self.experts * self.sharding

    def configs(self) -> dict[str, Any]:
        """Fleet's configuration for the whole world."""
        if self.fleet_experts:
            order = ["pp", "moe_sharding", "ep", "dp", "sharding", "sep", "cp", "mp"]
            sharding = _WORLD // self.tensor
            experts = {"ep_degree": self.experts, "moe_sharding_degree": _WORLD // self.experts}
            return {"order": order, "mp_degree": self.tensor, "sharding_degree": sharding, **experts}
        degrees = {"mp_degree": self.tensor, "pp_degree": self.stages, "sharding_degree": self.sharding}
        return {"dp_degree": _WORLD // math.prod(degrees.values()), "split_param": not self.whole_parameters, **degrees}


STRATEGIES = {
    "d2": Strategy(data=2),
    "d4": Strategy(data=4),
    "t2": Strategy(tensor=2),
    "t4": Strategy(tensor=4),
    "p2": Strategy(stages=2),
    "p4": Strategy(stages=4),
    "e2": Strategy(experts=2, fleet_experts=True),
    "e4": Strategy(experts=4, fleet_experts=True),
    "d2t2": Strategy(data=2, tensor=2),
    "d2p2": Strategy(data=2, stages=2),
    "t2p2": Strategy(tensor=2, stages=2),
    "d2e2": Strategy(data=2, experts=2, fleet_experts=True),
    "t2e2": Strategy(tensor=2, experts=2),
    "t2e2 of fleet": Strategy(tensor=2, experts=2, fleet_experts=True),
    "s2": Strategy(sharding=2),
    "s4": Strategy(sharding=4),
    "s2t2": Strategy(sharding=2, tensor=2),
    "s2p2": Strategy(sharding=2, stages=2),
    "s2 of version 1": Strategy(sharding=2, whole_parameters=True),
    "s2t2 of version 1": Strategy(sharding=2, tensor=2, whole_parameters=True),
}


# -- the model


class _Feed(paddle.nn.Layer):
    """Two linear layers, cut over the tensor-parallel ranks or not."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        if cut:
            self.up = ColumnParallelLinear(HIDDEN, INNER, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(INNER, HIDDEN, has_bias=True, input_is_parallel=True)
        else:
            self.up, self.down = paddle.nn.Linear(HIDDEN, INNER), paddle.nn.Linear(INNER, HIDDEN)


class _Block(paddle.nn.Layer):
    """A feed-forward layer and experts, of which each rank has its own ones only."""

    def __init__(self, experts: range, cut_experts: bool, half: bool) -> None:
        super().__init__()
        self.norm = paddle.nn.LayerNorm(HIDDEN)
        self.feed = _Feed(True)
        self.gate = paddle.nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        self.experts = paddle.nn.LayerDict({str(i): _Feed(cut_experts) for i in experts})
        if half:
            self.to(dtype="bfloat16")


class Job:
    """A model and its optimizer on this rank."""

    def __init__(self, strategy: Strategy, hcg: Any) -> None:
        rank = hcg.get_expert_parallel_rank() if strategy.fleet_experts else dist.get_rank() // strategy.tensor
        each = EXPERTS // strategy.experts
        first = rank % strategy.experts * each
        mine = range(first, first + each)
        blocks = [LayerDesc(_Block, mine, not strategy.fleet_experts, half=i % 2 == 1) for i in range(3)]
        shared = {"shared_weight_attr": "weight", "num_embeddings": VOCABULARY, "embedding_dim": HIDDEN}
        first_layer = SharedLayerDesc("tokens", VocabParallelEmbedding, **shared)
        last_layer = SharedLayerDesc("tokens", VocabParallelEmbedding, forward_func=_logits, **shared)
        head = LayerDesc(ColumnParallelLinear, HIDDEN, VOCABULARY, has_bias=False)
        self.model = PipelineLayer([first_layer, *blocks, head, last_layer], topology=hcg.topology())
        self.optimizer = paddle.optimizer.AdamW(0.1, parameters=self.model.parameters(), multi_precision=True)
        if strategy.sharding > 1:
            self.optimizer = fleet.distributed_optimizer(self.optimizer)._inner_opt
        if strategy.sharding > 1 and not strategy.whole_parameters:
            _step(self.optimizer, hcg)
        else:
            make_accumulators(getattr(self.optimizer, "_inner_opt", self.optimizer))

    def state(self) -> State:
        """What fleet gives to be saved."""
        model = self.model.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model)}


def _logits(layer: Any, hidden: Any) -> Any:
    return paddle.matmul(hidden, layer.weight, transpose_y=True)


def _step(optimizer: Any, hcg: Any) -> None:
    """The first step, before which sharding has no slices of parameters, and no state.

    All but the arithmetic, which a CPU does not have for bfloat16.
    """
    optimizer.reduce_gradients(list(optimizer._parameter_list), hcg)
    with patch.object(type(optimizer._inner_opt), "_append_optimize_op", lambda *_: None):
        optimizer.step()


_jobs: dict[str, Job] = {}  # state of the worker process


@contextmanager
def job_on(name: str) -> Iterator[Job]:
    """The job of a strategy, inside its topology. It is built once."""
    strategy = STRATEGIES[name]
    with topology(**strategy.configs()) as hcg:
        if name not in _jobs:
            _jobs[name] = Job(strategy, hcg)
        yield _jobs[name]


# -- contents


def contents(key: str, shape: tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """The whole tensor of a key: numbers that follow from key and index, and that every dtype here can tell apart."""
    index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    start = zlib.crc32(f"{key}/{salt}".encode())
    if dtype == "bfloat16":
        return ((start + index * 37) % 251 - 125).astype(NUMPY_DTYPES[dtype])
    return (start % 4096 * 1024 + index).astype(NUMPY_DTYPES[dtype])


def memory(tensor: Any) -> Array:
    """A tensor's memory as it is."""
    dtype = np.dtype(NUMPY_DTYPES[_dtype_of(tensor)])
    assert tensor.is_contiguous()
    raw = (ctypes.c_char * (math.prod(tensor.shape) * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(raw, dtype).reshape(tensor.shape)


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def _local(value: Any) -> Array:
    """The memory of a ShardedWeight or DistTensor on this rank."""
    return local_array(value) if isinstance(value, paddle.Tensor) else memory(value.local_tensor)


def _expected(key: str, value: Any, salt: int = 0) -> Array:
    """What a ShardedWeight or DistTensor is to hold on this rank."""
    if isinstance(value, paddle.Tensor):
        part = part_of(contents(key, tuple(value.shape), _dtype_of(value), salt), spread_of(key), dist.get_rank())
        assert part is not None
        return np.ascontiguousarray(part)
    whole = contents(key, tuple(value.global_shape), _dtype_of(value.local_tensor), salt)
    box = tuple(slice(o, o + n) for o, n in zip(value.global_offset, value.local_shape, strict=True))
    part = np.ascontiguousarray(whole[box])
    return part.reshape(-1)[value.flattened_range] if value.is_flattened else part


def _fill(state: State, salt: int = 0) -> State:
    """Give every ShardedWeight its contents."""
    for weights in state.values():
        for key, weight in weights.items():
            memory(weight.local_tensor)[...] = _expected(key, weight, salt)
    return state


def _problems(state: State) -> list[str]:
    """The keys whose contents are not what they are to be."""
    return [
        f"{part}.{key}"
        for part, values in state.items()
        for key, value in values.items()
        if _local(value).tobytes() != _expected(key, value).tobytes()
    ]


# -- the same tensors as DistTensors


def spread_of(key: str) -> Spread:
    """How a key's DistTensor lies on four ranks."""
    if "_pow_acc" in key:
        return Spread([0, 1, 2, 3], (None,))
    choices = [
        Spread([0, 1, 2, 3], (0,)),
        Spread([3, 2, 1, 0], (0,)),
        Spread([[0, 1], [2, 3]], (0, 0)),
        Spread([[0, 2], [1, 3]], (None, 0)),
        Spread([0, 1, 2, 3], (None,)),
    ]
    return choices[zlib.crc32(key.encode()) % len(choices)]


def _dist_tensors(table: Table, salt: int) -> State:
    return {
        part: {key: dist_tensor(contents(key, *about, salt), spread_of(key)) for key, about in tensors.items()}
        for part, tensors in table.items()
    }


def _half_of_each(weights: State, tensors: State) -> State:
    """ShardedWeights of about half of the keys, and DistTensors of the others."""
    return {
        part: {
            **{key: weight for key, weight in weights[part].items() if zlib.crc32(key.encode()) % 2},
            **{key: tensor for key, tensor in tensors[part].items() if not zlib.crc32(key.encode()) % 2},
        }
        for part in weights
    }


def _as_semi_auto(state: State) -> State:
    """With the keys that the library gives to the optimizer's variables of a semi-auto job."""
    renamed = {}
    for key, value in state["optimizer"].items():
        parameter, _, kind = key.rpartition(".")
        renamed[f"{parameter}.{'master_weight' if kind == 'w_0' else kind.removesuffix('_0')}"] = value
    return {"model": state["model"], "optimizer": renamed}


# -- what tests call


@dataclass(frozen=True, slots=True)
class Saved:
    """What a rank has saved: tensors, how many of them as flattened ranges, and the bytes that it wrote."""

    tensors: int
    flattened: int
    bytes_written: int


def save(name: str, path: str) -> Saved | None:
    """Save a strategy's job, without a collective."""
    with job_on(name) as job:
        ranks = STRATEGIES[name].ranks
        if dist.get_rank() >= ranks:
            return None
        state = _fill(job.state())
        with _no_collectives():
            report = save_state_dict(state, path, group_of(ranks))
        weights = [weight for each in state.values() for weight in each.values()]
        return Saved(len(weights), sum(weight.is_flattened for weight in weights), report.bytes_written)


def load(name: str, path: str) -> list[str] | None:
    """Load into a strategy's job, which held something else; returns what is wrong with it afterwards."""
    with job_on(name) as job:
        ranks = STRATEGIES[name].ranks
        if dist.get_rank() >= ranks:
            return None
        state = _fill(job.state(), salt=1)
        assert len(_problems(state)) == sum(map(len, state.values()))
        load_state_dict(state, path, group_of(ranks))
        return _problems(job.state())  # made anew: what was loaded has to be in the model and the optimizer themselves


def save_with_dist_tensors(name: str, path: str, table: Table) -> None:
    """Save about half of the keys as ShardedWeights, the others as DistTensors."""
    with job_on(name) as job:
        if dist.get_rank() < 4:
            state = _half_of_each(_fill(job.state()), _dist_tensors(table, 0))
            save_state_dict(state, path, group_of(4))


def load_with_dist_tensors(name: str, path: str, table: Table) -> list[str] | None:
    """Load into about as many ShardedWeights as DistTensors; returns what is wrong with them."""
    with job_on(name) as job:
        if dist.get_rank() >= 4:
            return None
        state = _half_of_each(_fill(job.state(), salt=1), _dist_tensors(table, 1))
        load_state_dict(state, path, group_of(4))
        return _problems(state)


def save_dist_tensors(path: str, table: Table, semi_auto: bool) -> None:
    """Save DistTensors under the keys of ShardedWeights, or of a semi-auto job."""
    state = _dist_tensors(table, 0)
    save_state_dict(_as_semi_auto(state) if semi_auto else state, path, group_of(4))


def load_dist_tensors(path: str, table: Table, semi_auto: bool) -> list[str]:
    """Load into DistTensors under the keys of ShardedWeights, or of a semi-auto job."""
    state = _dist_tensors(table, 1)
    load_state_dict(_as_semi_auto(state) if semi_auto else state, path, group_of(4))
    return _problems(state)


def save_plain_state_dict(name: str, path: str) -> Outcome | None:
    """Save what a model's ``state_dict()`` gives: each rank's own parts, which do not say what they are parts of."""
    with job_on(name) as job:
        if dist.get_rank() >= STRATEGIES[name].ranks:
            return None
        group = group_of(STRATEGIES[name].ranks)
        return outcome_of(lambda: save_state_dict(job.model.state_dict(), path, group))


def slices_of_accumulators(name: str) -> tuple[int, int]:
    """How many of the optimizer's ShardedWeights there are that leave a padding out, and how many are copies."""
    with job_on(name) as job:
        inner = job.optimizer._inner_opt
        own = [tensor for by_name in inner._accumulators.values() for tensor in by_name.values()]
        sizes = {tensor.data_ptr(): tensor.size for tensor in (*own, *inner._master_weights.values())}
        found = [weight.local_tensor for weight in job.state()["optimizer"].values()]
        copies = [tensor for tensor in found if tensor.data_ptr() not in sizes]
        padded = [tensor for tensor in found if tensor.size < sizes.get(tensor.data_ptr(), 0)]
        return len(padded), len(copies)


@contextmanager
def _no_collectives() -> Iterator[None]:
    """Let what would move tensors between ranks fail."""
    names = (
        "broadcast",
        "scatter",
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "alltoall",
        "send",
        "recv",
        "gather",
    )
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, side_effect=AssertionError(name)))
        yield
