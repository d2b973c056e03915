"""Paths and flat keys: nothing that differs may be written alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.tree.paths import (
    ListIndex,
    Part,
    TupleIndex,
    flat_keys,
    format_path,
    join,
    parse_path,
    special_keys,
)
from test.strategies import examples

awkward = st.text(st.sampled_from("~/.\\01ilta5[%"), max_size=5)
indices = st.integers(0, 9_999_999)
parts = st.one_of(
    awkward, st.text(max_size=4), st.integers(), st.builds(ListIndex, indices), st.builds(TupleIndex, indices)
)
paths = st.lists(parts, min_size=1, max_size=4).map(tuple)


def typed(path: tuple[Part, ...]) -> list[tuple[type, Part]]:
    return [(type(part), part) for part in path]


@examples(40)
@given(paths)
def test_a_path_comes_back(path: tuple[Part, ...]) -> None:
    assert typed(parse_path(format_path(path))) == typed(path)


@examples(40)
@given(paths, paths)
def test_different_paths_are_written_differently(a: tuple[Part, ...], b: tuple[Part, ...]) -> None:
    assert (format_path(a) == format_path(b)) == (typed(a) == typed(b))


@examples(40)
@given(st.text(st.sampled_from("/~ilt01-+ .\u0661"), max_size=8))
def test_what_parses_is_what_would_be_written(text: str) -> None:
    try:
        path = parse_path(text)
    except ValueError:
        return
    assert format_path(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "/~",
        "/~2",
        "/~i",
        "/~i01",
        "/~i-0",
        "/~i+1",
        "/~i 1",
        "/~i\u0661",
        "/~l-1",
        "/~l1000000000",
        "/~tx",
        "/a~i5",
    ],
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_path(text)


def test_join_writes_what_the_documentation_says() -> None:
    assert join("/model", "layers.0.weight") == "/model/layers.0.weight"
    assert [join("", part) for part in ("a/b~c", 7, -7, ListIndex(2), TupleIndex(3))] == [
        "/a~1b~0c",
        "/~i7",
        "/~i-7",
        "/~l2",
        "/~t3",
    ]


@examples(40)
@given(st.lists(paths, max_size=8, unique_by=lambda path: tuple(typed(path))), st.randoms(use_true_random=False))
def test_flat_keys_are_all_different_and_do_not_depend_on_order(several: list[tuple[Part, ...]], random) -> None:
    written = [format_path(path) for path in several]
    keys = flat_keys(written)
    assert len(set(keys)) == len(written)
    shuffled = list(written)
    random.shuffle(shuffled)
    assert dict(zip(shuffled, flat_keys(shuffled), strict=True)) == dict(zip(written, keys, strict=True))


def test_flat_keys_are_the_usual_ones_unless_two_would_be_equal() -> None:
    assert flat_keys(["/a/b", "/c.d", "/opt/~l0/w", "/~i5"]) == ["a.b", "c.d", "opt.0.w", "5"]
    assert flat_keys(["/a/b", "/a.b"]) == ["a.b", "a\\.b"]
    assert flat_keys(["/~i5", "/5", "/~l5", "/~t5"]) == ["\\i5", "5", "\\l5", "\\t5"]
    assert flat_keys(["/a\\b"]) == ["a\\\\b"]


def test_special_keys_are_those_that_differ_from_the_plain_ones() -> None:
    assert special_keys(["/a/b", "/c.d", "/opt/~l0/w", "/~i5"]) == {}
    assert special_keys(["/a/b", "/a.b", "/c"]) == {"/a.b": "a\\.b"}
    assert special_keys(["/~i5", "/5", "/x"]) == {"/~i5": "\\i5"}
    assert special_keys(["/a\\b", "/c"]) == {"/a\\b": "a\\\\b"}
    assert special_keys([]) == {}
