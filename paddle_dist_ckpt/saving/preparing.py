"""Memory for the snapshots of saves in the background, got ready before the first of them.

The first touch of memory costs several times as much as a copy to it, and on virtual machines far more. A thread that
is in nobody's way does it while the job gets ready to train.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from ..core.memory import Bytes1D
from ..core.threads import at_exit, lower_priority
from ..tree.state_dict import Adapter
from .describe import describe

__all__ = ["Touching", "snapshot_bytes_of"]

_PAGE, _AT_ONCE = 4096, 8 << 20
_NICE = 10  # the lowest priority gets too little of a core that always trains to be done before the first save
_SLACK = 1.02  # ranks' parts of what is replicated differ a little


class Touching:
    """A thread that touches all pages of some memory, until it is ended; from then on nothing writes there.

    Args:
        memory: The memory.
        may_go_on: Asked now and then; the rest stays as it is once it says no.

    Attributes:
        touched: How many bytes it has touched, from the beginning on.
    """

    def __init__(self, memory: Bytes1D, may_go_on: Callable[[], bool] = lambda: True) -> None:
        self._memory, self._may_go_on = memory, may_go_on
        self.touched = 0
        self._lock, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="paddle_dist_ckpt memory", daemon=True)

    def start(self) -> None:
        """Begin, unless the interpreter is ending."""
        if not at_exit():
            self._thread.start()

    def end(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._ended = True

    def join(self) -> None:
        """Wait until all is touched, or it was ended."""
        self._thread.join()

    def _run(self) -> None:
        lower_priority(_NICE)
        importlib.import_module("numpy.ma")  # numpy would load it in the first plan
        for start in range(0, len(self._memory), _AT_ONCE):
            if not self._may_go_on():
                return
            with self._lock:
                if self._ended:
                    return
                self._memory[start : start + _AT_ONCE : _PAGE] = 0
                self.touched = min(start + _AT_ONCE, len(self._memory))


def snapshot_bytes_of(
    find: Callable[[], tuple[dict[Any, Any], Adapter]], rank: int, ranks: int, bound: int | None
) -> int:
    """About how large a rank's snapshot of a state will be, without asking the others; 0 if it will not be in memory
    of the host's own.

    What a rank has whole is taken to be divided among all ``ranks``; ``bound`` is the most that there may be.
    """
    tensors = describe(*find(), rank).tensors
    sizes = []
    for geometry in tensors.geometries:
        if geometry.on_device:
            return 0
        held = sum(shard.box.size for shard in geometry.shards)
        whole = all(shard.box.shape == geometry.shape for shard in geometry.shards)
        sizes.append(held * geometry.dtype.itemsize / (ranks if whole else 1))
    nbytes = int(sum(sizes[number] for number in tensors.geometry) * _SLACK)
    return nbytes if bound is None else min(nbytes, bound)
