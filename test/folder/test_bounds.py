"""What is too large, too long or too much: refused in time, with an error that says what to do, and never slowly."""

from __future__ import annotations

import difflib
import errno
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from paddle_dist_ckpt import export, read_metadata, rebuild_metadata, verify
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from paddle_dist_ckpt.folder.selection import Selection, below, select_keys
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.saving.file_plan import FilePlan
from paddle_dist_ckpt.storage.local_files import LocalReadable
from paddle_dist_ckpt.testing import FaultyStorage
from paddle_dist_ckpt.tree.paths import plain_key
from test.jobs import (
    SMALL,
    errors_of,
    files_in,
    load_alone,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    sharded,
    split_rows,
    try_load,
)
from test.pace import slowness
from test.torture.crafting import Entry, write_checkpoint


def edit_metadata(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the body of the `.metadata` file of id 0, and make its digest right again."""
    file = folder / "0.metadata"
    first, second = file.read_bytes().split(b"\n")[:2]
    head, body = json.loads(first), json.loads(second)
    edit(body)
    text = json.dumps(body, separators=(",", ":")).encode()
    head["body_bytes"], head["xxh3_64"] = len(text), "0" * 16

    def lines() -> bytes:
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + text + b"\n"

    head["xxh3_64"] = xxhash.xxh3_64_hexdigest(lines())
    file.write_bytes(lines())


def seconds_of(work: Callable[[], Any]) -> float:
    """The processor time that it takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


# -- hostile checkpoints


@pytest.mark.parametrize("value", [np.arange(4.0), [1.5] * 5000], ids=["tensor", "value"])
def test_a_shape_that_the_files_are_too_small_for_is_refused_before_it_is_allocated(tmp_path: Path, value: Any) -> None:
    save_alone({"a": value}, tmp_path)

    def edit(body: dict[str, Any]) -> None:
        body["tensors"]["layouts"][0]["shape"] = [1 << 45]
        body["files"][0][1] = 1 << 49

    edit_metadata(tmp_path, edit)
    size = next(tmp_path.glob("*.safetensors")).stat().st_size
    for load in (lambda: load_whole(tmp_path), lambda: load_alone({"a": None}, tmp_path)):
        with pytest.raises((CheckpointCorruptedError, StateDictMismatchError)) as caught:
            load()
        assert isinstance(caught.value, StateDictMismatchError) or f"has {size} bytes" in str(caught.value)
    assert not verify(tmp_path).ok


def test_sizes_whose_sum_exceeds_64_bits_are_refused(tmp_path: Path) -> None:
    """32 tensors of 2**59 bytes are 2**64 bytes: none, to whoever counts in 64 bits."""
    save_alone({f"k{i}": np.arange(4.0) + 0j for i in range(32)}, tmp_path)

    def edit(body: dict[str, Any]) -> None:
        body["tensors"]["layouts"][0]["shape"] = [1 << 55]

    edit_metadata(tmp_path, edit)
    with pytest.raises(CheckpointCorruptedError):
        load_alone({"k7": np.zeros(4, complex)}, tmp_path, None, LoadOptions(strict=False))
    with pytest.raises(CheckpointCorruptedError):
        load_whole(tmp_path)


@pytest.mark.parametrize("place", ["tensors", "values"])
def test_a_path_of_very_many_parts_is_refused_by_a_load(tmp_path: Path, place: str) -> None:
    save_alone({"a": np.arange(4.0), "n": 1}, tmp_path)

    def edit(body: dict[str, Any]) -> None:
        if place == "tensors":
            body["tensors"]["paths"][0] = "/a" * 20_000
        else:
            body["values"][0][0] = "/n" * 20_000

    edit_metadata(tmp_path, edit)
    with pytest.raises(CheckpointCorruptedError):
        load_whole(tmp_path)


@pytest.mark.parametrize("path", ["/h/~t0", "/h/~t1", "/h/k", "/h"])
def test_a_list_that_is_something_else_too_is_refused_by_a_load(tmp_path: Path, path: str) -> None:
    save_alone({"h": [np.arange(4.0)], "i": np.arange(5.0)}, tmp_path)
    edit_metadata(tmp_path, lambda body: body["tensors"]["paths"].__setitem__(1, path))
    with pytest.raises(CheckpointCorruptedError):
        load_whole(tmp_path)


def save_claiming(folder: Path, monkeypatch: pytest.MonkeyPatch, **claims: int) -> None:
    """A save without a `.metadata` whose data file says what is not so."""
    real = FilePlan.info
    with monkeypatch.context() as patch:
        patch.setattr(FilePlan, "info", lambda *args: msgspec.structs.replace(real(*args), **claims))
        save_alone({"a": np.arange(4.0)}, folder)
    (folder / "0.metadata").unlink()


def test_a_data_file_that_claims_millions_of_parts_costs_a_rebuild_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_claiming(tmp_path, monkeypatch, parts=1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointNotFoundError, match="files are missing"):
            rebuild_metadata(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_what_could_not_be_read_again_is_not_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_claiming(tmp_path, monkeypatch, world_size=0)
    with pytest.raises((CheckpointCorruptedError, CheckpointNotFoundError)):
        rebuild_metadata(tmp_path)
    assert [name for name in files_in(tmp_path) if not name.endswith(".safetensors")] == []


# -- more than a format or a process can hold


@pytest.mark.parametrize("read", [load_whole, verify, read_metadata])
def test_a_metadata_file_that_there_is_no_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """Its size is what somebody says who may have made it; and it is not called damaged."""

    def lack(*args: Any) -> None:
        raise MemoryError

    save_alone({f"tensor {i}": np.arange(i) for i in range(3000)}, tmp_path)
    monkeypatch.setattr(LocalReadable, "read_into", lack)
    with pytest.raises(CheckpointCorruptedError, match=r"/0.metadata: there is not enough memory to read it$"):
        read(tmp_path)


def test_user_metadata_above_a_mebibyte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match="user_metadata"):
        save_alone({"n": 1}, tmp_path, None, SaveOptions(user_metadata={"x": "y" * (1 << 20)}))
    assert not files_in(tmp_path)
    save_alone({"n": 1}, tmp_path, None, SaveOptions(user_metadata={"x": "y" * 1_000_000}))
    assert load_whole(tmp_path) == {"n": 1}


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry's checksums alone are more than a header may hold."""
    monkeypatch.setattr("paddle_dist_ckpt.files.datafile.MAX_HEADER_BYTES", 20_000)
    with pytest.raises(UnsupportedValueError, match="w and what else .*larger block_bytes"):
        save_alone({"w": np.zeros(1_000_000)}, tmp_path)
    assert not files_in(tmp_path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_not_taken_for_a_damaged_checkpoint(tmp_path: Path, number: int) -> None:
    array, folder = make_array((60, 10)), tmp_path / "saved"
    save_on([{"w": part} for part in split_rows(array, 3)], folder)

    def limited() -> FaultyStorage:
        opened: list[str] = []

        def hook(operation: str, name: str) -> None:
            if operation == "open":
                if len(opened) == 2:
                    raise OSError(number, "Too many open files", name)
                opened.append(name)

        return FaultyStorage(folder, hook)

    for load in (
        lambda: load_whole(limited()),
        lambda: load_alone({"w": np.zeros_like(array)}, limited()),
        lambda: export(limited(), tmp_path / "out"),
    ):
        with pytest.raises(OSError, match=r"3 are needed \(see ulimit -n\)") as caught:
            load()
        assert caught.value.errno == number
    states = [{"w": np.zeros_like(array)} for _ in range(2)]
    for error in errors_of(try_load(states, [limited(), folder]), RankFailureError):
        assert "ulimit -n" in str(error)


@pytest.mark.parametrize("taken", ["a checkpoint", "a file of another format"])
def test_there_is_no_id_after_the_largest(tmp_path: Path, taken: str) -> None:
    largest = 10**18 - 1
    if taken == "a checkpoint":
        save_alone({"n": 1}, tmp_path, largest)
    else:
        (tmp_path / f"0_{largest}.distcp").write_bytes(b"foreign")
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=f"largest possible unique_id, {largest}"):
        save_alone({"n": 2}, tmp_path)
    assert files_in(tmp_path) == before
    assert save_alone({"n": 2}, tmp_path, 3).unique_id == 3
    assert load_whole(tmp_path, 3) == {"n": 2}


# -- time


def test_a_load_of_many_values_takes_time_in_proportion(tmp_path: Path) -> None:
    stored = {f"k{i}": i for i in range(6000)}
    save_alone(stored, tmp_path)
    found: dict[Any, Any] = {}
    assert seconds_of(lambda: found.update(load_whole(tmp_path))) < 1.2 * slowness()
    assert found == stored


def test_as_many_patterns_as_keys_take_time_in_proportion() -> None:
    keys = {f"layers.{i}.weight": f"/layers.{i}.weight" for i in range(6000)}
    patterns, found = [key.replace("weight", "w*[ht]") for key in keys], dict[str, str]()
    assert seconds_of(lambda: found.update(select_keys(keys, Selection(None, patterns)))) < 2 * slowness()
    assert found == keys


def test_very_many_keys_that_match_nothing_are_counted() -> None:
    keys = {f"layers.{i}.weight": f"/layers.{i}.weight" for i in range(6000)}
    none = [f"model.{key}" for key in keys]

    def refused() -> None:
        with pytest.raises(CheckpointNotFoundError, match=r"'model\.layers\.0\.weight'.* and 5,980 more; ") as caught:
            select_keys(keys, Selection(None, none))
        assert len(str(caught.value)) < 1000

    assert seconds_of(refused) < 0.5 * slowness()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", "a a.b a.bc a[0] a[1] b"),
        ("a.b", "a.b"),
        ("a.b*", "a.b a.bc"),
        ("a[0]", "a[0]"),
        ("a[[]?]", "a[0] a[1]"),
        ("a[", ""),
        ("[!b]?*", "a.b a.bc a[0] a[1]"),
        ("\U0010ffff*", ""),
    ],
)
def test_a_pattern_finds_what_it_matches_or_is(pattern: str, found: str) -> None:
    keys = {key: f"/{key}" for key in ("b", "a[1]", "a.bc", "a", "a[0]", "a.b")}
    if found:
        assert set(select_keys(keys, Selection(None, [pattern]))) == set(found.split())
        return
    with pytest.raises(CheckpointNotFoundError):
        select_keys(keys, Selection(None, [pattern]))


def test_a_tensor_in_very_many_pieces_is_saved_in_time_in_proportion(tmp_path: Path) -> None:
    array = make_array((40_000, 1))
    pieces = sharded(array, [Box((i, 0), (1, 1)) for i in range(len(array))])
    assert seconds_of(lambda: save_alone({"w": pieces}, tmp_path)) < 2.5 * slowness()
    assert same_bits(load_whole(tmp_path)["w"], array)


def test_only_some_of_many_missing_keys_are_compared_with_all_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"layers.{i}.weight" for i in range(60)]
    save_alone({key: np.zeros(1) for key in keys}, tmp_path)
    real, compared = difflib.SequenceMatcher, []

    def counted(junk: Any, ours: str, theirs: str) -> Any:
        compared.append((ours, theirs))
        return real(junk, ours, theirs)

    monkeypatch.setattr(difflib, "SequenceMatcher", counted)
    with pytest.raises(StateDictMismatchError) as caught:
        load_alone({key.replace("weight", "weigth"): np.zeros(1) for key in keys}, tmp_path)
    assert len(caught.value.problems) == 60
    assert any("meant?" in problem for problem in caught.value.problems)
    assert 0 < len(compared) <= 30


@pytest.mark.parametrize("options", [SaveOptions, LoadOptions])
@pytest.mark.parametrize("timeout", [math.inf, 1e9, 1_000_001, True])
def test_a_timeout_that_no_clock_can_wait_for_is_refused(options: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout .*1,000,000"):
        options(timeout=timeout)


def test_the_longest_timeout_can_be_waited_for(tmp_path: Path) -> None:
    array = make_array((60, 10))
    longest = SaveOptions(timeout=1_000_000, block_bytes=SMALL.block_bytes)
    save_on([{"w": part} for part in split_rows(array, 2)], tmp_path, None, longest)
    states = [{"w": np.zeros_like(array)} for _ in range(2)]
    load_on(states, tmp_path, options=LoadOptions(timeout=1_000_000, exchange="always"))
    assert all(same_bits(state["w"], array) for state in states)


# -- a disk that fails a process that works alone


def test_a_disk_that_fails_while_a_lone_process_reads(tmp_path: Path) -> None:
    array = make_array((300, 100))
    save_alone({"a": array, "b": array}, tmp_path)
    reads: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "read_into":
            reads.append(name)
            if len(reads) > 2:  # the first ones are of the header
                raise OSError(errno.EIO, "injected")

    state = {"a": np.zeros_like(array), "b": np.zeros_like(array)}
    with pytest.raises(CheckpointError, match="(?s)injected.*Targets are partly written") as caught:
        load_alone(state, FaultyStorage(tmp_path, hook))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_prefix_is_looked_for_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every part of a path, of which there may be 255."""
    looks = list[str]()

    def counted(path: str) -> str:
        looks.append(path)
        return plain_key(path)

    monkeypatch.setattr("paddle_dist_ckpt.folder.selection.plain_key", counted)
    path, prefix = "/abc" * 255, ".".join(["abc"] * 99)
    assert below(path, prefix) == "/abc" * 156
    assert below(path, prefix + ".ab") is None
    assert below(path, "x") is None
    assert len(looks) < 10


def test_very_many_layouts_and_what_they_are_made_of_are_not_in_memory_at_once(tmp_path: Path) -> None:
    number = 10_000
    write_checkpoint(tmp_path, {f"/{i:06d}": Entry([0, i + 300], [[], [1]]) for i in range(number)})
    read_metadata(tmp_path)  # so that what it needs of code is there
    tracemalloc.start()
    try:
        assert len(read_metadata(tmp_path).table.paths) == number
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1400 * number
