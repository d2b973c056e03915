"""Whose turn it is: one at a time, in order; and nobody's after an interrupt at any instruction."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paddle_dist_ckpt import wiring
from paddle_dist_ckpt.control.ranks import NoTransport, Ranks
from paddle_dist_ckpt.core.memory import fresh_pages
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.saving import save_memory
from paddle_dist_ckpt.saving import turn as turn_module
from paddle_dist_ckpt.saving.save_memory import SaveContext, SaveMemory
from paddle_dist_ckpt.saving.turn import Ticket, Turn
from paddle_dist_ckpt.testing import InProcessWorld, NumpyAdapter
from test.waiting import PATIENCE


def check_free(turn: Turn) -> None:
    with turn.taken(Ticket(), may_wait=False):
        pass


def of_background() -> Ticket:
    """That of a save that goes on while its caller does something else."""
    ticket = Ticket()
    ticket.thread = None
    return ticket


def test_one_at_a_time_in_order() -> None:
    turn, order, inside = Turn(), list[int](), list[int]()
    queued = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        with turn.taken(Ticket(), True, queued[number].set):
            inside.append(number)
            assert inside == [number]
            order.append(number)
            inside.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with turn.taken(of_background(), may_wait=False):
        for number, thread in enumerate(threads):
            thread.start()
            assert queued[number].wait(PATIENCE)
        with pytest.raises(CheckpointError, match="when_busy is 'raise'"), turn.taken(Ticket(), may_wait=False):
            pass
        assert order == []
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [0, 1, 2, 3]
    check_free(turn)


def test_who_stops_waiting_is_in_nobodys_way() -> None:
    turn = Turn()

    def stop() -> None:
        raise ValueError("stopped")

    with (
        turn.taken(of_background(), may_wait=False),
        pytest.raises(ValueError, match="stopped"),
        turn.taken(Ticket(), True, stop),
    ):
        pass
    check_free(turn)


@pytest.mark.parametrize("may_wait", [False, True])
def test_nobody_waits_for_a_save_of_the_same_thread(may_wait: bool) -> None:
    turn = Turn()
    with (
        turn.taken(Ticket(), may_wait=False),
        pytest.raises(CheckpointError, match="a save was called within another one"),
        turn.taken(Ticket(), may_wait),
    ):
        pass
    check_free(turn)


def test_a_save_that_fails_keeps_no_later_one_waiting_for_buffers() -> None:
    """Those for windows of what is on a device are used again."""
    memory, taken = SaveMemory(), threading.Event()

    def take() -> None:
        memory.window_buffers(1, fresh_pages).take(8)
        taken.set()

    with pytest.raises(KeyboardInterrupt), memory.take_turn(Ticket(), False, lambda: None):
        take()
        raise KeyboardInterrupt  # before the buffer that was taken could be given back
    taken.clear()
    threading.Thread(target=take, daemon=True).start()
    assert taken.wait(PATIENCE)


def test_a_forked_process_does_not_wait_for_what_goes_on_in_the_other() -> None:
    turn, over = Turn(), Ticket()
    with turn.taken(over, may_wait=False):
        pass
    with turn.taken(Ticket(), may_wait=False):
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                check_free(Turn())
                try:
                    with turn.taken(Ticket(), may_wait=True):
                        os._exit(2)
                except CheckpointError as error:
                    os._exit(0 if "when this process was forked" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_free(turn)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_instruction_leaves_the_turn_to_the_next_and_no_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C raises between two instructions, here before each one in turn of all that takes and gives back."""
    hub, count = InProcessWorld(1).hub(0), itertools.count(1)
    ranks = Ranks(0, hub, NoTransport(), NoTransport())
    traced = {contextlib.__file__, turn_module.__file__, save_memory.__file__}

    def save(state: Any, opened: ExitStack, context: SaveContext, *others: Any) -> None:
        opened.enter_context(context.memory.take_turn(context.ticket, False, lambda: None))

    def trace_from(place: int) -> Callable[..., Any]:
        """What interrupts at this instruction, counted from here."""
        instructions = itertools.count(1)

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename not in traced:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(instructions) == place:
                raise KeyboardInterrupt
            return trace

        return trace

    monkeypatch.setattr(wiring, "save", save)
    before = sys.gettrace()
    for place in count:
        sys.settrace(trace_from(place))
        try:
            wiring.save_with(ranks, lambda: ({}, NumpyAdapter()), tmp_path, None, False, SaveOptions())
        except KeyboardInterrupt:
            sys.settrace(before)
            check_free(ranks.memory.setdefault("save", SaveMemory()).turn)  # while the traceback is alive
            assert not hub._sessions, place
        else:
            break
        finally:
            sys.settrace(before)
    assert place > 300
