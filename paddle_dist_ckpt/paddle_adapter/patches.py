"""Puts other functions in the place of Paddle's own checkpoint functions, and gives these back.

Paddle has a function in the module that defines it, and may hand it on to others. So a function is replaced wherever
one of Paddle's modules has that very function, whatever it is called there.

One replacement may be made over another: each remembers the functions that it found, and the order in which they were
made is kept with ``paddle.distributed`` itself, for there is only one for the process.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import paddle
import paddle.distributed as dist

__all__ = ["Replacement", "in_dynamic_mode", "newest_replacement"]

_logger = logging.getLogger("paddle_dist_ckpt")
_ATTRIBUTE = "_paddle_dist_ckpt"
_HOMES = (  # where a function of Paddle is to be found: in 3.0.0 not every one is in paddle.distributed itself
    "paddle.distributed",
    "paddle.distributed.flex_checkpoint.dcp.load_state_dict",  # in 3.3
    "paddle.distributed.flex_checkpoint.dcp.save_state_dict",
    "paddle.distributed.checkpoint.load_state_dict",  # in 2.6 and 3.0
    "paddle.distributed.checkpoint.save_state_dict",
    "paddle.framework.io",
)
_LOCK = threading.Lock()  # two threads that exchange functions at once would give back what was not there before
_Function = Callable[..., Any]


class Replacement(AbstractContextManager["Replacement"]):
    """Functions that are in the place of Paddle's, until :meth:`end`; as a context manager, until it is left.

    Args:
        functions: By the names that Paddle's have. A name that this Paddle does not have is left out.
    """

    def __init__(self, functions: Mapping[str, _Function]) -> None:
        self._active = True
        with _LOCK:
            self._former = {name: former for name in functions if (former := _find(name)) is not None}
            self._ours = {name: self._switch(name, functions[name]) for name in self._former}
            _stack().append(self)
            _exchange([(self._former[name], ours) for name, ours in self._ours.items()])

    def _switch(self, name: str, function: _Function) -> _Function:
        """The function itself while it is in place; afterwards the one that was there before.

        Somebody may have it still: from an import by name, or because he has put his own function over it. It is
        pickled as Paddle's is, by the name at which it is found, for pools of processes that are given it.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if self._active else self._former[name])(*args, **kwargs)

        former = self._former[name]
        # inspect.getfullargspec does not look at what is wrapped.
        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        call.__module__ = getattr(former, "__module__", call.__module__)
        call.__qualname__ = getattr(former, "__qualname__", call.__qualname__)
        return call

    def former(self, name: str) -> _Function:
        """The function that was there before."""
        return self._former[name]

    def end(self) -> None:
        """Give the former functions back. What has been put over these is left there. Once is enough."""
        with _LOCK:
            if not self._active:
                return
            self._active = False
            stack = _stack()
            above = stack[stack.index(self) + 1 :]
            stack.remove(self)
            _exchange([(ours, self._former[name]) for name, ours in self._ours.items()])
            for name, ours in self._ours.items():
                for other in above:
                    other._forget(ours, self._former[name])
                if not above and _find(name) is not self._former[name]:
                    _logger.warning("Paddle's %s was replaced by somebody else meanwhile, and stays so", name)

    def _forget(self, function: _Function, former: _Function) -> None:
        """Give ``former`` back in the end, where it would have been ``function``."""
        for name, found in self._former.items():
            if found is function:
                self._former[name] = former

    def __exit__(self, *_: object) -> None:
        self.end()


def in_dynamic_mode(function: _Function) -> _Function:
    """The function, for which tensors are real ones, also where the program makes static graphs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with paddle.base.dygraph.guard():
            return function(*args, **kwargs)

    return call


def newest_replacement() -> Replacement | None:
    """The replacement that was made last, of those that have not ended."""
    stack = _stack()
    return stack[-1] if stack else None


def _stack() -> list[Replacement]:
    stack: list[Replacement] = dist.__dict__.setdefault(_ATTRIBUTE, [])
    return stack


def _find(name: str) -> _Function | None:
    for home in _HOMES:
        function = getattr(sys.modules.get(home), name, None)
        if callable(function):
            return function
    return None


def _exchange(pairs: Sequence[tuple[_Function, _Function]]) -> None:
    """For each (old, new), put ``new`` wherever one of Paddle's modules has ``old``."""
    new_of = {id(old): new for old, new in reversed(pairs)}  # of one that is there twice, the first
    places = [
        (module, attribute, new_of[id(value)])
        for name, module in list(sys.modules.items())
        if (name + ".").startswith("paddle.") and isinstance(module, ModuleType)
        for attribute, value in list(vars(module).items())
        if id(value) in new_of
    ]
    for module, attribute, new in places:
        setattr(module, attribute, new)
