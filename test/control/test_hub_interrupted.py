"""The hub over TCP, interrupted, forked, or without its thread."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from paddle_dist_ckpt.control import TcpHub, keys, wire
from paddle_dist_ckpt.control.member import MemberSession
from paddle_dist_ckpt.control.session import Ending
from paddle_dist_ckpt.errors import CheckpointError, RankFailureError
from paddle_dist_ckpt.testing.hub_conformance.cases import AT_ONCE, LONG
from test.control.tcp import both, one_round
from test.waiting import PATIENCE, until


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_hold_the_connections_open(hubs: list[TcpHub]) -> None:
    assert both(hubs) == [b"0", b"1"]
    (connection,) = hubs[1]._port.connections
    descriptor = connection.socket.fileno()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("call", ["session", "appointments"])
def test_a_forked_process_is_refused_and_harms_nothing(hubs: list[TcpHub], call: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            getattr(hubs[0], call)("save", LONG)
        except CheckpointError:
            hubs[0].close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("kind", [wire.Open, wire.Fail, wire.Bye])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_opening_or_closing_makes_no_other_rank_wait(
    hubs: list[TcpHub], victim: int, kind: type[wire.Message], sent: bool
) -> None:
    hub, post, left = hubs[victim], hubs[victim].post, [1]

    def interrupted(message: Any, payload: bytes = b"") -> None:
        interrupts = isinstance(message, kind) and left and left.pop()
        if sent or not interrupts:
            post(message, payload)
        if interrupts:
            raise KeyboardInterrupt

    def fail() -> bytes:
        if kind is wire.Fail:
            raise OSError
        return b""

    hub.post = interrupted  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(both, [hubs[1 - victim]])
        with pytest.raises(KeyboardInterrupt), Ending(hub.session("save", LONG)) as made, made as session:
            session.gather_scatter("r", fail, lambda parts: dict.fromkeys(parts, b"x"))
        (outcome,) = other.result(AT_ONCE)
    assert isinstance(outcome, RankFailureError) or kind is wire.Bye
    assert not hub._sessions
    assert both(hubs) == [b"0", b"1"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_connection_in_whose_sending_an_interrupt_came_stays(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    assert both(hubs) == [b"0", b"1"]
    connections = [*hubs[0]._port.connections, *hubs[1]._port.connections]
    tag = keys.Seal.tag

    def interrupted(seal: keys.Seal, number: int, *parts: bytes) -> bytes:
        tag(seal, number, *parts)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with hubs[victim].lock:
        monkeypatch.setattr(keys.Seal, "tag", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connections[victim].send(wire.encode(wire.Bye(99)), b"")
    assert both(hubs) == [b"0", b"1"]
    assert [*hubs[0]._port.connections, *hubs[1]._port.connections] == connections


@pytest.mark.parametrize("victim", [0, 1])
def test_a_session_that_an_interrupt_kept_from_being_opened_is_the_next_one(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Otherwise one rank would come to a session that the others have left."""

    def interrupted(hub: TcpHub, session: MemberSession) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(both, [hubs[1 - victim]])
        until(lambda: bool(hubs[1 - victim]._sessions), PATIENCE)
        monkeypatch.setattr(TcpHub, "open", interrupted)
        made = hubs[victim].session("save", LONG)
        with pytest.raises(KeyboardInterrupt), Ending(made), made:
            pass
        mine = both([hubs[victim]])
        assert sorted([*mine, *others.result(PATIENCE)]) == [b"0", b"1"]


@pytest.mark.parametrize("victim", [0, 1])
def test_no_interrupt_keeps_the_lock_or_leaves_a_session_open(
    hubs: list[TcpHub], victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    swallowed = list[object]()  # by Python, where it comes in a callback of the search for garbage
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    def go_on() -> None:
        while not over.is_set():
            both([hubs[1 - victim]])

    def interrupt_at(call: int) -> Any:
        calls = itertools.count(1)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            frame.f_trace_lines = False
            if event != "exception" and next(calls) == call:
                raise KeyboardInterrupt
            return trace

        return trace

    other = threading.Thread(target=go_on, daemon=True)
    other.start()
    previous = sys.gettrace()
    for call in itertools.count(1):
        try:
            sys.settrace(
                interrupt_at(call)
            )  # at the n-th beginning or end of a function: there Python looks for signals
            with Ending(hubs[victim].session("save", LONG)) as made, made as session:
                session.gather_scatter("r", lambda: b"", lambda parts: parts)
        except (KeyboardInterrupt, CheckpointError):
            pass
        else:
            if not swallowed:
                break
            swallowed.clear()
        finally:
            sys.settrace(previous)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(hubs[victim].lock.acquire, timeout=AT_ONCE).result(), call
            pool.submit(hubs[victim].lock.release).result()
        assert not hubs[victim]._sessions, call
    assert call > 25  # how many there are depends on what has come by then
    over.set()
    hubs[1 - victim].close()
    other.join(AT_ONCE)


def test_a_failure_of_the_thread_is_not_a_hang(hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(hubs[0]._port, "turn", explode)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="RuntimeError: boom"):
            one_round(hubs[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_thread_of_which_nobody_can_be_told_is_not_a_hang(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(hubs[0].table, "close", explode)
    monkeypatch.setattr(hubs[0]._port, "turn", explode)
    with pytest.raises(CheckpointError, match="RuntimeError: boom"):
        one_round(hubs[0])
    monkeypatch.undo()


def test_a_thread_that_does_not_end_is_left_behind(
    hubs: list[TcpHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.control.hub._CLOSE_SECONDS", 0.05)
    hang, port = threading.Event(), hubs[1]._port
    linger = port.linger
    monkeypatch.setattr(port, "linger", lambda board: hang.wait(PATIENCE) and linger(board))
    hubs[1].close()
    assert "the control hub's thread has not ended within 0 s and is left behind" in caplog.text
    hang.set()
    hubs[1]._thread.join(PATIENCE)
    assert not hubs[1]._thread.is_alive()
