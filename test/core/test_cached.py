"""Attributes that are computed once, without a lock that objects of a class share."""

from __future__ import annotations

import threading

from paddle_dist_ckpt.core.cached import cached_property


class _Slow:
    """One whose attribute waits."""

    def __init__(self, *events: threading.Event) -> None:
        self._events, self.computed = events, 0

    @cached_property
    def value(self) -> int:
        self.computed += 1
        for event in self._events:
            assert event.wait(60)
        return 7


def test_it_is_computed_once() -> None:
    one = _Slow()
    assert (one.value, one.value, one.computed) == (7, 7, 1)
    assert isinstance(_Slow.value, cached_property)


def test_nobody_waits_for_another_objects() -> None:
    """Nor does a process that is forked meanwhile, in which nobody would ever go on."""
    event = threading.Event()
    thread = threading.Thread(target=lambda: _Slow(event).value)
    thread.start()
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(_Slow().value), daemon=True)
    other.start()
    other.join(30)
    event.set()
    thread.join()
    assert found == [7]
