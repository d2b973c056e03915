"""The machine that pickles are programs for, able to do nothing but what a table allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .window import FileWindow

__all__ = [
    "ENDURED",
    "NOTHING",
    "Built",
    "Latin1",
    "Lying",
    "Machine",
    "Recurring",
    "Refused",
    "filled",
    "steps_of_text",
]

ENDURED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What damaged contents may raise in code that takes them for what they should be."""
_LAST_PROTOCOL = 5
_KEPT_BYTES = 4 << 10  # longer byte strings stay where they are
_KEPT_TEXT = 64 << 10
_MOST_LINE = 64 << 10
_MOST_INTEGER = 1 << 10  # bytes or digits
_MOST_MARKS = 10_000
_MOST_KEY, _MOST_NUMBERS = 16, 2  # parts of a tuple that is a key, and those whose hash does not change by the run
_HASHED = range(-(2**60), 2**60)  # larger integers may be made to have one hash
_HASHED_WITHIN = range(-(2**31), 2**31)  # and so may tuples of integers that are not this small and few
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # of floats between these a dozen may have one hash, and of all some hundred
_BYTES_OF_STEP = 10  # of a text: its bytes on the disk are worth as much, and in a hole there are none
_STEPS_OF_DICT, _STEPS_OF_LARGE = 10, 6  # of a dict that gets its first entry, of each item of a large one
_STEPS_OF_LINE, _STEPS_OF_POP, _STEPS_OF_BYTES = 8, 4, 5
_STEPS_OF_NEW, _STEPS_OF_TUPLE = 6, 8  # of a container, or of an object
_STEPS_OF_ARGUMENT = 4  # of a function, which may copy what is in it:
_STEPS_OF_ITEM: dict[type, int] = {list: 1, tuple: 1, dict: 2}
_SMALL_DICT = 64  # items
_SHARED = 1 << 16  # items and characters that functions may be given beyond the bytes that were read
_MANY = 1 << 20  # references in the memo and on the stack that there may be whatever was read
_MANY_STEPS = 4096  # between looks at the budget
NOTHING: Any = object()
"""What the memo has at places that have not been filled."""


class Refused(Exception):
    """What is not read, and what it is: becomes an UnsupportedValueError that names the file."""


@dataclass(slots=True, eq=False)
class Lying:
    """A string of bytes, by where it lies in the file.

    Attributes:
        position: Its first byte in the file; -1 if that is not known.
        nbytes: How many there are.
        form: ``"bytes"`` if they are what lies there, ``"text"`` if that is UTF-8 of a text, and ``"encoded"`` if it is
            UTF-8 of a text of which they are the encoding in Latin-1, as protocol 2 has byte strings of Python 3.
        data: The bytes themselves if there are few; None if they have not been read.
    """

    position: int
    nbytes: int
    form: Literal["bytes", "text", "encoded"] = "bytes"
    data: bytes | None = None


class Latin1(str):
    """A short byte string of Python 2, which is a text to Python 3, and where it lies."""

    __slots__ = ("position",)
    position: int

    @classmethod
    def at(cls, position: int, data: bytes) -> Latin1:
        """The text of these bytes."""
        text = cls(data.decode("latin1"))
        text.position = position
        return text


class Built:
    """What a name may stand for if a pickle gives it a state afterwards."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Take the state. May raise :class:`Refused`, or any of :data:`ENDURED` where the state is damaged."""
        raise NotImplementedError


class Recurring:
    """What a name may stand for if pickles have very many calls of it, all in the same form: a function."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def follow(self, machine: Machine, data: bytes, at: int) -> int:
        """Follow the instructions of one call, behind the one that got this from the memo, to the same effect.

        Args:
            machine: The machine, with this on its stack.
            data: What has been read ahead.
            at: Where the next instruction is in it.

        Returns:
            Where the instruction is that comes next: ``at`` if these are others, and nothing has been done.
        """
        raise NotImplementedError


class Machine:
    """The machine: a stack, the stacks below its marks, a memo, and what has been made and given to functions.

    What it may do follows from the bytes that it has read so far. Those that were skipped, the data of tensors, give it
    nothing.
    """

    __slots__ = ("allowed", "below", "memo", "persistent", "spent", "stack", "steps", "window", "worth")

    def __init__(self, window: FileWindow, allowed: Mapping[str, Any], persistent: Callable[[Any], Any] | None) -> None:
        self.window, self.allowed, self.persistent = window, allowed, persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []
        # Items and characters that functions were given, and how many the last look at what had been read allowed.
        self.spent, self.worth = 0, _SHARED
        self.steps = 0  # that have not been counted in the budget yet

    def push_new(self, value: Any) -> None:
        self.stack.append(value)
        self.count_new()

    def count_new(self) -> None:
        self.count(_STEPS_OF_NEW)

    def count(self, steps: int) -> None:
        """Count steps, and now and then what they come to."""
        self.steps += steps
        if self.steps > _MANY_STEPS:
            self.settle()

    def settle(self) -> None:
        """Make sure that what has been done and kept so far is not more than what has been read is worth."""
        self.window.file.budget.spend(self.steps, self.window.file.name)
        self.steps = 0
        most = _MANY + self.window.taken // 4
        if len(self.memo) > most:
            raise ValueError("more objects than its size has room for")
        if len(self.stack) > most:
            raise ValueError("more on the stack than its size has room for")

    def mark(self) -> None:
        if len(self.below) >= _MOST_MARKS:
            raise ValueError("it is nested too deeply")
        self.below.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def pop(self) -> None:
        self.steps += _STEPS_OF_POP
        if self.stack:
            self.stack.pop()
        else:
            self.above_mark()

    def protocol(self, number: int) -> None:
        if number > _LAST_PROTOCOL:
            raise Refused(f"is of protocol {number}, which is not known")

    # -- strings

    def byte_string(self, nbytes: int) -> None:
        position, kept = self.window.position, nbytes <= _KEPT_BYTES
        data = self.window.take(nbytes) if kept else None
        if not kept:
            self.window.skip(nbytes)
        self.steps += _STEPS_OF_BYTES
        self.push_new(Lying(position, nbytes, data=data))

    def old_string(self, nbytes: int) -> None:
        self.window.check(nbytes)  # the number has a sign, and less than none would lead back
        if nbytes > _KEPT_BYTES:
            self.byte_string(nbytes)
        else:
            position = self.window.position
            self.push_new(Latin1.at(position, self.window.take(nbytes)))

    def text(self, nbytes: int) -> None:
        if nbytes > _KEPT_TEXT:
            self.push_new(Lying(self.window.skip(nbytes), nbytes, "text"))
        else:
            text = self.window.take(nbytes).decode("utf-8", "surrogatepass")
            self.steps += steps_of_text(text)
            self.stack.append(text)

    def line(self, encoding: str = "utf-8") -> str:
        line = self.window.line(_MOST_LINE).decode(encoding)
        self.steps += _STEPS_OF_LINE + steps_of_text(line)
        return line

    def quoted(self) -> str:
        line = self.line("latin1")
        if len(line) < 2 or line[0] != line[-1] or line[0] not in "\"'":
            raise ValueError("a string without quotes")
        if "\\" in line:
            raise Refused("has a string of protocol 0, which is not read")
        return line[1:-1]

    # -- numbers

    def decimal(self) -> int:
        line = self.line()
        if line in ("00", "01"):  # how protocol 0 has booleans
            return line == "01"
        if len(line) > _MOST_INTEGER:
            raise Refused("has an integer of too many digits")
        return int(line.removesuffix("L"))

    def long(self, nbytes: int) -> None:
        if not 0 <= nbytes <= _MOST_INTEGER:
            raise Refused(f"has an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.window.take(nbytes), "little", signed=True))

    # -- containers

    def append(self) -> None:
        value = self.stack.pop()
        _as_list(self.stack[-1]).append(value)

    def appends(self) -> None:
        items = self.above_mark()
        _as_list(self.stack[-1]).extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.steps += _STEPS_OF_DICT
        filled(self.stack[-1], [key, value])

    def set_items(self) -> None:
        items = self.above_mark()
        if len(items) < _SMALL_DICT:
            self.steps += _STEPS_OF_DICT + len(items)
        else:
            self.steps += _STEPS_OF_LARGE * len(items)
            self.settle()
        filled(self.stack[-1], items)

    def last(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        self.stack[-count:] = (tuple(self.stack[-count:]),)
        self.count(_STEPS_OF_TUPLE)

    # -- the memo

    def keep(self, index: int) -> None:
        memo = self.memo
        if index >= len(memo):
            if not 0 <= index <= self.window.taken:
                raise ValueError(f"place {index} in the memo")
            # Who writes pickles counts up by one. A place far ahead costs what it takes to have those before it.
            self.window.file.budget.spend(index - len(memo), self.window.file.name)
            memo.extend(itertools.repeat(NOTHING, index + 1 - len(memo)))
        memo[index] = self.stack[-1]

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def get(self, index: int) -> None:
        value = self.memo[index]
        if value is NOTHING or index < 0:
            raise KeyError(index)
        self.stack.append(value)

    # -- what is named and called

    def named(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError(f"{type(module).__name__} and {type(name).__name__} for a name")
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise Refused(f"asks for {full[:200] if full.isprintable() else ascii(full[:200])}, which is not read")
        return self.allowed[full]

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.named(module, name))

    def call(self, function: Any, args: Any) -> None:
        if type(args) is not tuple:
            raise TypeError(f"{type(args).__name__} for arguments")
        if not callable(function):
            raise TypeError(f"a call of {type(function).__name__}")
        for arg in args:
            self.spend(arg)
        self.push_new(function(*args))

    def spend(self, value: Any) -> None:
        size = len(value) if isinstance(value, (str, list, tuple, dict)) else 0
        self.steps += _STEPS_OF_ARGUMENT + _STEPS_OF_ITEM.get(type(value), 0) * size
        self.spent += 1 + size
        if self.spent > self.worth:
            self.worth = self.window.taken + _SHARED
            if self.spent > self.worth:
                raise ValueError("it copies more than it has")

    def reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.call(function, args)

    def reduce_with_keywords(self) -> None:
        if self.stack.pop():
            raise Refused("makes an object with keyword arguments")
        self.reduce()

    def object(self) -> None:
        function, *args = self.above_mark()
        self.call(function, tuple(args))

    def instance(self) -> None:
        function = self.named(self.line(), self.line())
        self.call(function, tuple(self.above_mark()))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        self.spend(state)
        if isinstance(target, Built):
            target.build(state)
        # Attributes of an OrderedDict, as PyTorch has `_metadata` on state_dicts of modules, are none of its items.
        elif type(target) is not dict or type(state) is not dict or not state:
            raise TypeError(f"a state for {type(target).__name__}")

    def outside(self, token: Any) -> None:
        if self.persistent is None:
            raise Refused("refers to an object that is not in it")
        self.spend(token)
        self.push_new(self.persistent(token))


def steps_of_text(text: str) -> int:
    """What a text costs beside the instruction that makes it: one with other characters takes up to four times as much
    memory."""
    return len(text) // _BYTES_OF_STEP if text.isascii() else len(text) // 2


def _as_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"items for {type(value).__name__}")
    return value


def filled(target: Any, items: list[Any]) -> dict[Any, Any]:
    """A dict with more entries, of which keys and values stand one behind the other."""
    if type(target) is not dict:
        raise TypeError(f"keys for {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key if type(key) is str else _key(key)] = value
    return target


def _key(value: Any, nested: bool = False) -> Any:
    """A key whose hash takes little time, and which nobody can give the hash of many others."""
    kind = type(value)
    if kind is str or kind is bool or value is None or isinstance(value, Built):
        return value
    if kind is int and value in (_HASHED_WITHIN if nested else _HASHED):
        return value
    if kind is float and not nested and (value == 0 or _SMALLEST < abs(value) < _LARGEST):
        return value
    if kind is Latin1:
        return str(value)
    if kind is tuple and not nested and len(value) <= _MOST_KEY:
        if sum(not isinstance(part, (str, Built)) for part in value) <= _MOST_NUMBERS:
            return tuple(_key(part, nested=True) for part in value)
        raise Refused(f"has a dict with a key of more than {_MOST_NUMBERS} numbers, which is not read")
    raise Refused(f"has a dict with a key that is {kind.__name__}, which is not read")
