"""Process groups for functions that run inside a rank.

Paddle's gloo groups meet twice in the job's store: once under a key of their own and once under ``/<rank>``, which is
the same key for every group. From the second group on a rank can therefore read where its peers *were* listening and
fail, or wait for ever. `install` gives each group a store of its own, which makes ``dist.new_group`` dependable in
ranks of tests.

Paddle's stores send a message in pieces, and each later piece waits until the one before is acknowledged: 40 ms, some
dozens of times for each group. `send_at_once` ends that.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import collective

from test.ranks.world import reserved_ports

__all__ = ["check_groups", "group_of", "install", "make_groups", "send_at_once"]

_STORE_TIMEOUT_SECONDS = 60
_FIRST_GROUP_ID = 1000  # far above the ids that Paddle counts up from 10
_MADE_AT_FIRST = 4  # groups of up to so many ranks, which most tests use; each has threads that wake up again and again

# State of the worker process: the groups of the first n ranks, and what has to live as long as they do.
_groups: dict[int, Any] = {}
_prepared: dict[int, Any] = {}
_stores: list[Any] = []

_new_process_group = collective._new_process_group_impl


def group_of(size: int) -> Any:
    """Return the group of ranks 0 to ``size`` - 1, the default group if these are all.

    On a rank outside the group it is a group that the rank is no member of, as ``dist.new_group`` gives. The first call
    for a group of more than four waits for all of its ranks.
    """
    if size == dist.get_world_size():
        return collective._get_default_group()
    if not _groups or not 0 < size < dist.get_world_size():
        raise ValueError(f"no group of {size} ranks was made in this world; call dist.new_group on all of its ranks")
    if size not in _groups:  # as it is on all of its ranks
        _make(range(size, size + 1))
    return _groups[size]


def install() -> None:
    """Let ``dist.new_group`` meet in a store of the new group's own."""
    collective._new_process_group_impl = _process_group


def send_at_once() -> None:
    """Let no TCP connection that this process has or accepts wait before it sends."""
    for name in os.listdir("/proc/self/fd"):
        try:
            each = socket.socket(fileno=int(name))
        except OSError:
            continue  # it is something else
        if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.detach()


def make_groups() -> None:
    """Make the groups that `group_of` returns, large ones when it is first asked for them. All ranks call it, once."""
    _make(range(1, min(dist.get_world_size(), _MADE_AT_FIRST + 1)))


def _make(sizes: range) -> None:
    mine = [size for size in sizes if size > max(1, dist.get_rank())]
    stores = [_own_store(_FIRST_GROUP_ID + size, dist.get_rank()) for size in mine]
    # Ranks wait for each other in every group, so all groups meet at the same time.
    with ThreadPoolExecutor(max_workers=len(sizes) + 1) as threads:
        for size, made in zip(mine, threads.map(_meet, mine, stores), strict=True):
            _prepared[_FIRST_GROUP_ID + size] = made
    for size in sizes:
        collective._set_custom_gid(_FIRST_GROUP_ID + size)
        _groups[size] = dist.new_group(list(range(size)), backend="gloo")
    collective._set_custom_gid(None)


def check_groups() -> None:
    """Send one number through every group. All ranks call it; it hangs or raises when they are out of step."""
    for size in range(2, dist.get_world_size() + 1):
        if dist.get_rank() < size and (size in _groups or size == dist.get_world_size()):
            ones = paddle.ones([1])
            dist.all_reduce(ones, group=group_of(size))
            if float(ones) != size:
                raise RuntimeError(f"the group of {size} ranks added {size} ones up to {float(ones)}")


def _meet(size: int, store: Any) -> Any:
    group_id = _FIRST_GROUP_ID + size
    return _new_process_group("gloo", store, dist.get_rank(), size, f"first_{size}", None, group_id=group_id)


def _process_group(backend: str, store: Any, rank: int, size: int, *rest: Any, **named: Any) -> Any:
    """Stand in for Paddle's function of the same arguments."""
    group_id = named.get("group_id", 0)
    if group_id in _prepared:
        return _prepared.pop(group_id)
    if backend == "gloo":
        store = _own_store(group_id, rank)
    return _new_process_group(backend, store, rank, size, *rest, **named)


def _own_store(group_id: int, rank_in_group: int) -> Any:
    """Return a store for one group, served by the group's first rank and announced in the job's store."""
    job = core.create_or_get_global_tcp_store()
    key = f"test/group/{group_id}"
    if rank_in_group == 0:
        # Nobody is given the port before the store listens on it: Paddle ends the process where it cannot.
        with reserved_ports(1)[0] as reserved:
            port = reserved.getsockname()[1]
            # A world size of 1 keeps the constructor from waiting for the others, who only then learn the port.
            own = core.TCPStore("127.0.0.1", port, True, 1, _STORE_TIMEOUT_SECONDS)
        job.set(key, str(port))
    else:
        own = core.TCPStore("127.0.0.1", int(job.get(key)), False, 1, _STORE_TIMEOUT_SECONDS)
    send_at_once()
    _stores.append(own)
    return own
