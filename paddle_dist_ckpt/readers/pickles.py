"""Reads pickles without executing them: a walk over the instructions that only does what a table allows.

A pickle is a program for a machine with a stack. Some of its instructions make values; others name a function of any
module and call it. Here such a name is looked up in a table that the reader gives, and anything else is refused. Large
byte strings, which are the data of tensors, are not read: what the walk gives in their place says where they lie.

Time and memory follow from the pickle's size: each instruction does a bounded piece of work, or one that is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from .others import LOOK, check_downloaded
from .pickle_machine import Machine, steps_of_text
from .pickled_values import ENDURED, NOTHING, Recurring, Refused, filled
from .window import FileWindow

__all__ = ["walk"]

_LONGEST = 9  # bytes of an instruction with a number
_U2, _U4, _U8, _I4, _F8 = map(struct.Struct, ("<H", "<I", "<Q", "<i", ">d"))
_NUMBERS = {0x4D: _U2, 0x4A: _I4, 0x47: _F8}
"""BININT2, BININT, BINFLOAT."""
_CONSTANTS = {0x4E: None, 0x89: False, 0x29: ()}
"""NONE, NEWFALSE, EMPTY_TUPLE."""
_STEPS_OF_OTHERS, _STEPS_OF_NUMBER = 8, 7  # a number takes less time, and as much memory


def walk(window: FileWindow, allowed: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of the pickle that begins where the window is; the window then is behind it.

    Args:
        window: Where the pickle lies.
        allowed: What may be named, as ``module.name``: a value, or a function of this library, which is called with the
            arguments that the pickle has for it, whatever these are, and takes time in proportion to them. It may raise
            :class:`.Refused`, or any of :data:`.ENDURED`, which means that the pickle is damaged.
        persistent: Gives what stands for an object that is kept outside of the pickle, by its id.

    Returns:
        None, bool, int, float, str, :class:`.Latin1`, :class:`.Lying`, list, tuple, dict (with keys that are str, int,
        bool, None, tuples of these, float, or :class:`.Built`), or what the table has and its functions gave.
        Containers may contain themselves.

    Raises:
        CheckpointCorruptedError: it is no pickle, or one that ends too early or does not fit together.
        UnsupportedValueError: it asks for what is not allowed, or has something that cannot be held.
    """
    name, start = window.file.name, window.position
    try:
        return _run(Machine(window, allowed, persistent))
    except CheckpointError:
        _check_downloaded(window, start)
        raise
    except Refused as refused:
        raise UnsupportedValueError(f"{name}: {refused}") from refused
    except (*ENDURED, struct.error) as error:
        _check_downloaded(window, start)
        kind, at = type(error).__name__, max(start, window.position - 1)
        raise CheckpointCorruptedError(
            f"{name}: no pickle, or a damaged one, at byte {at} ({kind}: {str(error)[:200]})"
        ) from error


def _check_downloaded(window: FileWindow, start: int) -> None:
    if start == 0:
        check_downloaded(window.file.name, window.file.read(0, min(LOOK, window.file.size)))


def _run(machine: Machine) -> Any:
    """Follow the instructions.

    Those that make up the pickle of very many tensors are followed here, where they lie within what has been read
    ahead: a call for each would take several times as long. All others, and these at the end of what has been read, are
    steps of the table, to the same effect.
    """
    window, memo = machine.window, machine.memo
    stack, data, at = machine.stack, window.data, window.at
    last = len(data) - _LONGEST
    inside = True  # whether `at` is how far it has come, and not `window.at`
    try:
        while True:
            code = data[at] if at <= last else -1
            if code == 0x94:  # MEMOIZE
                at += 1
                memo.append(stack[-1])
            elif code == 0x68:  # BINGET
                at += 2
                value = memo[data[at - 1]]
                if value is NOTHING:
                    raise KeyError(data[at - 1])
                stack.append(value)
                if isinstance(value, Recurring):
                    window.at = at = value.follow(machine, data, at)
                    stack = machine.stack
            elif code == 0x4B:  # BININT1
                at += 2
                stack.append(data[at - 1])
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                window.at = at = at + 1
                machine.last(code - 0x84)
            elif code == 0x6A:  # LONG_BINGET
                at += 5
                (index,) = _U4.unpack_from(data, at - 4)
                value = memo[index]
                if value is NOTHING:
                    raise KeyError(index)
                stack.append(value)
            elif code == 0x8C and at + 1 + data[at + 1] < len(data):  # SHORT_BINUNICODE
                start = at + 2
                at = start + data[at + 1]
                text = data[start:at].decode("utf-8", "surrogatepass")
                machine.steps += 8 if text.isascii() else 24 + steps_of_text(text)
                stack.append(text)
            elif code in _NUMBERS:
                layout = _NUMBERS[code]
                stack.append(layout.unpack_from(data, at + 1)[0])
                at += 1 + layout.size
                machine.steps += _STEPS_OF_NUMBER
            elif code in _CONSTANTS:
                at += 1
                stack.append(_CONSTANTS[code])
            elif code in _BARE_STEPS:
                window.at = at = at + 1  # by which it is known how much may be made
                _BARE_STEPS[code](machine)
                stack = machine.stack
            else:
                inside = False
                if code < 0:
                    window.at = at
                    code = window.byte()
                else:
                    window.at = at + 1
                machine.count(_STEPS_OF_OTHERS)
                if code == 0x2E:  # STOP
                    (result,) = machine.stack
                    if machine.below:
                        raise ValueError("it stops within a container")
                    return result
                step = _STEPS[code]
                if step is None:
                    raise ValueError(f"there is no instruction {code:#04x}")
                step(machine)
                stack, at, inside = machine.stack, window.at, True
                if data is not window.data:
                    machine.settle()
                    data = window.data
                    last = len(data) - _LONGEST
    finally:
        if inside:
            window.at = at


_Step = Callable[[Machine], object]


def _counted(layout: struct.Struct, step: Callable[[Machine, int], None]) -> _Step:
    """A step for an instruction that has a number behind it."""
    return lambda machine: step(machine, machine.window.unpack(layout))


def _short(step: Callable[[Machine, int], None]) -> _Step:
    """The same for a number of one byte."""
    return lambda machine: step(machine, machine.window.byte())


def _pushes(value: Callable[[Machine], Any]) -> _Step:
    return lambda machine: machine.stack.append(value(machine))


def _pushes_new(value: Callable[[Machine], Any]) -> _Step:
    return lambda machine: machine.push_new(value(machine))


def _refuses(what: str) -> _Step:
    def step(machine: Machine) -> None:
        raise Refused(f"has {what}, which is not read")

    return step


_BY_CODE: dict[bytes, _Step] = {
    b"(": Machine.mark,
    b"0": Machine.pop,
    b"1": Machine.above_mark,
    b"2": _pushes(lambda machine: machine.stack[-1]),
    # None, booleans, numbers
    b"N": _pushes(lambda machine: None),
    b"\x88": _pushes(lambda machine: True),
    b"\x89": _pushes(lambda machine: False),
    b"K": _pushes(lambda machine: machine.window.byte()),
    b"M": _counted(_U2, lambda machine, number: machine.stack.append(number)),
    b"J": _counted(_I4, lambda machine, number: machine.stack.append(number)),
    b"I": _pushes(Machine.decimal),
    b"L": _pushes(Machine.decimal),
    b"\x8a": _short(Machine.long),
    b"\x8b": _counted(_I4, Machine.long),
    b"F": _pushes(lambda machine: float(machine.line())),
    b"G": _counted(_F8, lambda machine, number: machine.stack.append(number)),
    # strings
    b"S": _pushes(Machine.quoted),
    b"U": _short(Machine.old_string),
    b"T": _counted(_I4, Machine.old_string),
    b"C": _short(Machine.byte_string),
    b"B": _counted(_U4, Machine.byte_string),
    b"\x8e": _counted(_U8, Machine.byte_string),
    b"\x96": _counted(_U8, Machine.byte_string),
    b"V": _pushes(lambda machine: machine.line("raw_unicode_escape")),
    b"\x8c": _short(Machine.text),
    b"X": _counted(_U4, Machine.text),
    b"\x8d": _counted(_U8, Machine.text),
    # containers
    b"]": _pushes_new(lambda machine: []),
    b"}": lambda machine: machine.push_new({}),
    b")": _pushes(lambda machine: ()),
    b"l": _pushes_new(Machine.above_mark),
    b"t": lambda machine: machine.push_new(tuple(machine.above_mark())),
    b"d": _pushes_new(lambda machine: filled({}, machine.above_mark())),
    b"\x85": lambda machine: machine.last(1),
    b"\x86": lambda machine: machine.last(2),
    b"\x87": lambda machine: machine.last(3),
    b"a": Machine.append,
    b"e": Machine.appends,
    b"s": Machine.set_item,
    b"u": Machine.set_items,
    b"\x8f": _refuses("a set"),
    b"\x90": _refuses("a set"),
    b"\x91": _refuses("a frozenset"),
    # the memo
    b"p": lambda machine: machine.keep(int(machine.line())),
    b"q": _short(Machine.keep),
    b"r": _counted(_U4, Machine.keep),
    b"\x94": Machine.memoize,
    b"g": lambda machine: machine.get(int(machine.line())),
    b"h": _short(Machine.get),
    b"j": _counted(_U4, Machine.get),
    # names, calls, states
    b"c": _pushes(lambda machine: machine.named(machine.line(), machine.line())),
    b"\x93": Machine.stack_global,
    b"R": Machine.reduce,
    b"\x81": Machine.reduce,
    b"\x92": Machine.reduce_with_keywords,
    b"o": Machine.object,
    b"i": Machine.instance,
    b"b": Machine.build,
    b"P": lambda machine: machine.outside(machine.line()),
    b"Q": lambda machine: machine.outside(machine.stack.pop()),
    b"\x82": _refuses("an entry of copyreg's registry"),
    b"\x83": _refuses("an entry of copyreg's registry"),
    b"\x84": _refuses("an entry of copyreg's registry"),
    b"\x97": _refuses("a buffer that is not in it"),
    b"\x98": _refuses("a buffer that is not in it"),
    # the pickle itself
    b"\x80": lambda machine: machine.protocol(machine.window.byte()),
    b"\x95": _counted(_U8, lambda machine, nbytes: machine.window.check(nbytes)),
}
_STEPS: list[_Step | None] = [_BY_CODE.get(bytes([code])) for code in range(256)]
_BARE_STEPS = {code: _BY_CODE[bytes([code])] for code in b"(tu}\x81Rb"}
"""MARK, TUPLE, SETITEMS, EMPTY_DICT, NEWOBJ, REDUCE, BUILD: frequent, and there is nothing behind them to be read."""
