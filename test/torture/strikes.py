"""What is done to a process at one of its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .calls import Call, Perform

__all__ = ["Strike"]


@dataclass(frozen=True, slots=True)
class Strike:
    """A handler that strikes at a call of some number: before it is made, or, if it writes, when half is written."""

    rank: int
    number: int
    half: bool
    strike: Callable[[], None]

    def __call__(self, call: Call, perform: Perform) -> Any:
        """Handle a call, see `Interposer`."""
        if (call.rank, call.number) != (self.rank, self.number):
            return perform()
        if not (self.half and call.name == "pwrite"):
            self.strike()
            return perform()
        descriptor, data, offset = call.arguments
        written = perform(descriptor, memoryview(data)[: len(data) // 2], offset)
        self.strike()
        return written

    def __str__(self) -> str:
        return f"at call {self.number} of rank {self.rank}{', in the middle' if self.half else ''}"
