"""A progress bar by bytes, on the coordinator."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Counts bytes, and shows them if it is to.

    Args:
        title: What is going on.
        total: How many bytes there will be.
        shown: Whether to show a bar; None means if stderr is a terminal.
        is_coordinator: Only the coordinator shows one.
    """

    def __init__(self, title: str, total: int, shown: bool | None, is_coordinator: bool) -> None:
        self.done = 0
        self._lock = threading.Lock()
        self._bar: Any = None
        if is_coordinator and (sys.stderr.isatty() if shown is None else shown):
            from tqdm import tqdm  # only needed where somebody looks

            self._bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024)

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
