"""Arrays of pickles that are followed in one go are what they are when each of their instructions is followed."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.readers import numpy_pickles
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.paddle_pickles import PADDLE
from paddle_dist_ckpt.readers.pickle_machine import Machine
from paddle_dist_ckpt.readers.pickled_values import Lying
from paddle_dist_ckpt.readers.pickles import walk
from paddle_dist_ckpt.readers.window import WindowedFile
from paddle_dist_ckpt.storage import LocalStorage
from test.readers.test_instructions import mutated
from test.strategies import draws

_SHAPES = [(), (0,), (5,), (300,), (70_000,), (2, 3), (1, 2, 3), (2, 1, 2, 1), (1,) * 9 + (300,), (3, 0, 2)]
_DTYPES = ["float32", "uint16", "int64", "bool", "complex128", "uint8"]
Outcome = tuple[str, Any]


def _state() -> dict[str, Any]:
    """Arrays of all kinds, each shape and element type several times."""
    arrays = [np.ones(shape, dtype) for shape in _SHAPES for dtype in _DTYPES]
    named = {f"layers.{i}.weight": array for i, array in enumerate(arrays)}
    return named | {"again": named["layers.3.weight"], "turned": np.ones((3, 4)).T, "pairs": [("a", arrays[7])]}


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[[bytes], Outcome]:
    """What a pickle holds, its arrays as what they are opened as, or the error that it is refused with."""

    def shown(value: Any, data: bytes) -> Any:
        if isinstance(value, numpy_pickles.PickledArray):
            try:
                return value.opened("it", len(data))
            except CheckpointError as error:
                return type(error).__name__
        if isinstance(value, dict):
            return [(shown(key, data), shown(part, data)) for key, part in value.items()]
        if isinstance(value, numpy_pickles._ElementType):  # as a key or in a list: nobody has written such a pickle
            return [shown(getattr(value, name), data) for name in value.__slots__]
        if isinstance(value, Lying):  # the same
            here = data[value.position : value.position + value.nbytes]
            return value.form, here if value.data is None else value.data
        return [shown(part, data) for part in value] if isinstance(value, (list, tuple)) else repr(value)

    def found(data: bytes) -> Outcome:
        (tmp_path / "file").write_bytes(data)
        with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
            try:
                return "read", shown(walk(file.window(), PADDLE), data)
            except (CheckpointError, RecursionError) as error:
                return type(error).__name__, None

    return found


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls something while nothing is followed in one go."""

    def call(work: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(numpy_pickles, "_USUAL", re.compile(b"(?!)"))
            return work()

    return call


def test_wherever_they_lie_in_what_has_been_read_ahead(
    outcome: Callable[[bytes], Outcome], step_by_step: Callable[[Callable[[], Any]], Any]
) -> None:
    for length in range(0, 4096, 4096 // draws(67, 512)):
        data = pickle.dumps({"before": "x" * length, **_state()}, 4)
        found = outcome(data)
        assert found[0] == "read"
        assert found == step_by_step(lambda data=data: outcome(data))


def test_whatever_is_wrong_with_them(
    outcome: Callable[[bytes], Outcome], step_by_step: Callable[[Callable[[], Any]], Any]
) -> None:
    """One that gets parts of an array from the memo again is refused; no pickle that was written for one does."""
    generator = random.Random(6)
    state = {key: array for key, array in _state().items() if not isinstance(array, np.ndarray) or array.nbytes < 4096}
    whole, same = pickle.dumps(state, 4), 0
    for _ in range(draws(300, 30_000)):
        data = mutated(whole, generator)
        found, slowly = outcome(data), step_by_step(lambda data=data: outcome(data))
        assert found == slowly or found == ("CheckpointCorruptedError", None), (found, slowly)
        same += found == slowly
    assert same > draws(290, 29_000)


def test_they_take_no_calls_of_their_own(outcome: Callable[[bytes], Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    call = Machine.call
    monkeypatch.setattr(Machine, "call", lambda machine, *what: (calls.append(machine), call(machine, *what)))
    data = pickle.dumps({f"w{i}": np.full((2, 3), i, np.float32) for i in range(5000)}, 4)
    assert outcome(data)[0] == "read"
    assert 0 < len(calls) < 50  # those that lie over the end of what has been read ahead
