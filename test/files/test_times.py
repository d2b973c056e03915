"""How long a save took: kept in `.metadata`, of no matter to readers that do not know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt import CheckpointCorruptedError, read_metadata
from paddle_dist_ckpt.core.columns import pack_column
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.files.metadata import Metadata
from paddle_dist_ckpt.files.times import SaveTimes
from paddle_dist_ckpt.testing import run_ranks
from test.files.test_metadata import sealed, small, small_body
from test.jobs import all_ok, load_whole, make_array, same_bits, save_on, split_rows

NAME = "3.metadata"


def test_they_come_back_in_the_order_of_the_phases() -> None:
    seconds = {4: {"plan": 0.25, "write": 1.5}, 1: {"plan": 0.001, "snapshot": 7.0, "write": 0.0}}
    again = SaveTimes.of(seconds).seconds()
    assert again == {
        4: {"plan": 0.25, "write": 1.5, "snapshot": 0.0},
        1: {"plan": 0.001, "write": 0.0, "snapshot": 7.0},
    }
    assert list(SaveTimes.of({0: {"plan": 1, "snapshot": 2, "write": 3}}).milliseconds) == ["plan", "snapshot", "write"]
    assert SaveTimes.of({}).seconds() == {}


def test_metadata_keep_them_and_are_the_same_bytes_without_them() -> None:
    bare = small()
    data = encode_metadata(bare)
    assert b"times" not in data
    timed = msgspec.structs.replace(bare, times=SaveTimes.of({0: {"plan": 0.5}, 1: {"plan": 0.75}}))
    again = decode_metadata(encode_metadata(timed), NAME, 3)
    assert again.times is not None
    assert again.times.seconds() == {0: {"plan": 0.5}, 1: {"plan": 0.75}}
    assert encode_metadata(msgspec.structs.replace(again, times=None)) == data


def test_a_reader_that_does_not_know_them_reads_the_rest() -> None:
    """As typed decoders do that know only the members which the format had before."""
    body = small_body() | {"times": {"ranks": ["<u1", "AAE="], "milliseconds": {}}, "later": [1]}
    older = msgspec.defstruct("Older", [(name, Any) for name in small_body()])
    found = msgspec.json.decode(msgspec.json.encode(body), type=older)
    assert msgspec.to_builtins(found) == small_body()
    assert decode_metadata(sealed(body), NAME, 3).values == small().values  # as here, with a member of some later day


@pytest.mark.parametrize(
    "times",
    [
        {"ranks": ["<u1", "AAE="], "milliseconds": {"plan": ["<u1", "AA=="]}},
        {"ranks": ["<u3", "AAE="], "milliseconds": {}},
        {"ranks": ["<u8", "//////////8="], "milliseconds": {}},
        {"ranks": ["<u1", "AAE="], "milliseconds": {"plan": ["<u8", "AA=="]}},
        {"ranks": ["<u1", "AAA="], "milliseconds": {}},
        {"ranks": ["<u1", "AAECAwQFBgcICQ=="], "milliseconds": {}},
        {"ranks": ["<u1", "AA=="], "milliseconds": {str(i): ["<u1", "AA=="] for i in range(101)}},
        {"milliseconds": {}},
        [],
    ],
)
def test_damaged_ones_are_refused(times: Any) -> None:
    with pytest.raises(CheckpointCorruptedError):
        decode_metadata(sealed(small_body() | {"times": times}), NAME, 3)


def test_a_save_stores_them(tmp_path: Path) -> None:
    array = make_array((40, 30))
    save_on([{"w": part} for part in split_rows(array, 3)], tmp_path)
    times = read_metadata(tmp_path).times
    assert times is not None
    assert list(times.seconds()) == [0, 1, 2]
    assert all(list(phases) == ["plan", "write"] for phases in times.seconds().values())
    assert same_bits(load_whole(tmp_path)["w"], array)


def test_a_save_in_the_background_stores_its_snapshot_too(tmp_path: Path) -> None:
    parts = split_rows(make_array((40, 30)), 2)
    all_ok(run_ranks(2, lambda rank: rank.save_in_background({"w": parts[rank.rank]}, tmp_path).result()))
    times = read_metadata(tmp_path).times
    assert times is not None
    assert list(times.milliseconds) == ["plan", "snapshot", "write"]


def test_those_of_many_ranks_are_small() -> None:
    seconds = {rank: {"plan": rank / 999, "write": 60.0} for rank in range(10_000)}
    times = SaveTimes.of(seconds)
    assert len(msgspec.json.encode(times)) < 100_000
    assert times.ranks == pack_column(range(10_000))
    assert isinstance(msgspec.structs.replace(small(), times=times), Metadata)
