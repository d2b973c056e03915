"""Tests that every :class:`paddle_dist_ckpt.Storage` has to pass. This module alone needs pytest.

Whoever writes a Storage derives a class from :class:`StorageTests` and gives it a fixture that makes an empty one:

    class TestMyStorage(StorageTests):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from ..core.memory import Bytes1D
from ..files.names import parse_claim, parse_data_file
from ..folder.ids import committed_ids
from ..folder.verify import verify_checkpoint
from ..storage.base import Storage, WritableFile
from ..storage.capabilities import extended, hole_bytes, is_hole, read_windows
from .simulation import SimulatedRank, run_ranks

__all__ = ["StorageTests", "in_threads", "put"]

_PAGE = 4096
_MANY = 1100  # files; some stores list a thousand at a time
_TICK = 5.0  # seconds that a clock may go on at once


@contextmanager
def made(storage: Storage, name: str) -> Iterator[WritableFile]:
    """A new file that is written in a block, as data files are: durable and closed after it."""
    with closing(storage.create(name)) as file:
        yield file
        file.sync()


def put(storage: Storage, name: str, data: bytes) -> None:
    """Make a file that holds this."""
    with made(storage, name) as file:
        file.write(np.frombuffer(data, np.uint8), 0)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returned, or raised, in so many threads that start together."""
    start = threading.Barrier(count)

    def run(i: int) -> Any:
        start.wait()
        try:
            return work(i)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def random_bytes(size: int, aligned: bool = False) -> Bytes1D:
    """Random bytes; ``aligned`` ones begin at a page, as those of a save do."""
    memory = np.empty(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE if aligned else 1
    memory[start : start + size] = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return memory[start : start + size]


class StorageTests:
    """The promises of a Storage, as tests. To be derived from, with a fixture ``storage``."""

    @pytest.fixture
    def storage(self) -> Storage:
        """An empty storage, for each test another."""
        raise NotImplementedError("override the fixture 'storage' by one that makes an empty storage")

    @pytest.fixture(autouse=True)
    def _prepared(self, storage: Storage) -> None:
        assert storage.names() == [], "it is empty, whether its folder is there or not"
        storage.prepare()

    # -- the folder

    def test_it_is_a_storage(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert isinstance(storage.location, str)
        assert storage.location

    def test_prepare_may_be_repeated(self, storage: Storage) -> None:
        put(storage, "f", b"x")
        assert in_threads(4, lambda i: storage.prepare()) == [None] * 4
        assert storage.read("f") == b"x"

    def test_its_identity_stays_the_same(self, storage: Storage) -> None:
        first = storage.identity()
        put(storage, "f", b"x")
        host, device, inode = storage.identity()
        assert (host, device, inode) == first
        assert (type(host), type(device), type(inode)) == (str, int, int)

    def test_free_bytes_are_a_number_or_unknown(self, storage: Storage) -> None:
        free = storage.free_bytes()
        assert free is None or free > 0

    def test_names_are_what_was_made_and_not_deleted(self, storage: Storage) -> None:
        put(storage, "b", b"x")
        put(storage, "a.b_c-0", b"")
        assert storage.publish("m.metadata", b"x", "m.tmp", replace=False)
        storage.sync()
        assert sorted(storage.names()) == ["a.b_c-0", "b", "m.metadata"]
        storage.delete("b")
        storage.delete("m.metadata")
        storage.sync()
        assert storage.names() == ["a.b_c-0"]

    def test_all_names_are_listed_however_many(self, storage: Storage) -> None:
        names = [f"f{i}" for i in range(_MANY)]

        def work(part: int) -> None:
            for name in names[part::10]:
                put(storage, name, b"")

        assert in_threads(10, work) == [None] * 10
        storage.sync()
        assert sorted(storage.names()) == sorted(names)

    def test_a_missing_name_is_an_error_but_for_delete(self, storage: Storage) -> None:
        for operation in (storage.open, storage.size, storage.read, storage.touch, storage.modified):
            with pytest.raises(FileNotFoundError):
                operation("none")
        storage.delete("none")
        assert storage.names() == [], "none of these makes a file"

    def test_a_deleted_name_is_free_again(self, storage: Storage) -> None:
        put(storage, "f", b"old")
        storage.delete("f")
        storage.delete("f")
        with pytest.raises(FileNotFoundError):
            storage.read("f")
        put(storage, "f", b"new")
        assert storage.read("f") == b"new"

    # -- writing

    def test_what_is_written_in_any_order_makes_up_the_file(self, storage: Storage) -> None:
        data = random_bytes(100_000)
        with made(storage, "f") as file:
            for start, stop in ((60_001, 100_000), (0, 30_000), (30_000, 60_001)):
                file.write(data[start:stop], start)
            file.write(data[:0], 50)
        assert storage.size("f") == len(data)
        assert storage.read("f") == data.tobytes()

    def test_memory_may_be_filled_anew_when_it_is_written(self, storage: Storage) -> None:
        memory, written = random_bytes(2 * _PAGE, aligned=True), b""
        with made(storage, "f") as file:
            for turn in range(3):
                memory += 1
                file.write(memory, turn * len(memory))
                written += memory.tobytes()
            memory[:] = 0
        assert storage.read("f") == written

    def test_a_file_that_is_made_longer_ahead_is_zeros_where_nothing_is_written(self, storage: Storage) -> None:
        data, size = random_bytes(16 * _PAGE, aligned=True), 100 * _PAGE
        with made(storage, "f") as file:
            start = 40 * _PAGE if extended(file, size) else 0  # a storage need not be able to do that
            file.write(data, start)
        content = bytes(start) + data.tobytes() + bytes(size - start - len(data) if start else 0)
        assert storage.read("f") == content
        with closing(storage.open("f")) as opened:
            assert not is_hole(opened, start, len(data)), "these are no zeros"
            assert not is_hole(opened, 0, len(content))
            assert not hole_bytes(opened, start, len(data))

    def test_windows_and_a_tail_are_written_by_several_threads(self, storage: Storage) -> None:
        window = 256 * _PAGE
        data = random_bytes(4 * window + 777, aligned=True)
        with made(storage, "f") as file:
            done = in_threads(5, lambda i: file.write(data[i * window : (i + 1) * window], i * window))
        assert done == [None] * 5
        assert storage.read("f") == data.tobytes()

    def test_a_file_may_be_empty(self, storage: Storage) -> None:
        put(storage, "f", b"")
        assert storage.size("f") == 0
        assert storage.read("f") == b""
        with closing(storage.open("f")) as file:
            assert file.size == 0
            file.read_into([], 0)

    def test_create_takes_no_name_that_is_there(self, storage: Storage) -> None:
        put(storage, "f", b"old")
        storage.publish("m", b"old", "tmp", replace=False)
        for name in ("f", "m"):
            with pytest.raises(FileExistsError):
                storage.create(name)
            assert storage.read(name) == b"old"

    def test_of_many_that_create_a_file_one_does(self, storage: Storage) -> None:
        made = in_threads(6, lambda i: put(storage, "f", b"%d" % i * 9000))
        assert [type(result) for result in made if result is not None] == [FileExistsError] * 5
        assert storage.read("f") == b"%d" % made.index(None) * 9000

    # -- reading

    @pytest.mark.parametrize("limit", [0, 1, 4096, 9999, 10_000, 10_001, 10**9])
    def test_read_gives_no_more_than_its_limit(self, storage: Storage, limit: int) -> None:
        data = random_bytes(10_000).tobytes()
        put(storage, "f", data)
        assert storage.read("f", limit) == data[:limit]
        assert storage.read("f") == data

    @pytest.mark.parametrize("once", [False, True])
    def test_any_range_is_read_into_any_buffers(self, storage: Storage, once: bool) -> None:
        data = random_bytes(3 << 20)
        put(storage, "f", data.tobytes())
        with closing(storage.open("f")) as file:
            assert file.size == len(data)
            assert isinstance(file.is_cached(), bool)
            for offset, sizes in ((0, [len(data)]), (123, [5, 0, 1_000_000, 1]), (4096, [2 << 20]), (7, [1] * 2000)):
                buffers = [np.zeros(size, np.uint8) for size in sizes]
                file.read_into(buffers, offset, once)
                assert np.array_equal(np.concatenate(buffers), data[offset : offset + sum(sizes)])

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 1000), (77, 99_000), (5000, 4096), (100_000, 7)])
    def test_windows_are_read_one_after_another(self, storage: Storage, offset: int, nbytes: int) -> None:
        data = random_bytes(100_000)
        put(storage, "f", data.tobytes())
        buffer, windows = np.zeros(len(data) - offset, np.uint8), list[bytes]()
        with closing(storage.open("f")) as file:
            read_windows(file, buffer, offset, nbytes, lambda window: windows.append(bytes(window)))
            assert np.array_equal(buffer, data[offset:])
            assert windows == [buffer[at : at + nbytes].tobytes() for at in range(0, len(buffer), nbytes)]
            with pytest.raises(EOFError):
                read_windows(file, np.zeros(3000, np.uint8), len(data) - 2500, 1000, lambda window: None)

    def test_reading_past_the_end_is_an_error(self, storage: Storage) -> None:
        put(storage, "f", bytes(100))
        with closing(storage.open("f")) as file:
            for size, offset in ((101, 0), (1, 100), (50, 60), (1, 10**12)):
                for once in (False, True):
                    with pytest.raises(EOFError):
                        file.read_into([np.zeros(size, np.uint8)], offset, once)
            file.read_into([np.zeros(0, np.uint8)], 100)

    def test_several_threads_read_one_file(self, storage: Storage) -> None:
        data = random_bytes(4 << 20)
        put(storage, "f", data.tobytes())

        def read(i: int) -> bool:
            buffer = np.zeros(1 << 20, np.uint8)
            file.read_into([buffer], i * 500_000, once=i % 2 == 0)
            return np.array_equal(buffer, data[i * 500_000 : i * 500_000 + len(buffer)])

        with closing(storage.open("f")) as file:
            assert in_threads(6, read) == [True] * 6

    # -- publishing

    @pytest.mark.parametrize("data", [b"", b"new", bytes(100_000)])
    def test_publish_replaces_only_if_it_may(self, storage: Storage, data: bytes) -> None:
        assert storage.publish("m", b"old", "tmp", replace=False) is True
        assert storage.read("m") == b"old"
        assert storage.publish("m", data, "tmp", replace=False) is False
        assert storage.read("m") == b"old"
        assert storage.publish("m", data, "tmp", replace=True) is True
        assert storage.read("m") == data
        assert storage.publish("n", data, "tmp", replace=True) is True
        assert storage.names() == ["m", "n"], "the temporary name is gone"

    @pytest.mark.parametrize("replace", [False, True])
    def test_confirm_is_called_when_only_the_name_is_missing(self, storage: Storage, replace: bool) -> None:
        seen: list[tuple[Any, Any]] = []
        if replace:
            storage.publish("m", b"old", "tmp", replace=False)

        def confirm() -> None:
            names = storage.names()
            temporary = storage.read("tmp") if "tmp" in names else b"new"  # who needs no such name may do without
            seen.append((storage.read("m") if "m" in names else None, temporary))

        assert storage.publish("m", b"new", "tmp", replace, confirm)
        assert seen == [(b"old" if replace else None, b"new")]
        assert storage.read("m") == b"new"

    @pytest.mark.parametrize("replace", [False, True])
    def test_confirm_may_stop_it(self, storage: Storage, replace: bool) -> None:
        class StopHere(Exception):
            pass

        def confirm() -> None:
            raise StopHere

        storage.publish("m", b"old", "tmp", replace=False)
        for name in ("m", "n") if replace else ("n",):
            with pytest.raises(StopHere):
                storage.publish(name, b"new", "tmp", replace, confirm)
        assert storage.names() == ["m"]
        assert storage.read("m") == b"old"
        assert storage.publish("m", b"new", "tmp", replace=True), "nothing is in the way of another try"

    @pytest.mark.parametrize("replace", [False, True])
    def test_who_deletes_the_temporary_name_stops_it(self, storage: Storage, replace: bool) -> None:
        """So is a save stopped that others have taken for dead: a folder must not change under a later one."""
        found: list[bool] = []

        def confirm() -> None:
            found.append("tmp" in storage.names())
            storage.delete("tmp")

        try:
            storage.publish("m", b"new", "tmp", replace, confirm)
        except OSError:
            assert "m" not in storage.names()
        else:
            assert found == [False], "it has gone on without the content that it was to publish"

    @pytest.mark.parametrize("turn", range(5))
    def test_of_many_that_publish_a_name_one_wins_and_knows(self, storage: Storage, turn: int) -> None:
        won = in_threads(8, lambda i: storage.publish("m", b"%d" % i * 5000, f"tmp{i}", replace=False))
        assert sorted(won) == [False] * 7 + [True]
        assert storage.read("m") == b"%d" % won.index(True) * 5000
        assert storage.names() == ["m"]

    def test_readers_see_whole_files_while_others_replace_them(self, storage: Storage) -> None:
        contents = {bytes([65 + i]) * (20_000 * (i + 1)) for i in range(3)}
        storage.publish("m", min(contents), "first", replace=True)
        ended = threading.Event()

        def work(i: int) -> bool:
            if i < 3:
                for turn in range(20):
                    storage.publish("m", bytes([65 + i]) * (20_000 * (i + 1)), f"tmp{i}.{turn}", replace=True)
                ended.set()
                return True
            seen = [storage.read("m") in contents]
            while not ended.wait(0.0001):  # without a pause nobody else may get to do anything, on a busy host
                seen.append(storage.read("m") in contents)
            return all(seen)

        assert in_threads(5, work) == [True] * 5
        assert storage.names() == ["m"]

    def test_who_has_a_file_open_reads_no_two_contents_of_it(self, storage: Storage) -> None:
        old, new = (random_bytes(100_000 + i).tobytes() for i in range(2))
        storage.publish("m", old, "tmp", replace=False)
        buffer = np.zeros(len(old), np.uint8)
        with closing(storage.open("m")) as file:
            file.read_into([buffer[:5000]], 0)
            assert storage.publish("m", new, "tmp", replace=True)
            try:
                file.read_into([buffer[5000:]], 5000)
            except (OSError, EOFError):
                return  # it may also say that the file is gone
        assert buffer.tobytes() == old

    # -- time

    def test_touch_makes_a_file_newer_by_the_clock_of_the_storage(self, storage: Storage) -> None:
        begun = time.time()
        put(storage, "f", b"content")
        first = storage.modified("f")
        give_up = time.monotonic() + 10
        while storage.modified("f") <= first and time.monotonic() < give_up:  # clocks of storages tick slowly
            time.sleep(0.01)
            storage.touch("f")
        touched = storage.modified("f")
        assert touched > first
        assert touched - first < time.time() - begun + _TICK, "it is in seconds"
        assert storage.read("f") == b"content"
        storage.publish("m", b"x", "tmp", replace=False)
        assert storage.modified("m") >= touched, "time goes on for other files too"
        storage.touch("f")
        assert storage.modified("f") >= storage.modified("m")

    # -- all of it together

    def test_a_checkpoint_is_saved_replaced_and_loaded(self, storage: Storage) -> None:
        def save(rank: SimulatedRank) -> None:
            for version in (1, 2):
                rank.save({"w": np.full(5000, version), "n": version}, storage, 3)

        def load(rank: SimulatedRank) -> bool:
            state: dict[str, Any] = {"w": np.zeros(5000, np.int64), "n": 0}
            rank.load(state, storage)
            return state["n"] == 2 and bool((state["w"] == 2).all())

        assert run_ranks(2, save) == [None, None]
        assert committed_ids(storage) == [3]
        assert verify_checkpoint(storage, 3, False).problems == ()
        saves = {parsed.save_id for name in storage.names() if (parsed := parse_data_file(name)) is not None}
        assert len(saves) == 1, "the files of the first save are gone"
        assert not [name for name in storage.names() if parse_claim(name) is not None]
        assert run_ranks(2, load) == [True, True]
