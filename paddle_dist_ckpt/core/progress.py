"""A progress bar by bytes, on the coordinator."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from typing import Any

__all__ = ["Progress"]

_logger = logging.getLogger("paddle_dist_ckpt")
_LONG_SECONDS = 1.0


class Progress:
    """Counts bytes, and shows them if it is to.

    Args:
        title: What is going on.
        total: How many bytes there will be.
        shown: Whether to show a bar; None means if stderr is a terminal, and it takes more than a second.
        is_coordinator: Only the coordinator shows one.
        ends_in_log: Whether a line of the log comes in the bar's place at the end, if the log is on.
    """

    def __init__(
        self, title: str, total: int, shown: bool | None, is_coordinator: bool, ends_in_log: bool = False
    ) -> None:
        self.done = 0
        self._lock = threading.Lock()
        self._bar: Any = None
        if is_coordinator and (_is_terminal(sys.stderr) if shown is None else shown):
            from tqdm import tqdm  # only needed where somebody looks

            self._bar = tqdm(
                total=total,
                desc=title,
                file=_Screen(sys.stderr),
                dynamic_ncols=True,  # as wide as the terminal, which tqdm sees by itself only of stderr
                unit="B",
                unit_scale=True,
                leave=not (ends_in_log and _logger.isEnabledFor(logging.INFO)),
                delay=_LONG_SECONDS if shown is None else 0,
            )

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


def _is_terminal(stream: Any) -> bool:
    """Whether it is one. A program may have closed stderr, or put anything in its place."""
    try:
        return bool(stream.isatty())
    except Exception:
        return False


class _Screen:
    """Where a bar is shown, or is not, if the terminal goes away: no work shall fail because of that.

    It is here that errors end, for tqdm would keep its lock, which all bars of the process share.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None)

    def __eq__(self, other: object) -> bool:
        """As tqdm asks, which clears the bars of a stream before it writes something else there. What tqdm takes for
        stderr it also flushes, so a stream that cannot be flushed is not this one."""
        try:
            other.flush()  # type: ignore[attr-defined]
        except Exception:
            return False
        return bool(self._stream == (other._stream if isinstance(other, _Screen) else other))

    def write(self, text: str) -> None:
        with suppress(Exception):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(Exception):
            self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())
