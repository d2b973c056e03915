"""Headers of data files, read in pieces of any size: what is in them, and damage in any of them."""

from __future__ import annotations

import itertools
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointCorruptedError
from paddle_dist_ckpt.files import header
from paddle_dist_ckpt.files.datafile import header_digest
from paddle_dist_ckpt.files.header import DIGEST_AT, read_header_digests, read_header_metadata
from paddle_dist_ckpt.storage import LocalStorage
from test.jobs import load_whole, make_array, same_bits, save_alone
from test.strategies import some
from test.torture.crafting import write_data_file

NAME = "x.safetensors"
ODD = ['},"a":{"b":1},"', "x},", "},", '{"a":{}},', ":", ":},", "z"]  # with parts of what separates entries, as keys


def written(folder: Path, entries: bytes, info: bytes = b'{"k":{"x":1},"l":{}}') -> bytes:
    """A data file's header, with an info that looks like entries."""
    write_data_file(folder / NAME, [1, 2, 3], info, entries, 10)
    return (folder / NAME).read_bytes()[:-10]


def read(folder: Path) -> tuple[header.HeaderMetadata, int]:
    with closing(LocalStorage(folder).open(NAME)) as file:
        return read_header_metadata(file, NAME)


def with_digest(text: bytes) -> bytes:
    digest = header_digest(text).encode()
    return text[:DIGEST_AT] + digest + text[DIGEST_AT + len(digest) :]


@pytest.mark.parametrize("piece", [64, 100, 173, 4096, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_header_is_the_same_in_pieces_of_any_size(
    tmp_path: Path, piece: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_PIECE", piece)
    place = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    entries = b",".join(b'"k\\"},\\"%d":%b' % (i, place) for i in range(count))
    text = written(tmp_path, entries)
    record, size = read(tmp_path)
    assert size == len(text)
    assert (len(record.hashes), record.info) == (24, '{"k":{"x":1},"l":{}}')
    assert record.xxh3_64 == header_digest(text)


@pytest.mark.parametrize("piece", [64, 1 << 20])
@pytest.mark.parametrize("at", [60, 200, -2000])
def test_damage_is_noticed_wherever_it_is(tmp_path: Path, piece: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "_PIECE", piece)
    text = bytearray(written(tmp_path, b",".join(b'"k%d":{"shape":[1]}' % i for i in range(120))))
    text[at] ^= 1
    (tmp_path / NAME).write_bytes(bytes(text) + bytes(10))
    with pytest.raises(CheckpointCorruptedError, match=NAME):
        read(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 5000, 2**62])
def test_a_length_that_no_header_has_is_refused_unread(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 4096)
    (tmp_path / NAME).write_bytes(size.to_bytes(8, "little") + written(tmp_path, b"")[8:] + b" " * 5000)
    with pytest.raises(CheckpointCorruptedError, match=f"it has a header of {size} bytes"):
        read(tmp_path)


def test_a_header_with_a_hole_is_not_read_behind_it(tmp_path: Path) -> None:
    size = 64 << 20
    with (tmp_path / NAME).open("wb") as file:
        file.write((size - 8).to_bytes(8, "little") + b'{"__metadata__":{"xxh3_64":"')
        file.truncate(size)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptedError, match="a zero byte in text"):
            read(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("piece", [64, 1 << 20])
@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"k7":{', b'"k7":['), (b'"k7":{', b'"k7" {'), (b"[7]}", b"[7]]"), (b"}   ", b"}}  "), (b"}}   ", b"}    ")],
)
def test_entries_that_are_no_json_are_refused_though_the_digest_is_right(
    tmp_path: Path, piece: int, old: bytes, new: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_PIECE", piece)
    text = written(tmp_path, b",".join(b'"k%d":{"shape":[%d]}' % (i, i) for i in range(50)))
    changed = text.replace(old, new, 1) if old in text else text
    assert changed != text
    (tmp_path / NAME).write_bytes(with_digest(changed) + bytes(10))
    with pytest.raises(CheckpointCorruptedError, match=NAME):
        read(tmp_path)


@pytest.mark.parametrize("piece", [64, 77, 90, 1 << 20])
def test_the_json_of_other_writers_may_have_blanks(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "_PIECE", piece)
    text = written(tmp_path, b' "},"\t: {"a": [1] ,"c},"\n: [{} ,"}," ,"},"]},"x},"  :{}, "y":{}')
    record, size = read(tmp_path)
    assert (size, record.info) == (len(text), '{"k":{"x":1},"l":{}}')


def test_entries_are_not_kept(tmp_path: Path) -> None:
    text = written(tmp_path, b",".join(b'"k%d":{"shape":[1]}' % i for i in range(1_000_000)))
    tracemalloc.start()
    try:
        read(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) > 20 << 20
    assert peak < 6 << 20


def test_digests_alone_are_read_in_little_more_than_the_text(tmp_path: Path) -> None:
    text = written(tmp_path, b'"k":{"shape":[1]}', b'{"k":[%s]}' % (b'"a",' * (4 << 20)))
    with closing(LocalStorage(tmp_path).open(NAME)) as file:
        whole, size = read_header_metadata(file, NAME)
        tracemalloc.start()
        try:
            digests, digests_size = read_header_digests(file, NAME)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (digests.xxh3_64, digests.hashes, digests_size) == (whole.xxh3_64, whole.hashes, size)
    assert len(text) > 24 << 20
    assert peak < len(text) + (8 << 20)


@pytest.mark.parametrize(("piece", "last"), some(itertools.product([*range(64, 140, 9), 1 << 20], ODD), 20))
def test_keys_that_look_like_the_end_of_an_entry(
    tmp_path: Path, piece: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_PIECE", piece)
    state = {key: make_array((4, 5), seed=i) for i, key in enumerate(ODD) if key != last}
    state[last] = make_array((3,), "int8")  # the smallest items come last
    save_alone(state, tmp_path)
    found = load_whole(tmp_path)
    assert all(same_bits(found[key], state[key]) for key in ODD)
