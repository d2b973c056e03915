"""Functions that test_collectives.py sends to ranks with a device each."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from test.device_plugin import control

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PROD}


def values(rank: int, size: int, seed: int = 0) -> np.ndarray:
    """Return what a rank starts with: float32 numbers between 0 and 4."""
    return np.random.default_rng([seed, rank]).random(size, dtype=np.float32) * 4


def mine(size: int, dtype: str = "float32") -> paddle.Tensor:
    """Return this rank's `values` on its device. The cast happens on the host."""
    host = paddle.to_tensor(values(dist.get_rank(), size), place=paddle.CPUPlace()).astype(dtype)
    return host._copy_to(paddle.framework._current_expected_place(), True)


def raw(tensor: paddle.Tensor) -> bytes:
    """Return a tensor's bytes."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), int(np.prod(host.shape)) * host.element_size())


def places() -> tuple[str, str, str]:
    """Return the device, where a tensor is, and the backend of the world."""
    return paddle.get_device(), str(paddle.ones([1]).place), dist.get_backend()


def all_reduce(dtype: str, op: str, size: int) -> bytes:
    """Reduce `values` over the ranks."""
    tensor = mine(size, dtype)
    dist.all_reduce(tensor, op=OPS[op])
    return raw(tensor)


def broadcast(dtype: str, size: int, root: int) -> bytes:
    """Return the root's `values`."""
    tensor = mine(size, dtype)
    dist.broadcast(tensor, src=root)
    return raw(tensor)


def refusal(dtype: str) -> str:
    """Return what is raised for a broadcast of a type that cannot be broadcast."""
    try:
        dist.broadcast(mine(4, dtype), src=0)
    except RuntimeError as error:
        return str(error)
    return ""


def reduce(size: int, root: int) -> bytes:
    """Return the sum on the root, and what was there before on others."""
    tensor = mine(size)
    dist.reduce(tensor, dst=root)
    return raw(tensor)


def all_gather(size: int) -> tuple[list[bytes], bytes]:
    """Gather into a list and into one tensor."""
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, mine(size))
    whole = paddle.empty([size * dist.get_world_size()])
    dist.stream.all_gather(whole, mine(size))
    return [raw(part) for part in parts], raw(whole)


def reduce_scatter(size: int) -> bytes:
    """Return this rank's part of the sum."""
    part = paddle.empty([size])
    dist.stream.reduce_scatter(part, mine(size * dist.get_world_size()))
    return raw(part)


def all_to_all(sizes: list[list[int]]) -> tuple[list[bytes], bytes]:
    """Exchange two numbers with each rank, then ``sizes[a][b]`` from rank a to rank b."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = mine(2 * ranks)
    parts: list[paddle.Tensor] = []
    dist.alltoall(parts, [tensor[2 * i : 2 * i + 2] for i in range(ranks)])
    sent, received = sizes[rank], [row[rank] for row in sizes]
    output = paddle.empty([sum(received)])
    dist.alltoall_single(output, mine(sum(sent)), in_split_sizes=sent, out_split_sizes=received)
    return [raw(part) for part in parts], raw(output)


def send_and_receive(size: int) -> bytes:
    """Hand `values` from rank to rank in a line, so that the last has the first one's."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensor = mine(size)
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
    if rank < last:
        dist.send(tensor, dst=rank + 1)
    return raw(tensor)


def batch(size: int) -> list[bytes]:
    """Send `values` to every other rank and receive theirs, in one batch. Returns what each rank had."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [mine(size) if i == rank else paddle.zeros([size]) for i in range(ranks)]
    others = [i for i in range(ranks) if i != rank]
    operations = [dist.P2POp(dist.isend, parts[rank], i) for i in others]
    operations += [dist.P2POp(dist.irecv, parts[i], i) for i in others]
    for task in dist.batch_isend_irecv(operations):
        task.wait()
    return [raw(part) for part in parts]


def objects() -> tuple[list[Any], list[Any]]:
    """Gather and broadcast Python objects."""
    gathered: list[Any] = []
    dist.all_gather_object(gathered, {"rank": dist.get_rank(), "pad": "x" * dist.get_rank()})
    given = [("from", dist.get_rank())]
    dist.broadcast_object_list(given, src=1)
    return gathered, given


def groups(size: int) -> tuple[bytes, bytes]:
    """Sum over the last two ranks on the device, and over all in host memory with gloo. Others keep their `values`."""
    ranks = dist.get_world_size()
    pair = dist.new_group([ranks - 2, ranks - 1])
    on_host = dist.new_group(list(range(ranks)), backend="gloo")
    tensor, host = mine(size), paddle.to_tensor(values(dist.get_rank(), size), place=paddle.CPUPlace())
    if dist.get_rank() >= ranks - 2:
        dist.all_reduce(tensor, group=pair)
    dist.all_reduce(host, group=on_host)
    return raw(tensor), raw(host)


def stream_order(size: int) -> tuple[bool, bool, bytes]:
    """Queue a broadcast while streams are held.

    Returns:
        Whether the stream of the collective was idle while held, whether the call of the runtime was made by then, and
        what arrived.
    """
    tensor = mine(size)
    dist.broadcast(tensor, src=0)  # the first one makes the communicator, and waits for the others
    tensor = mine(size)
    with control.held():
        control.reset()
        task = dist.stream.broadcast(tensor, src=0, sync_op=False)
        idle, asked = task.is_completed(), "broadcast" in control.counts()
    task.wait()
    return idle, asked, raw(tensor)


def disagree() -> None:
    """Let the ranks call different collectives."""
    tensor = mine(4)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.broadcast(tensor, src=1)
    else:
        dist.all_reduce(tensor)
    raw(tensor)


def shared_memory_names() -> list[str]:
    """Return the names that communicators which this rank began have left in the system's shared memory."""
    dist.barrier()
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"test-device-{os.getpid()}-")]
