"""What is done with all paths at once is what is done with each."""

from __future__ import annotations

import pytest

from paddle_dist_ckpt.tree.paths import (
    ListIndex,
    Part,
    RankIndex,
    is_own,
    join,
    join_all,
    own_among,
    plain_key,
    plain_keys,
)

PARTS: list[list[Part]] = [
    [],
    ["a", "b.c", ""],
    ["a", "b/c", "~"],
    ["a", 1, ListIndex(2), RankIndex(3)],
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("parent", ["", "/a~1b"])
def test_join_all_is_join_of_each(parent: str, parts: list[Part]) -> None:
    assert join_all(parent, parts) == [join(parent, part) for part in parts]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("parent", ["", "/x", "/a~1b", "/~i5"])
def test_plain_keys_are_the_plain_key_of_each(parent: str, parts: list[Part]) -> None:
    paths = join_all(parent, parts)
    assert plain_keys(paths) == [plain_key(path) for path in paths]


def test_own_values_among_others() -> None:
    paths = ["/a", "/~r1", "/~r1/a", "/b/~r2", "/b/x~1~0r", "/~l0/~r3"]
    assert own_among(paths) == [path for path in paths if is_own(path)] == ["/~r1", "/b/~r2", "/~l0/~r3"]
