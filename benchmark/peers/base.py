"""What a library does in a rank's process, and what libraries have in common."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmark.states import Array, TensorSpec

__all__ = ["TRAINING_BATCH", "TRAINING_FLAGS", "TRAINING_WIDTH", "Checkpointer", "Pending", "huge_pages", "training"]

TRAINING_WIDTH, TRAINING_BATCH = 768, 128
"""Of the three layers that are trained while a save goes on: 7 MB of weights, about 15 ms a step."""
TRAINING_FLAGS = 256
"""Elements of what is reduced over all ranks in each step."""
_HUGE_PAGE = 2 << 20

Numbers = Mapping[str, float]


class Pending(Protocol):
    """A save that goes on in the background."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self) -> Any:
        """Wait until it has ended; raises what went wrong."""


class Checkpointer(ABC):
    """A library, or a way to use it. All methods are called on all ranks alike.

    What is measured is a method that takes a state and a folder. It may return numbers to be kept beside the time (of
    which ``plan`` is the seconds until the library knew what to write or read), or a save that is still going on.
    """

    @abstractmethod
    def setup(self, rank: int, world_size: int) -> None:
        """Join the ranks; called once, before everything else."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """The versions of what is measured."""

    @abstractmethod
    def build(self, specs: Sequence[TensorSpec], rank: int, world_size: int) -> Any:
        """Make this rank's part of a state."""

    @abstractmethod
    def local_arrays(self, state: Any) -> dict[str, Array]:
        """What this rank holds, by name; views if possible."""

    @abstractmethod
    def zero(self, state: Any) -> None:
        """Set all of it to zero."""

    @abstractmethod
    def save(self, state: Any, path: Path) -> Numbers | None:
        """Save into a folder that does not exist yet."""

    @abstractmethod
    def load(self, state: Any, path: Path) -> Numbers | None:
        """Fill the state from a folder."""

    def start_save(self, state: Any, path: Path) -> Pending:
        """Begin to save into a folder that does not exist yet; the state may change once this returns."""
        raise NotImplementedError

    def copier(self, state: Any) -> Callable[[], None]:
        """Makes what copies all of this rank's part into memory that it already has: what a snapshot needs at least."""
        raise NotImplementedError

    def trainer(self) -> Callable[[bool], bool]:
        """Makes what does one step of a training and tells whether its argument was true on all ranks."""
        raise NotImplementedError

    def begin(self, memory: bool, **options: Any) -> None:  # noqa: B027  (few have something to do)
        """Called before each measurement.

        Args:
            memory: Whether memory is measured rather than time.
            options: Those of the measurement.
        """

    def end(self) -> Numbers:
        """What was counted since :meth:`begin`."""
        return {}


def training(nn: Any, dist: Any, optimizer_of: Callable[[Any], Any], batch: Any, flags: Any) -> Callable[[bool], bool]:
    """A training on the CPU whose ranks agree in every step; see :meth:`Checkpointer.trainer`.

    Args:
        nn: Paddle's or torch's module of layers.
        dist: Its module of collectives.
        optimizer_of: Makes an optimizer of parameters.
        batch: A tensor of shape [:data:`TRAINING_BATCH`, :data:`TRAINING_WIDTH`].
        flags: A tensor of shape [:data:`TRAINING_FLAGS`].
    """
    linear = [nn.Linear(TRAINING_WIDTH, TRAINING_WIDTH) for _ in range(3)]
    model = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])
    optimizer = optimizer_of(model.parameters())
    clear = optimizer.clear_grad if hasattr(optimizer, "clear_grad") else optimizer.zero_grad

    def step(flag: bool) -> bool:
        loss = model(batch).square().mean()
        clear()
        loss.backward()
        optimizer.step()
        flags.fill_(float(flag))
        dist.all_reduce(flags)
        return float(flags[0]) == dist.get_world_size()

    return step


def huge_pages(nbytes: int) -> Array:
    """Fresh memory of at least so many bytes, on huge pages where the kernel has them."""
    length = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
