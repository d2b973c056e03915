"""Values take the memory that a checkpoint's bytes on the disk allow, all together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.files import room
from paddle_dist_ckpt.files.room import Room, bytes_on_disk, check_values_fit, record_cost
from paddle_dist_ckpt.storage.local import LocalStorage
from test.torture.crafting import SAVE

FREE = 48 << 20


def test_the_disk_is_looked_at_once_and_only_where_it_matters() -> None:
    asked = list[int]()

    def on_disk() -> int:
        asked.append(1)
        return 10 << 20

    left = Room(on_disk)
    left.spend(FREE, 0)
    left.spend(1 << 20, 1 << 20)  # is there, since it has been read
    assert not asked
    left.spend(9 << 20, 0)
    left.spend(0, 0)
    assert len(asked) == 1
    with pytest.raises(CheckpointCorruptedError, match="take up to 58 MiB, and the data files .* have 10 MiB"):
        left.spend(1, 0)
    assert len(asked) == 1


def test_what_was_read_is_there_whatever_the_disk_says() -> None:
    left = Room(lambda: 1 << 20)
    left.spend(FREE, 10 << 20)
    with pytest.raises(CheckpointCorruptedError, match="take up to 59 MiB, and the data files .* have 10 MiB"):
        left.spend(11 << 20, 0)


def test_all_values_are_counted_together() -> None:
    left = Room(cost=FREE - 2 * (72 + 40))
    left.take(b"[[],[]]".replace(b"[]", b"0", 1))
    with pytest.raises(CheckpointCorruptedError, match="more objects than its size has room for"):
        left.take(b"[[],[],[]]")


def test_values_of_metadata_count_twice() -> None:
    table = b'{"tensors":{"paths":["/a","/b"]},'
    values = b'[["/v",[1,2]]]'
    once = record_cost(table + b'"x":' + values + b"}")
    assert record_cost(table + b'"values":' + values + b"}") - once == 3 * 72 + 2 * 40 + 2 * 12 + 2 * 12 - 2 * 12
    assert record_cost(b'{"user_metadata":[[]]}') == 240 + 24 + 4 * 72


def test_a_writer_is_told_what_to_do() -> None:
    check_values_fit(FREE + 100, 100)
    with pytest.raises(UnsupportedValueError, match=r"57 MiB in memory.*Store them as numpy arrays"):
        check_values_fit(FREE + (9 << 20) + 100, 99)


def test_what_is_on_the_disk_counts_once_and_holes_do_not(tmp_path: Path) -> None:
    first, second, alias, other = (
        tmp_path / name
        for name in (
            f"0_0.{SAVE}.0.safetensors",
            f"1_0.{SAVE}.0.shards",
            f"2_0.{SAVE}.0.safetensors",
            "0_0.0123456789abcdef.0.safetensors",
        )
    )
    first.write_bytes(b"x" * 8192)
    os.link(first, alias)
    other.write_bytes(b"x" * 8192)
    (tmp_path / "0.metadata").write_bytes(b"x" * 8192)
    with second.open("wb") as stream:
        stream.write(b"x" * 4096)
        stream.truncate(1 << 30)
    (tmp_path / f"3_0.{SAVE}.0.safetensors").mkdir()
    assert bytes_on_disk(LocalStorage(tmp_path), SAVE) == 8192 + 4096
    assert bytes_on_disk(LocalStorage(tmp_path / "none"), SAVE) == 0


def test_that_much_is_free() -> None:
    assert not room.is_too_much(FREE, 0)
    assert room.is_too_much(FREE + 1, 0)
