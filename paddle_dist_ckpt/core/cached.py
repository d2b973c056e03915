"""``cached_property`` without a lock, as Python has it from 3.12 on.

Before, all objects of a class share a lock while an attribute is computed. A process that is forked at such a moment,
by a data loader for one, would wait for it for ever, and threads wait for each other. Two threads that ask at once may
compute a value twice here; it is the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["cached_property"]

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801
    """See :func:`functools.cached_property`."""

    if not TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
