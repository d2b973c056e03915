"""The machine that pickles are programs for, able to do nothing but what a table allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from .pickled_values import NOTHING, Built, Latin1, Lying, Refused, filled
from .window import FileWindow

__all__ = ["Machine", "steps_of_text"]

_LAST_PROTOCOL = 5
_KEPT_BYTES = 4 << 10  # longer byte strings stay where they are
_KEPT_TEXT = 64 << 10
_MOST_LINE = 64 << 10
_MOST_INTEGER = 1 << 10  # bytes or digits
_MOST_MARKS = 10_000
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
        if not 0 <= index < len(memo):
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
