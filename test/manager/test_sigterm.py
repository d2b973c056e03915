"""What becomes of SIGTERM when somebody has put a handler of their own on top, and calls the old one from it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from paddle_dist_ckpt.manager import sigterm
from paddle_dist_ckpt.manager.sigterm import on_sigterm
from test.waiting import PATIENCE, end_of

SURVIVED = 7
RAISED = 8


def fate(body: Callable[[], object]) -> int:
    """What becomes of a process in which this is called: the signal that ends it, negative, or how it exits."""
    child = os.fork()
    if child == 0:
        code = RAISED
        try:
            body()
            code = SURVIVED
        finally:
            os._exit(code)
    return end_of(child)


def in_a_process(code: int = SURVIVED) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test run in a process of its own, which must end like this."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            def body() -> None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                test(*args, **kwargs)

            assert fate(body) == code

        return run

    return decorate


def put_on_top() -> list[str]:
    """Install a handler that calls the one before; returns where it notes that it was called."""
    called: list[str] = []
    old: Any = signal.getsignal(signal.SIGTERM)

    def mine(number: int, frame: Any) -> None:
        called.append("mine")
        if callable(old):
            old(number, frame)

    signal.signal(signal.SIGTERM, mine)
    return called


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


@in_a_process(-signal.SIGTERM)
def test_the_end_comes_after_all_have_ended() -> None:
    end = on_sigterm(lambda: None)
    put_on_top()
    end()
    terminate()


@in_a_process(-signal.SIGTERM)
def test_the_end_comes_if_the_signal_is_repeated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    on_sigterm(lambda: heard.append(1))
    put_on_top()
    terminate()
    terminate()
    assert heard == [1], "it was repeated at once"
    monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
    terminate()


@pytest.mark.parametrize("again", [False, True], ids=["once", "on top of each other"])
@pytest.mark.parametrize("closed", [False, True])
@in_a_process()
def test_a_forked_process_is_ended(again: bool, closed: bool) -> None:
    ends = [on_sigterm(lambda: None)]
    put_on_top()
    if again:
        ends.append(on_sigterm(lambda: None))
        put_on_top()
    for end in ends if closed else ():
        end()
    assert fate(terminate) == -signal.SIGTERM


@in_a_process(-signal.SIGTERM)
def test_a_second_listener_does_not_forget_what_was_there_first() -> None:
    first = on_sigterm(lambda: None)
    below = put_on_top()
    second = on_sigterm(lambda: None)
    above = put_on_top()
    first()
    second()
    try:
        terminate()
    finally:
        assert below == above == ["mine"]


@pytest.mark.parametrize("original", ["ignored", "called"])
@in_a_process()
def test_what_was_there_first_is_done(original: str) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if original == "ignored" else lambda *_: called.append(1))
    before = signal.getsignal(signal.SIGTERM)
    for times in (1, 2):
        end = on_sigterm(lambda: None)
        mine = put_on_top()
        end()
        terminate()
        assert mine == ["mine"]
        assert called == ([1] * times if original == "called" else [])
        signal.signal(signal.SIGTERM, before)
    end = on_sigterm(lambda: None)
    end()
    assert signal.getsignal(signal.SIGTERM) == before


@in_a_process(-signal.SIGTERM)
def test_who_is_on_top_and_below_is_called_twice_at_most() -> None:
    first = on_sigterm(lambda: None)
    called = put_on_top()
    mine = signal.getsignal(signal.SIGTERM)
    second = on_sigterm(lambda: None)
    signal.signal(signal.SIGTERM, mine)
    first()
    second()
    try:
        terminate()
    finally:
        assert called == ["mine"] * 2


@pytest.mark.parametrize("of", ["the last", "another"])
@pytest.mark.parametrize("on_top", [False, True])
@in_a_process()
def test_repetitions_of_a_signal_that_was_served_do_not_count_after_the_end(
    monkeypatch: pytest.MonkeyPatch, of: str, on_top: bool
) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    before = signal.getsignal(signal.SIGTERM)
    first, second = on_sigterm(lambda: None), on_sigterm(lambda: None)
    if on_top:
        put_on_top()
    terminate()
    first(of == "another")
    second(of == "the last")
    terminate()
    terminate()
    assert not called
    monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
    terminate()
    terminate()
    assert called == [1, 1]
    assert on_top or signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("on_top", [False, True])
@in_a_process()
def test_a_signal_that_was_not_served_counts_at_the_end_of_the_last_one(on_top: bool) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    first, second = on_sigterm(lambda: None), on_sigterm(lambda: None)
    above = put_on_top() if on_top else []
    terminate()
    first(False)
    assert not called, "the other one may serve it yet"
    second(False)
    second(False)
    assert called == [1]
    assert above == ["mine"] * on_top, "it has heard of this signal before"
    terminate()
    assert called == [1, 1], "nobody asks any more"


@in_a_process()
def test_a_forked_process_has_no_part_in_a_signal_of_before() -> None:
    end = on_sigterm(lambda: None)
    terminate()
    assert fate(end) == SURVIVED


@in_a_process()
def test_what_was_there_is_put_in_place_at_once_if_no_signal_came_or_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    for came in (False, True):
        end = on_sigterm(lambda: None)
        if came:
            terminate()
            monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
        end(came)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@in_a_process()
def test_a_signal_that_comes_after_another_rank_has_told_of_it_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    first, second = on_sigterm(lambda: None), on_sigterm(lambda: None)
    first(True)
    second()
    terminate()
    assert not called
    monkeypatch.setattr(sigterm, "_REPEAT_SECONDS", 0.0)
    terminate()
    assert called == [1]


@in_a_process()
def test_who_still_asks_hears_of_a_signal_that_another_was_told_of() -> None:
    heard: list[int] = []
    first, second = on_sigterm(lambda: heard.append(1)), on_sigterm(lambda: heard.append(2))
    first(True)
    terminate()
    second(True)
    assert heard == [2]


@in_a_process()
def test_a_signal_counts_for_who_asks_after_one_was_served() -> None:
    heard: list[int] = []
    for number in (1, 2):
        end = on_sigterm(lambda number=number: heard.append(number))
        terminate()
        terminate()
        end(True)
    assert heard == [1, 2]
    terminate()


@in_a_process()
def test_a_process_that_is_forked_after_the_end_has_no_part_in_it() -> None:
    end = on_sigterm(lambda: None)
    terminate()
    end(True)
    assert fate(terminate) == -signal.SIGTERM


@pytest.mark.parametrize("served", [True, False])
def test_a_repetition_when_the_interpreter_has_taken_its_handlers_away(served: bool) -> None:
    program = f"""
import os, signal
from paddle_dist_ckpt.manager.sigterm import on_sigterm

class Late:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, signal.SIGTERM)

late, end = Late(), on_sigterm(lambda: None)
signal.raise_signal(signal.SIGTERM)
end({served})
"""
    code = subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE).returncode
    assert code == (0 if served else -signal.SIGTERM)


@in_a_process()
def test_what_was_there_before_is_put_in_place_after_an_interrupt_just_then() -> None:
    """By ending it again, as a further close of a manager does."""

    def mine(number: int, frame: Any) -> None:
        pass

    signal.signal(signal.SIGTERM, mine)
    end, put = on_sigterm(lambda: None), signal.signal
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(signal, "signal", interrupted)
        end()
    assert signal.signal is put
    end()
    assert signal.getsignal(signal.SIGTERM) is mine
