"""Work goes on whatever becomes of the place where its progress bar is shown."""

from __future__ import annotations

import errno
import io
import sys
import threading
from typing import Any

import pytest
from tqdm import tqdm

from paddle_dist_ckpt.core.progress import Progress
from test.waiting import PATIENCE


class Bare:
    """What takes the place of stderr in some programs."""

    def write(self, text: str) -> None:
        pass


class Gone:
    """A terminal that has gone away."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def write(self, text: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    flush = fileno


class Strange(Gone):
    def isatty(self) -> bool:
        raise RuntimeError("of another program")

    def write(self, text: str) -> None:
        raise RuntimeError("of another program")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("shown", [None, True])
@pytest.mark.parametrize("stream", [None, Bare(), closed(), Gone(), Strange()], ids=lambda it: type(it).__name__)
def test_no_work_fails_because_of_stderr(monkeypatch: pytest.MonkeyPatch, stream: Any, shown: bool | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    done = list[int]()

    def work() -> None:
        with Progress("save", 10, shown, True) as progress:
            for _ in range(10):
                progress(1)
        done.append(progress.done)

    work()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done == [10, 10], "on any thread: bars share a lock"


def test_a_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("load", 10, True, True) as progress:
        progress(10)
    assert "load: 100%" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_what_is_written_beside_a_bar_clears_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("load", 10, True, True) as progress:
        progress(5)
        before = len(sys.stderr.getvalue())  # type: ignore[attr-defined]
        tqdm.write("hello", file=sys.stderr)
        cleared, _, redrawn = sys.stderr.getvalue()[before:].partition("hello\n")  # type: ignore[attr-defined]
    assert "\r" in cleared
    assert "load:" in redrawn
