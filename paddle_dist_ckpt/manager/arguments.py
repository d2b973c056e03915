"""What users pass to a manager: refused if it is not what it may be, and as Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..arguments import as_integer, as_number
from ..files.names import MOST_IDS

__all__ = ["check_seconds", "checked_count", "checked_metrics", "checked_step"]


def checked_count(name: str, number: int | None) -> int | None:
    """Return a number of steps that may be one, as Python's int: numpy's have a largest one, some no sign.

    Raises:
        ValueError: it is neither None nor a positive integer.
    """
    count = as_integer(number)
    if number is not None and (count is None or count < 1):
        raise ValueError(f"{name} must be None or an integer of at least 1, not {number!r}")
    return count


def check_seconds(seconds: float | None) -> None:
    """Refuse what is no time between saves.

    Raises:
        ValueError: it is neither None nor above 0.
    """
    if seconds is None:
        return
    if not 0 < (as_number(seconds) or 0) < math.inf:
        raise ValueError(f"save_interval_seconds must be None or a number of seconds above 0, not {seconds!r}")


def checked_step(step: int) -> int:
    """Return a step that may be one.

    Raises:
        ValueError: it may not.
    """
    number = as_integer(step)
    if number is None or not 0 <= number < MOST_IDS:
        raise ValueError(f"step must be an integer from 0 to below 10**18, not {step!r}")
    return number


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as a user passes them, as floats.

    Raises:
        TypeError: they are no mapping of names to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
            raise TypeError(f"metrics must be names and numbers, not {name!r}: {value!r}")
        try:
            found[name] = float(value)
        except Exception as error:  # whatever arrays and tensors raise that have several elements
            raise TypeError(
                f"metrics must be names and numbers, and {name!r} is no single number: {value!r}"
            ) from error
    return found
