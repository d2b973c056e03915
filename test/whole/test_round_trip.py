"""Random state_dicts, saved by some ranks and loaded by others on other layouts, come back bit by bit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt import verify
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.options import LoadOptions
from test.jobs import (
    LAYOUTS,
    SMALL,
    alike,
    another_host,
    blank_like,
    check_pieces,
    laid_out,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_on,
    sharded,
)
from test.strategies import examples

KEYS = st.text("ab.~/[%\\é0", max_size=4)


@dataclass(frozen=True)
class Share:
    """One rank's part of an item: nothing, or some boxes (None: it is no distributed tensor) in some memory layout."""

    boxes: list[Box] | None
    layout: str = "c"


@dataclass(frozen=True)
class Item:
    """A tensor, an array or a value; where it stands; what each saving and each loading rank has of it."""

    key: str
    wrapping: str
    content: Any
    source: dict[int, Share]
    target: dict[int, Share]

    def wrap(self, value: Any) -> Any:
        """The value as it stands in the state_dict under the item's key."""
        return {
            "none": lambda: value,
            "dict": lambda: {"in.ner": {7: value}},
            "list": lambda: [value, {"x": 1}],
            "tuple": lambda: (0.5, [value]),
        }[self.wrapping]()

    def unwrap(self, wrapped: Any) -> Any:
        """The value in what :meth:`wrap` made."""
        return {
            "none": lambda: wrapped,
            "dict": lambda: wrapped["in.ner"][7],
            "list": lambda: wrapped[0],
            "tuple": lambda: wrapped[1][0],
        }[self.wrapping]()

    def saved_by(self, rank: int) -> Any:
        """What a saving rank has."""
        share = self.source[rank]
        if not isinstance(self.content, np.ndarray):
            return self.wrap(self.content)
        if share.boxes is None:
            return self.wrap(laid_out(self.content, share.layout))
        return self.wrap(sharded(self.content, share.boxes, share.layout))

    def wanted_by(self, rank: int) -> Any:
        """What a loading rank has before the load."""
        share = self.target[rank]
        if not isinstance(self.content, np.ndarray):
            return self.wrap(None)
        if share.boxes is None:
            return self.wrap(laid_out(blank_like(self.content), share.layout))
        return self.wrap(sharded(self.content, share.boxes, share.layout, fill=False))

    def check(self, wrapped: Any) -> None:
        """Assert that a loading rank has what was saved."""
        found = self.unwrap(wrapped)
        if not isinstance(self.content, np.ndarray):
            assert alike(found, self.content), (found, self.content)
        elif isinstance(found, np.ndarray):
            assert same_bits(found, self.content)
        else:
            check_pieces(found, self.content)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that make up a tensor exactly, cut at random places along random dimensions."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[d]))
        low, high = list(box.shape), list(box.shape)
        low[d], high[d] = at, box.shape[d] - at
        corner = list(box.offset)
        corner[d] += at
        boxes += [Box(box.offset, tuple(low)), Box(tuple(corner), tuple(high))]
    return boxes


def subsets(ranks: int, at_least: int) -> st.SearchStrategy[set[int]]:
    """Sets of ranks."""
    return st.sets(st.integers(0, ranks - 1), min_size=at_least)


SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.tuples(st.integers(40, 110), st.integers(40, 110)),
    st.tuples(st.integers(3000, 9000)),
    st.tuples(st.integers(2, 5), st.integers(20, 40), st.integers(20, 40)),
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just("long" * 1500),
    st.just(np.float16(1.5)),
    st.just(np.int64(-3)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.integers(-3, 3)), inner, max_size=3),
        st.dictionaries(st.one_of(st.binary(max_size=2), st.tuples(st.integers(0, 3))), inner, max_size=2),
    ),
    max_leaves=6,
)


@st.composite
def items(draw: st.DrawFn, number: int, savers: int, loaders: int) -> Item:
    """A value, an array that several ranks have whole, or a tensor in pieces."""
    key, wrapping = f"{draw(KEYS)}{number}", draw(st.sampled_from(("none", "dict", "list", "tuple")))
    holders, takers = draw(subsets(savers, 1)), draw(subsets(loaders, 0))
    what = draw(st.sampled_from(("value", "array", "tensor", "tensor", "tensor")))
    if what == "value":
        wrapping = "none" if wrapping in ("list", "tuple") else wrapping  # those would be parts of one larger value
        shares = ({rank: Share(None) for rank in ranks} for ranks in (holders, takers))
        return Item(key, wrapping, draw(VALUES), *shares)
    shape = draw(SHAPES)
    array = make_array(shape, draw(st.sampled_from(sorted(DTYPES))), seed=number)
    layouts = st.sampled_from(LAYOUTS)
    if what == "array":
        source = {rank: Share(None, draw(layouts)) for rank in holders}
    else:
        mine: dict[int, list[Box]] = {rank: [] for rank in holders}
        for box in draw(tilings(shape)):
            for rank in draw(st.sets(st.sampled_from(sorted(holders)), min_size=1)):
                mine[rank].append(box)
        source = {rank: Share(boxes, draw(layouts)) for rank, boxes in mine.items()}
    target = {}
    for rank in takers:
        boxes = draw(tilings(shape)) if draw(st.booleans()) else [whole(shape)]
        kept = [box for box in boxes if draw(st.booleans())]
        target[rank] = Share(kept if draw(st.integers(0, 3)) else None, draw(layouts))
    return Item(key, wrapping, array, source, target)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, list[Item]]:
    """How many ranks save, how many load, and what."""
    savers, loaders = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = draw(st.integers(0, 4))
    return savers, loaders, [draw(items(number, savers, loaders)) for number in range(count)]


@given(jobs(), st.sampled_from(("auto", "always", "never")), st.booleans())
@examples(20)
def test_any_state_dict_on_any_layout_comes_back(
    job: tuple[int, int, list[Item]], exchange: Any, on_hosts: bool
) -> None:
    savers, loaders, things = job
    with tempfile.TemporaryDirectory() as folder:
        states = [{item.key: item.saved_by(rank) for item in things if rank in item.source} for rank in range(savers)]
        save_on(states, folder, options=SMALL)
        wanted = [{item.key: item.wanted_by(rank) for item in things if rank in item.target} for rank in range(loaders)]
        paths = [another_host(folder, rank) if on_hosts else folder for rank in range(loaders)]
        reports = load_on(wanted, paths, options=LoadOptions(exchange=exchange, timeout=60))
        for rank, state in enumerate(wanted):
            for item in things:
                if rank in item.target:
                    item.check(state[item.key])
        assert all(not report.skipped for report in reports)
        assert verify(folder).ok


@given(jobs())
@examples(20)
def test_any_checkpoint_can_be_loaded_whole(job: tuple[int, int, list[Item]]) -> None:
    savers, _, things = job
    with tempfile.TemporaryDirectory() as folder:
        states = [{item.key: item.saved_by(rank) for item in things if rank in item.source} for rank in range(savers)]
        save_on(states, folder, options=SMALL)
        merged = load_whole(folder)
        assert set(merged) == {item.key for item in things}
        for item in things:
            item.check(merged[item.key])


def test_a_rank_with_nothing_takes_part(tmp_path: Path) -> None:
    array = make_array((6, 5))
    save_on([{}, {"a": array}, {}], tmp_path)
    target = blank_like(array)
    load_on([{}, {}, {"a": target}], tmp_path)
    assert same_bits(target, array)


def test_nobody_has_anything(tmp_path: Path) -> None:
    save_on([{}, {}], tmp_path)
    load_on([{}, {}, {}], tmp_path)
    assert load_whole(tmp_path) == {}


def test_overlapping_unequal_boxes_are_written_once(tmp_path: Path) -> None:
    array = make_array((40, 50), "int32")
    whole_one, part = sharded(array, [whole(array.shape)]), sharded(array, [Box((10, 5), (20, 30))])
    reports = save_on([{"a": part}, {"a": whole_one}, {"a": sharded(array, [Box((0, 0), (40, 6))])}], tmp_path)
    assert reports[0].total_bytes == array.nbytes == sum(report.bytes_written for report in reports)
    assert same_bits(load_whole(tmp_path)["a"], array)
