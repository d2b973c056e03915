"""Whether Python looks for garbage again after blocks in which it does not."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from paddle_dist_ckpt.core.garbage import no_collections


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def in_child() -> bool:
    """Whether a process that is forked now looks for garbage."""
    pid = os.fork()
    if pid == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_block_ends_however_it_ends() -> None:
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collections():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_an_interrupt_at_the_beginning_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), no_collections():
        pass
    assert gc.isenabled()


def test_what_the_job_has_turned_off_stays_off() -> None:
    gc.disable()
    with no_collections():
        assert not in_child()
    assert not gc.isenabled()


def test_a_process_that_is_forked_during_a_block_of_another_thread_looks_for_garbage() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with no_collections():
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    found = in_child()
    may_end.set()
    thread.join()
    assert found
    assert gc.isenabled()


def test_a_block_ends_in_a_process_that_is_forked_within_it() -> None:
    with no_collections():
        pid = os.fork()
    if pid == 0:
        os._exit(gc.isenabled())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
