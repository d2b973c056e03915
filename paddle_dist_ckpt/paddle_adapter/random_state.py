"""The state of all random generators of a process, as plain values, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from ..errors import UnsupportedValueError
from ..tree.state_dict import PerRank

__all__ = ["rng_state", "set_rng_state"]

_PARTS = {"python", "numpy", "paddle", "fleet", "device"}
_TRACKER = "paddle.distributed.fleet.layers.mpu.random"


def rng_state() -> dict[str, Any]:
    """See :func:`paddle_dist_ckpt.rng_state`."""
    by_device = {kind: _plain(_states(kind)) for kind in _kinds()}
    if not isinstance(by_device["cpu"][0][-1], bytes):
        raise UnsupportedValueError(
            f"Paddle {paddle.__version__} does not tell the state of its random generator on the CPU, only the seed it "
            "began with, so the numbers that follow could not be repeated; keep the states of Python's and numpy's "
            "generators yourself, or use Paddle 3"
        )
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "paddle": by_device,
        "fleet": {name: _plain(states) for name, states in _tracked().items()},
        "device": _number_of_device(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """See :func:`paddle_dist_ckpt.set_rng_state`."""
    given: Any = state
    if not isinstance(given, dict) or {*given, "device"} != _PARTS:  # earlier versions did not say which device it was
        found = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
        hint = "; pass what is in it, its value" if isinstance(given, PerRank) else ""
        raise ValueError(f"not a state of random generators: a dict with {sorted(_PARTS)} is due, not {found}{hint}")
    _check_device(state.get("device"), state["paddle"])
    by_device = _restored(state["paddle"], {kind: _states(kind) for kind in _kinds()}, state.get("device"), "Paddle")
    tracked = _restored(state["fleet"], _tracked(), state.get("device"), "fleet's tracker")
    _set_python_and_numpy(state["python"], state["numpy"])
    for kind, states in by_device.items():
        _set_states(kind, states)
    if tracked:
        _tracker().set_states_tracker(tracked)


def _check_device(device: Any, by_kind: Any) -> None:
    """Refuse a number of the device in use that none of the devices has whose states are there."""
    states = [one for kind, one in by_kind.items() if kind != "cpu"] if isinstance(by_kind, dict) else []
    count = max([1, *(len(one) for one in states if isinstance(one, (list, tuple)))])
    if device is not None and (type(device) is not int or not 0 <= device < count):
        raise ValueError(f"not a state of random generators: the device in use is one of {count}, not {device!r:.50}")


def _set_python_and_numpy(for_python: Any, for_numpy: Any) -> None:
    before = random.getstate(), np.random.get_state(legacy=False)
    try:
        random.setstate(for_python)
        np.random.set_state(for_numpy)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])
        raise ValueError(f"not a state of Python's and numpy's random generators: {error}") from error


def _kinds() -> list[str]:
    """The kinds of devices whose generators are kept: the CPU, and the device that is in use."""
    return list(dict.fromkeys(["cpu", paddle.get_device().partition(":")[0]]))


def _number_of_device() -> int:
    """Which of its kind the device in use is; 0 of the CPU."""
    return int(paddle.get_device().partition(":")[2] or 0)


def _states(kind: str) -> list[Any]:
    return list(paddle.get_rng_state(kind))


def _set_states(kind: str, states: list[Any]) -> None:
    """Set those of the CPU, or of the device that is in use. Older versions of Paddle cannot if it is named."""
    if kind == "cpu":
        core.default_cpu_generator().set_state(states[0])
    else:
        paddle.set_rng_state(states)


def _tracker() -> Any:
    """Fleet's tracker, or None if nothing has imported it: then it has no generators."""
    module = sys.modules.get(_TRACKER)
    return None if module is None else module.get_rng_state_tracker()


def _tracked() -> dict[str, list[Any]]:
    tracker = _tracker()
    return {} if tracker is None else dict(tracker.get_states_tracker())


def _plain(states: list[Any]) -> list[Any]:
    """Paddle's states as tuples. A generator's engine is written as text, of which Paddle gives a list of codes."""
    return [tuple(bytes(x) if isinstance(x, list) else x for x in state.__getstate__()) for state in states]


def _restored(stored: Any, present: dict[str, list[Any]], device: Any, what: str) -> dict[str, list[Any]]:
    """Paddle's states of the generators that are present; ``device`` was the number of the device in use."""
    if not isinstance(stored, dict):
        raise ValueError(f"not a state of random generators: {what} has a {type(stored).__name__}; a dict is due")
    if set(stored) != set(present):
        raise ValueError(
            f"the state of {what} is of generators {sorted(map(str, stored))}, but this process has {sorted(present)}"
        )
    restored = {}
    for name, states in present.items():
        plain = stored[name]
        if isinstance(plain, (list, tuple)) and name != "cpu":
            plain = _of_these_devices(plain, states, device)
        if not isinstance(plain, (list, tuple)) or len(plain) != len(states):
            found = len(plain) if isinstance(plain, (list, tuple)) else type(plain).__name__
            raise ValueError(f"the state of {what}, {name}: {len(states)} generators are due, not {found}")
        restored[name] = [_from_plain(part, like, f"{what}, {name}") for part, like in zip(plain, states, strict=True)]
    return restored


def _of_these_devices(plain: Sequence[Any], states: list[Any], device: Any) -> Sequence[Any]:
    """The states of all devices for those of this process. Where another one is in use now, or there are more or fewer,
    it continues with the state of the one that was in use, and the others go on as they are."""
    now = _number_of_device()
    if type(device) is not int or (device, len(plain)) == (now, len(states)):
        return plain
    if not (0 <= device < len(plain) and now < len(states)):
        return plain
    return [*_plain(states[:now]), plain[device], *_plain(states[now + 1 :])]


def _from_plain(plain: Any, like: Any, what: str) -> Any:
    """A state of Paddle's own type; there is no other way to make one than that of its pickles."""
    try:
        parts = tuple(list(part) if isinstance(part, bytes) else part for part in plain)
        kind: Any = type(like)
        state = kind.__new__(kind)
        state.__setstate__(parts)
        same = state.__getstate__() == parts
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the state of {what} is not that of a random generator: {error}") from error
    if not same:
        raise ValueError(f"the state of {what} is not that of a random generator: Paddle reads it otherwise")
    return state
