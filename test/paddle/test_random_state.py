"""The random generators of a process, kept and set back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import PerRank, UnsupportedValueError, rng_state, set_rng_state
from paddle_dist_ckpt.paddle_adapter import random_state
from paddle_dist_ckpt.tree.values import encode_value
from test.jobs import decode_value
from test.paddle.versions import RNG_STATE, lacks

pytestmark = lacks(RNG_STATE, "does not tell the state of its random generator on the CPU")


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = rng_state()
    yield
    if random_state._tracker() is not None:
        random_state._tracker().reset()
    set_rng_state({**before, "fleet": {}})


def draw() -> list[Any]:
    """Numbers of every generator, of the normal distribution too: of these, Python and numpy keep the second one."""
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(100)),
        *np.random.rand(3).tolist(),
        float(np.random.randn()),
        *paddle.rand([3]).tolist(),
        *paddle.nn.functional.dropout(paddle.ones([32])).tolist(),
    ]


def stored(state: Any) -> Any:
    return decode_value(encode_value(state, "rng"))


@pytest.mark.parametrize("warm", range(3))
def test_the_same_numbers_follow(warm: int) -> None:
    paddle.seed(7)
    for _ in range(warm):
        draw()
    state = rng_state()
    expected = [draw() for _ in range(50)]
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        paddle.seed(seed)
        assert draw() != expected[0]
        set_rng_state(stored(state))
        assert [draw() for _ in range(50)] == expected


def test_it_is_stored_bit_by_bit() -> None:
    draw()
    state = rng_state()
    np.testing.assert_equal(stored(state), state)
    again = stored(state)
    set_rng_state(again)
    assert encode_value(rng_state(), "rng") == encode_value(state, "rng")


def test_to_ask_changes_nothing() -> None:
    state = rng_state()
    rng_state()
    expected = draw()
    set_rng_state(state)
    rng_state()
    assert draw() == expected


def test_another_generator_of_numpy() -> None:
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("this numpy has one generator only")
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        state = stored(rng_state())
        expected = draw()
        set_rng_state(state)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(ValueError, match="numpy"):
        set_rng_state(state)


# -- fleet's tracker


def test_the_trackers_generators() -> None:
    tracker = random_state._tracker()
    assert tracker is not None
    tracker.reset()
    tracker.add("model_parallel_rng", 123)
    tracker.add("other", 5)

    def numbers() -> list[Any]:
        found = []
        for name in ("model_parallel_rng", "other"):
            with tracker.rng_state(name):
                found += paddle.rand([3]).tolist()
        return found + draw()

    numbers()
    state = stored(rng_state())
    assert set(state["fleet"]) == {"model_parallel_rng", "other"}
    expected = [numbers() for _ in range(3)]
    assert numbers() != expected[0]
    set_rng_state(state)
    assert [numbers() for _ in range(3)] == expected
    with pytest.raises(ValueError, match="fleet's tracker is of generators .*'other'"):
        tracker.reset()
        set_rng_state(state)


def test_without_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, random_state._TRACKER)
    state = rng_state()
    assert state["fleet"] == {}
    set_rng_state(state)
    assert random_state._TRACKER not in sys.modules


# -- several devices


def test_every_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    states = paddle.get_rng_state()
    count, calls = [3], []
    monkeypatch.setattr(paddle, "get_device", lambda: "npu:1")
    monkeypatch.setattr(paddle, "get_rng_state", lambda kind: states * (1 if kind == "cpu" else count[0]))
    monkeypatch.setattr(paddle, "set_rng_state", lambda states: calls.append(len(states)))  # of the device in use
    state = stored(rng_state())
    assert {kind: len(found) for kind, found in state["paddle"].items()} == {"cpu": 1, "npu": 3}
    set_rng_state(state)
    assert calls == [3]
    for device in (3, -1, "npu:1", True, 1.0):
        with pytest.raises(ValueError, match=r"the device in use is one of 3, not "):
            set_rng_state({**state, "device": device})
    count[0] = 2
    with pytest.raises(ValueError, match="Paddle, npu: 2 generators are due, not 3"):
        set_rng_state({**state, "device": None})  # earlier versions did not store it
    monkeypatch.setattr(paddle, "get_device", lambda: "cpu")
    with pytest.raises(ValueError, match=r"generators \['cpu', 'npu'\], but this process has \['cpu'\]"):
        set_rng_state(state)


def _seeded(seed: int) -> Any:
    paddle.seed(seed)
    return paddle.get_rng_state()[0]


@pytest.mark.parametrize(("count", "number"), [(4, 2), (4, 1), (3, 0), (2, 0), (1, 0), (8, 7)])
def test_a_rank_goes_on_with_the_state_of_its_device_on_another(
    monkeypatch: pytest.MonkeyPatch, count: int, number: int
) -> None:
    """Of four devices, of which it had the third; with generators of the host in the place of theirs."""

    kept = [_seeded(seed) for seed in range(4)]
    here = [_seeded(seed) for seed in range(100, 100 + count)]
    now, device = [kept], ["npu:2"]
    monkeypatch.setattr(paddle, "get_device", lambda: device[0])
    monkeypatch.setattr(paddle, "set_rng_state", lambda states: found.extend(states))
    host = paddle.get_rng_state()
    monkeypatch.setattr(paddle, "get_rng_state", lambda kind: host if kind == "cpu" else now[0])
    state, found = stored(rng_state()), list[Any]()
    now[0], device[0] = here, f"npu:{number}"
    set_rng_state(state)
    same = (count, number) == (4, 2)
    expected = kept if same else [*here[:number], kept[2], *here[number + 1 :]]
    assert [one.__getstate__() for one in found] == [one.__getstate__() for one in expected]


# -- what is no state


def test_a_state_that_does_not_tell_the_engines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:  # in Paddle 2.6 there is only the seed, and a count
        def __getstate__(self) -> tuple[int, ...]:
            return (-1, 5, 0)

    monkeypatch.setattr(random_state, "_states", lambda kind: [Old()])
    with pytest.raises(UnsupportedValueError, match="does not tell the state of its random generator on the CPU"):
        rng_state()


def broken(part: str, value: Any) -> Any:
    return {**rng_state(), part: value}


CASES: dict[str, Any] = {
    "none": lambda: None,
    "a list": lambda: [rng_state()],
    "empty": dict,
    "a part missing": lambda: {key: value for key, value in rng_state().items() if key != "numpy"},
    "a part more": lambda: broken("torch", 1),
    "odd keys": lambda: {1: 2, None: 3},
    "python: none": lambda: broken("python", None),
    "python: short": lambda: broken("python", (3, (1, 2), None)),
    "python: a version": lambda: broken("python", (99, rng_state()["python"][1], None)),
    "python: huge numbers": lambda: broken("python", (3, (2**70,) * 625, None)),
    "numpy: none": lambda: broken("numpy", None),
    "numpy: empty": lambda: broken("numpy", {}),
    "numpy: another": lambda: broken("numpy", {**rng_state()["numpy"], "bit_generator": "SFC64"}),
    "numpy: short": lambda: broken("numpy", {**rng_state()["numpy"], "state": {"key": np.zeros(3, "u4"), "pos": 1}}),
    "paddle: none": lambda: broken("paddle", None),
    "paddle: empty": lambda: broken("paddle", {}),
    "paddle: a number": lambda: broken("paddle", {"cpu": 1}),
    "paddle: none of it": lambda: broken("paddle", {"cpu": []}),
    "paddle: two": lambda: broken("paddle", {"cpu": rng_state()["paddle"]["cpu"] * 2}),
    "paddle: no tuple": lambda: broken("paddle", {"cpu": [5]}),
    "paddle: short": lambda: broken("paddle", {"cpu": [(1, 2)]}),
    "paddle: text": lambda: broken("paddle", {"cpu": [("a", "b", "c", "d")]}),
    "paddle: an empty engine": lambda: broken("paddle", {"cpu": [(-1, 5, 0, b"")]}),
    "paddle: another engine": lambda: broken("paddle", {"cpu": [(-1, 5, 0, b"1 2 3")]}),
    "fleet: a list": lambda: broken("fleet", []),
    "fleet: unknown": lambda: broken("fleet", {"model_parallel_rng": rng_state()["paddle"]["cpu"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_state_is_refused_and_nothing_is_set(case: str) -> None:
    state = CASES[case]()
    if isinstance(state, dict):  # the parts that are right are of another moment
        draw()
    before = encode_value(rng_state(), "rng")
    with pytest.raises(ValueError, match="state"):
        set_rng_state(state)
    assert encode_value(rng_state(), "rng") == before


def test_a_state_in_its_per_rank_is_refused_with_what_to_pass() -> None:
    with pytest.raises(ValueError, match="is due, not PerRank; pass what is in it, its value$"):
        set_rng_state(PerRank(rng_state()))  # type: ignore[arg-type]
