"""Static-graph programs on CPU ranks: Paddle makes their communicators for GPUs only.

All else that such a program needs is there on CPU. Two things are replaced, and nothing of the library under test:

* Paddle makes no communicators for a program's process groups.
* On CPU, all operators that communicate share one communicator, whatever group they name: the one that a dynamic
  ``reshard`` used last. So each collective of a group becomes one of all the program's ranks, of whose result the
  group's part is taken, and before each run a reshard over all these ranks chooses the communicator.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.libpaddle import pir
from paddle.distributed.auto_parallel import api
from paddle.distributed.auto_parallel.static import engine, process_group

__all__ = ["install", "install_stages"]

_SUM = int(dist.ReduceType.kRedSum)

_run = api.DistModel.__call__
_after_partition = engine.remove_unuseful_comm_op_pass


def install(ranks: int) -> None:
    """Let this process run static-graph programs. Call it before ``DistModel.train()``, ``eval()`` or ``predict()``.

    Args:
        ranks: How many ranks will run them: ranks 0 to ``ranks`` - 1, all on the meshes of each program.
    """

    def call(model: Any, *batch: Any) -> Any:
        _choose_communicator(ranks)
        return _run(model, *batch)

    def after_partition(program: Any) -> None:
        _after_partition(program)
        _use_one_group(program, ranks)

    process_group.ProcessGroup.instantiate = _instantiate
    paddle._legacy_C_ops.barrier = lambda *_: None  # it has no communicator either; every run meets anyway
    api.DistModel.__call__ = call
    engine.remove_unuseful_comm_op_pass = after_partition


def _instantiate(group: Any) -> None:
    group._is_instantiate = True


def _choose_communicator(ranks: int) -> None:
    mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["all"])
    part = dist.shard_tensor(paddle.to_tensor(np.zeros(ranks, np.float32)), mesh, [dist.Shard(0)])
    dist.reshard(part, mesh, [dist.Replicate()])


def _use_one_group(program: Any, ranks: int) -> None:
    """Put collectives of ranks 0 to ``ranks`` - 1 in the place of those of smaller groups."""
    block = program.global_block()
    with paddle.static.program_guard(program):
        for operator in list(block.ops):
            if not operator.has_attr("ring_id"):
                continue
            members = process_group.get_process_group(operator.attrs()["ring_id"]).ranks
            pir.set_insertion_point(operator)
            gathered = _gather(operator.operand_source(0), members, ranks)
            operator.result(0).replace_all_uses_with(_result_of(operator, gathered, members.index(dist.get_rank())))
            block.remove_op(operator)


def _gather(value: Any, members: list[int], ranks: int) -> list[Any]:
    """What the members have for ``value``."""
    everything = paddle.split(paddle._C_ops.all_gather(paddle.unsqueeze(value, 0), 0, ranks), ranks, 0)
    return [paddle.squeeze(everything[member], 0) for member in members]


def _result_of(operator: Any, gathered: list[Any], place: int) -> Any:
    """What a collective gives the member at a place, from what the members put in."""
    name = operator.name().removeprefix("pd_op.").removesuffix("_")
    if name == "all_gather":
        return paddle.concat(gathered, 0)
    if operator.attrs().get("reduce_type", _SUM) == _SUM and name in ("all_reduce", "reduce_scatter"):
        total = functools.reduce(paddle.add, gathered)
        return total if name == "all_reduce" else paddle.split(total, len(gathered), 0)[place]
    raise NotImplementedError(f"{operator} is not known here")


def install_stages() -> None:
    """Let this process make programs whose pipeline stages are on different ranks, in place of :func:`install`.

    They do not run: what stages send each other is for GPUs only. The values that go from stage to stage while a
    program is made are broadcast.
    """
    process_group.ProcessGroup.instantiate = _instantiate
    paddle._legacy_C_ops.barrier = lambda *_: None
    paddle.device.synchronize = lambda *_: None
    paddle.base.core.reshard = functools.partial(_to_mesh, paddle.base.core.reshard)


def _to_mesh(reshard: Any, parameter: Any, goal: Any) -> Any:
    """A parameter on a mesh; on other ranks one that has no memory."""
    source, ranks = parameter.process_mesh.process_ids, goal.process_mesh.process_ids
    if source == ranks:
        return reshard(parameter, goal) if parameter._is_initialized() else parameter
    with paddle.base.dygraph.guard():
        mesh = dist.ProcessMesh(list(ranks), dim_names=["stage"])
        value = parameter._local_value().clone() if parameter._is_initialized() else paddle.zeros(parameter.shape)
        dist.broadcast(value.detach(), source[0])
        if dist.get_rank() in ranks:
            return api.dtensor_from_local(value, mesh, [dist.Replicate()])
        return dist.shard_tensor(value, mesh, [dist.Replicate()])
