"""What is done with all paths at once is what is done with each."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from paddle_dist_ckpt.tree.paths import (
    Containers,
    ListIndex,
    Part,
    RankIndex,
    is_own,
    join,
    join_all,
    occurs,
    own_among,
    plain_key,
    plain_keys,
    special_keys,
)
from test.jobs import little_memory

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


def test_that_there_are_no_special_keys_is_found_without_a_key_for_each_path() -> None:
    paths = [f"/model/layers.{i:06}.self_attn.q_proj.weight" for i in range(20_000)]
    with little_memory(20 * len(paths)):
        assert special_keys(paths) == {}


def test_own_values_among_others() -> None:
    paths = ["/a", "/~r1", "/~r1/a", "/b/~r2", "/b/x~1~0r", "/~l0/~r3"]
    assert own_among(paths) == [path for path in paths if is_own(path)] == ["/~r1", "/b/~r2", "/~l0/~r3"]


def test_occurs_in_any_of_many() -> None:
    paths = [f"/{i}" for i in range(1000)]
    assert occurs("/999", paths)
    assert not occurs("9/", paths)  # nowhere but where one path would go on in the next
    assert not occurs("", [])


@pytest.mark.parametrize("letters", ["ab", "aé", "a😀", "a\ud800", "a\n", "a\0", "a~"])
def test_leaves_that_are_containers_are_found_in_any_alphabet(letters: str) -> None:
    generator = random.Random(ord(letters[1]))
    for count in (1, 20, 600):
        parts = [[generator.choice(letters) * generator.randrange(1, 4) for _ in range(4)] for _ in range(count)]
        paths = [f"{join_all('', some[:1])[0]}{''.join(join_all('', some[1:]))}" for some in parts]
        expected = {a for a in paths if any(b.startswith(f"{a}/") for b in paths)}
        assert set(Containers.of(paths).leaves) == expected
        inner = "/".join(paths[0].split("/")[:3])
        assert inner in Containers.of([*paths, inner]).leaves


@pytest.mark.parametrize("letter", ["a", "é", "😀"])
def test_looking_for_containers_takes_less_memory_than_the_paths_and_their_bytes(letter: str) -> None:
    paths = [f"/{i:06d}{'x' * 1000}{letter}" for i in range(5000)]
    size = sum(len(path.encode()) for path in paths)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        Containers.of(paths)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 1.5 * size + (4 << 20)


def test_containers_of_which_the_paths_say_too_little() -> None:
    deep = "/a" * 250
    assert not Containers.of([f"{deep}/{i}" for i in range(400)]).too_many, "all lead through the same ones"
    assert not Containers.of([f"/{i}{deep}" for i in range(200)]).too_many
    assert Containers.of([f"/{i}{deep}" for i in range(400)]).too_many


@pytest.mark.parametrize("sign", ["~l", "~t"])
def test_lists_with_far_more_places_than_paths(sign: str) -> None:
    few = 1 << 20
    assert not Containers.of([f"/a/{sign}{i}/b" for i in range(2000)]).too_long
    assert not Containers.of([f"/a/{sign}{few - 1}", "/b"]).too_long
    assert Containers.of([f"/a/{sign}{few + 1}", "/b"]).too_long
    halves = [f"/{sign}{i}/{sign}{few // 2}/x" for i in range(3)]  # the places of all lists count together
    assert not Containers.of(halves[:2]).too_long
    assert Containers.of(halves).too_long
