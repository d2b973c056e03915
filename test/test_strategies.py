"""What is left out of a grid in every run of the tests leaves no value out."""

from __future__ import annotations

import itertools

import pytest

from test import strategies


@pytest.mark.parametrize(
    ("axes", "count"),
    [((12, 12), 12), ((12, 12), 36), ((3, 4, 5), 5), ((6, 3), 8), ((2, 2, 2), 3), ((20, 3), 21)],
)
def test_each_value_of_each_axis_comes_about_equally_often(
    axes: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = list(itertools.product(*map(range, axes)))
    monkeypatch.setattr(strategies, "long_run", False)
    chosen = strategies.some(grid, count)
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    for place, size in enumerate(axes):
        often = [sum(case[place] == value for case in chosen) for value in range(size)]
        assert min(often) >= 1
        assert max(often) <= count // size + 2
    monkeypatch.setattr(strategies, "long_run", True)
    assert strategies.some(grid, count) == grid


def test_values_that_are_no_tuples_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "long_run", False)
    assert strategies.some(range(10), 3) == [0, 3, 6]
    assert strategies.some("abc", 5) == ["a", "b", "c"]
