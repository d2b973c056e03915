"""Group sharding on CPU ranks, which Paddle lets nobody but devices use.

What its classes ask of a device is put in its place while `on_host` is entered, and taken away afterwards; nothing of
them is changed: the device is said to be a GPU, and what they copy to and from it stays on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import paddle
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage2,
    group_sharded_stage3,
    group_sharded_storage,
    group_sharded_utils,
)

__all__ = ["on_host"]

_MODULES = (
    group_sharded_optimizer_stage2,
    group_sharded_stage2,
    group_sharded_stage3,
    group_sharded_storage,
    group_sharded_utils,
)


@contextmanager
def on_host() -> Iterator[None]:
    """Let the classes of group sharding be made, and used, on the host."""
    with ExitStack() as stack:
        for module in _MODULES:
            if hasattr(module, "device_guard"):
                stack.enter_context(patch.object(module, "device_guard", _no_guard))
            if hasattr(module, "cvt_to_device"):
                stack.enter_context(patch.object(module, "cvt_to_device", _where_it_is))
        stack.enter_context(patch.object(core, "is_compiled_with_cuda", lambda: True))
        stack.enter_context(patch.object(paddle, "get_device", lambda: "gpu:0"))
        stack.enter_context(patch.object(paddle.Tensor, "cuda", _where_it_is))
        stack.enter_context(patch.object(paddle.Tensor, "cpu", paddle.clone))  # the first is cleared afterwards
        yield


def _no_guard(*_: Any, **__: Any) -> Any:
    return nullcontext()


def _where_it_is(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor
