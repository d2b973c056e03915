"""File names: what is made parses, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.files import names
from paddle_dist_ckpt.folder.foreign import foreign_id
from test.strategies import examples

numbers = st.integers(0, 10**18 - 1)
saves = st.integers(0, 2**64 - 1).map(lambda n: f"{n:016x}")


@examples(35)
@given(numbers, numbers, saves, numbers)
def test_what_is_made_parses(rank: int, unique_id: int, save: str, part: int) -> None:
    assert names.metadata_id(names.metadata_name(unique_id)) == unique_id
    assert names.parse_data_file(names.data_file_name(rank, unique_id, save, part)) == (rank, unique_id, save, part)
    assert names.parse_claim(names.claim_name(unique_id, save)) == (unique_id, save)


@examples(35)
@given(numbers, numbers, saves, numbers)
def test_a_name_is_of_one_kind(rank: int, unique_id: int, save: str, part: int) -> None:
    made = [
        names.metadata_name(unique_id),
        names.data_file_name(rank, unique_id, save, part),
        names.claim_name(unique_id, save),
        names.temporary_name(unique_id, save),
        f"{rank}_{unique_id}.distcp",
    ]
    parsers = [names.metadata_id, names.parse_data_file, names.parse_claim, foreign_id]
    kinds = [[parser(name) is not None for parser in parsers] for name in made]
    assert kinds == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
        [False, False, False, False],
        [False, False, False, True],
    ]


@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "-1.metadata",
        "01.metadata",
        "1.metadata.tmp",
        "1.metadata\n",
        "x1.metadata",
        "\u0661.metadata",
        "1\u0662.metadata",
        "0_1\u0662.0123456789abcdef.0.safetensors",
        "0_1\u0662.distcp",
        f"{10**18}.metadata",
        "1.0123456789abcdef.claim.x",
        "1.0123456789ABCDEF.claim",
        "1.0123456789abcde.claim",
        "0_0.0123456789abcdef.safetensors",
        "0_0.0123456789abcdef.00.safetensors",
        "0_0.0123456789abcdef.0.safetensors.tmp",
        "0_0.0123456789abcdef.shards",
        "0_0.0123456789abcdef.0.pdparams",
        "00_0.0123456789abcdef.0.safetensors",
        "0_0.distcp.bak",
        "",
    ],
)
def test_what_is_not_made_does_not_parse(name: str) -> None:
    parsers = (names.metadata_id, names.parse_data_file, names.parse_claim, foreign_id)
    assert [parser(name) for parser in parsers] == [None] * 4


def test_the_names_are_those_of_the_specification() -> None:
    assert names.metadata_name(7) == "7.metadata"
    assert names.data_file_name(3, 7, "00000000000000ff", 1) == "3_7.00000000000000ff.1.safetensors"
    other = names.data_file_name(3, 7, "00000000000000ff", 1, ".shards")
    assert other == "3_7.00000000000000ff.1.shards"
    assert names.parse_data_file(other) == (3, 7, "00000000000000ff", 1)
    assert names.is_ours(other)
    assert foreign_id("3_7.distcp") == foreign_id("3_7.safetensors") == 7
