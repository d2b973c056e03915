"""What to say of a value that cannot be stored, and what to store in its place."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
import types
from typing import Any

import numpy as np

__all__ = ["refusal_of"]

_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "x.value"),
    (tuple, "tuple(x)"),
    ((set, frozenset), "sorted(x)"),
    ((pathlib.PurePath, decimal.Decimal), "str(x)"),
    ((datetime.date, datetime.time), "x.isoformat()"),
    (datetime.timedelta, "x.total_seconds()"),
    ((bytearray, memoryview), "bytes(x)"),
    ((collections.deque, range), "list(x)"),
    (types.MethodType, "x()"),
    (random.Random, "x.getstate()"),
    (np.random.Generator, "x.bit_generator.state"),
    (np.random.RandomState, "x.get_state()"),
)
"""What to store in the place of a value x of types that cannot be stored; the first that fits counts."""

_ADVICE_BY_NAME = {  # of types of what is not imported here (Paddle, numpy.ma), and of those that are made of them
    "Metric": "vars(x)",
    "MaskedArray": "x.data and numpy.ma.getmaskarray(x)",
    "GeneratorState": "PerRank(paddle_dist_ckpt.rng_state())",
    **dict.fromkeys(("DataLoader", "BatchSampler", "DistributedBatchSampler"), "its epoch and number of used batches"),
}


def refusal_of(value: Any) -> str:
    """Why a value cannot be stored, without its key: its type, and what to store instead."""
    kind = type(value)
    advice = next((how for kinds, how in _ADVICE if isinstance(value, kinds)), "")
    if not advice and dataclasses.is_dataclass(value) and not isinstance(value, type):
        advice = "dataclasses.asdict(x)"
    if not advice:
        advice = next((_ADVICE_BY_NAME[one.__name__] for one in kind.__mro__ if one.__name__ in _ADVICE_BY_NAME), "")
    if not advice and hasattr(kind, "__array__"):
        advice = "numpy.asarray(x)"
    tensors = "" if hasattr(kind, "__array__") else "tensors, "  # one in what is a value as a whole
    return (
        f"{_in_words(kind)} cannot be stored; store {advice}{', or ' * bool(advice)}numbers, strings, bytes, None, "
        f"numpy values, {tensors}or lists, tuples and dicts of them, or objects that have state_dict() and "
        "set_state_dict()"
    )


def _in_words(kind: type) -> str:
    """A type as one says it: ``a set``, ``an object``, ``a loader.Reader``."""
    module = getattr(kind, "__module__", None)  # classes of another language may have none
    is_named = isinstance(module, str) and module != "builtins"
    name = f"{module}.{kind.__qualname__}" if is_named else kind.__qualname__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
