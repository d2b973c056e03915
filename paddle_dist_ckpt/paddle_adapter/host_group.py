"""Groups whose collectives take host memory, for ranks whose own group is a device's."""

from __future__ import annotations

import socket
import time
from typing import Any

import paddle.distributed as dist
from paddle.base import core
from paddle.distributed.communication.group import Group, _GroupManager

from .transport import takes_host_memory

__all__ = ["host_group"]

_STORE_SECONDS = 300
_GROUP_ID = 1 << 20  # far above those that Paddle counts up
_made: list[Any] = []  # must live as long as the process


def host_group(group: Any) -> Any:
    """A group of the same ranks that takes host memory: the group itself, one that the job has made, or a new one.

    Every rank of the group calls it at the same time.
    """
    for known in (group, *(_GroupManager.group_map_by_id[i] for i in sorted(_GroupManager.group_map_by_id))):
        if sorted(known.ranks) == sorted(group.ranks) and known.process_group is not None and takes_host_memory(known):
            return known
    # Not by new_group: that counts groups, which have to be counted alike on ranks that are not in this one.
    number = _GROUP_ID + group.id
    store = _own_store(f"paddle_dist_ckpt/host_group/{number}/{'-'.join(map(str, group.ranks))}", group.rank)
    process_group = core.ProcessGroupGloo.create(store, group.rank, group.nranks, number)
    made = Group(group.rank, number, group.ranks, process_group, f"paddle_dist_ckpt_{number}")
    _made.append((store, made))
    return made


def _own_store(key: str, rank_in_group: int) -> Any:
    """A store for one group, at its first rank. In the job's own store ranks could meet those of other groups: Paddle's
    gloo groups all use some of the same keys there."""
    job = core.create_or_get_global_tcp_store()
    if rank_in_group == 0:
        host = str(dist.ParallelEnv().current_endpoint).rpartition(":")[0] or "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        store = core.TCPStore(host, port, True, 1, _STORE_SECONDS)  # 1: it does not wait here for the others
        job.set(key, f"{host}:{port}".encode().hex())
        job.add(f"{key}/set", 1)
        return store
    deadline = time.monotonic() + _STORE_SECONDS
    while job.add(f"{key}/set", 0) == 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 of the group has made no store within {_STORE_SECONDS} s")
        time.sleep(0.02)
    host, _, port = bytes.fromhex(job.get(key).decode()).decode().rpartition(":")
    return core.TCPStore(host, int(port), False, 1, _STORE_SECONDS)
