"""What the engine's tests share: jobs of simulated ranks, arrays of every dtype, random tilings, comparisons."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddle_dist_ckpt import list_checkpoints, read_metadata
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.exporting.formats import Choose, ExportRequest
from paddle_dist_ckpt.files.codec import decode_metadata, encode_metadata
from paddle_dist_ckpt.folder.selection import Chosen, Selection, select
from paddle_dist_ckpt.loading.merged import load_merged
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.reports import LoadReport, SaveReport
from paddle_dist_ckpt.storage import LocalStorage, as_source
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage, NumpyAdapter, ShardedArray, SimulatedRank, run_ranks, shard_array
from paddle_dist_ckpt.tree.values import decode_jsonable, from_jsonable

SMALL = SaveOptions(block_bytes=4096, timeout=60)
"""Small blocks, so that small tensors have many."""


@contextlib.contextmanager
def little_memory(limit: int = 50 << 20) -> Iterator[None]:
    """Fails if more than this is allocated at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak:,}"


def decode_value(data: bytes) -> Any:
    """The value that ``encode_value`` wrote."""
    return from_jsonable(decode_jsonable(data), kept=False)


# -- jobs


def all_ok(results: Sequence[Any]) -> list[Any]:
    """The results of a job in which no rank raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def errors_of(results: Sequence[Any], kind: type[BaseException]) -> list[Any]:
    """The errors of a job in which every rank raised one of this type."""
    for result in results:
        if not isinstance(result, kind):
            raise AssertionError(f"not {kind.__name__} but {result!r}") from (
                result if isinstance(result, BaseException) else None
            )
    return list(results)


def per_rank(path: Any, count: int) -> list[Any]:
    """A path for each rank: the ones given, or the same for all."""
    return list(path) if isinstance(path, (list, tuple)) else [path] * count


def try_save(
    states: Sequence[dict[Any, Any]],
    path: Any,
    unique_id: int | None = None,
    options: SaveOptions = SMALL,
    ranks: Sequence[int] | None = None,
    coordinator: int | None = None,
) -> list[Any]:
    """Save a state_dict a rank; returns what each rank returned or raised. ``path`` may be a list, one a rank."""
    members = list(ranks) if ranks is not None else list(range(len(states)))
    paths = per_rank(path, len(members))
    options = dataclasses.replace(options, separate_folders=len(set(map(str, paths))) > 1)

    def work(rank: SimulatedRank) -> SaveReport:
        place = members.index(rank.rank)
        return rank.save(states[place], paths[place], unique_id, options)

    return run_ranks(members, work, coordinator)


def save_on(states: Sequence[dict[Any, Any]], path: Any, *args: Any, **kwargs: Any) -> list[SaveReport]:
    """As :func:`try_save`, where every rank must succeed."""
    return all_ok(try_save(states, path, *args, **kwargs))


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.state: Any = {"n": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saved_by_two(path: Path, state: dict[str, Any]) -> None:
    """Save what two ranks have alike."""
    all_ok(run_ranks(2, lambda rank: rank.save(state, path)))


def try_load(
    states: Sequence[dict[Any, Any]],
    path: Any,
    unique_id: int | None = None,
    options: LoadOptions | None = None,
    ranks: Sequence[int] | None = None,
    coordinator: int | None = None,
) -> list[Any]:
    """Load into a state_dict a rank; returns what each rank returned or raised."""
    members = list(ranks) if ranks is not None else list(range(len(states)))
    paths = per_rank(path, len(members))
    several = len(set(map(str, paths))) > 1
    options = dataclasses.replace(options or LoadOptions(timeout=60), separate_folders=several)

    def work(rank: SimulatedRank) -> LoadReport:
        place = members.index(rank.rank)
        return rank.load(states[place], paths[place], unique_id, options)

    return run_ranks(members, work, coordinator)


def load_on(states: Sequence[dict[Any, Any]], path: Any, *args: Any, **kwargs: Any) -> list[LoadReport]:
    """As :func:`try_load`, where every rank must succeed."""
    return all_ok(try_load(states, path, *args, **kwargs))


def save_alone(
    state: dict[Any, Any], path: Any, unique_id: int | None = None, options: SaveOptions = SMALL
) -> SaveReport:
    """Save as a process without others does."""
    return _alone().save(state, path, unique_id, options)


def load_alone(
    state: dict[Any, Any], path: Any, unique_id: int | None = None, options: LoadOptions | None = None
) -> LoadReport:
    """Load as a process without others does."""
    return _alone().load(state, path, unique_id, options or LoadOptions())


def _alone() -> SimulatedRank:
    return SimulatedRank(0, (0,), SoloHub(), NoTransport())


def load_whole(
    path: Any,
    unique_id: int | None = None,
    prefix: str | None = None,
    keys: Any = None,
    flat: bool = False,
    options: LoadOptions | None = None,
) -> dict[Any, Any]:
    """Everything in a checkpoint, or what is selected, tensors as whole numpy arrays."""
    selection = Selection(prefix, keys)
    return load_merged(as_source(path), NumpyAdapter(), unique_id, selection, flat, options or LoadOptions())


# -- arrays


def all_of(request: ExportRequest) -> Choose:
    """Chooses for an export what the request says, as it is stored."""
    return lambda metadata: Chosen(select(metadata, request.selection), {}, {})


def make_array(shape: Sequence[int], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """An array whose elements differ from each other (where the dtype can) and depend on the seed."""
    rng = np.random.default_rng((seed, math.prod(shape)))
    raw = rng.integers(0, 256, math.prod(shape) * DTYPES[dtype].itemsize, np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(arithmetic_dtype(DTYPES[dtype])).reshape(tuple(shape))


def blank_like(array: np.ndarray) -> np.ndarray:
    """An array of the same shape and dtype whose bytes are all 0x5a, as no test array's are."""
    return np.full(array.nbytes, 1 if array.dtype == bool else 0x5A, np.uint8).view(array.dtype).reshape(array.shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit by bit, in shape and in dtype."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


LAYOUTS = ("c", "fortran", "strided", "reversed", "inner", "window")


def laid_out(array: np.ndarray, how: str) -> np.ndarray:
    """A copy of an array as a view of other memory: transposed, every second row, backwards, ..."""
    if array.ndim == 0 or how == "c":
        return np.array(array, order="C")
    if how == "fortran":
        return np.array(array, order="F")
    if how == "strided":
        memory = np.zeros((2 * array.shape[0], *array.shape[1:]), array.dtype)[1::2]
    elif how == "reversed":
        memory = np.zeros(array.shape, array.dtype)[::-1]
    elif how == "inner":
        memory = np.zeros((*array.shape[:-1], 3 * array.shape[-1]), array.dtype)[..., ::3]
    else:
        memory = np.zeros([n + 2 for n in array.shape], array.dtype)[(slice(1, -1),) * array.ndim]
    memory[...] = array
    return memory


def sharded(array: np.ndarray, boxes: Sequence[Box], how: str = "c", fill: bool = True) -> ShardedArray:
    """The boxes of an array as a distributed tensor whose pieces lie in memory in a given way."""
    pieces = [laid_out(array[box.slices] if fill else blank_like(array[box.slices]), how) for box in boxes]
    return ShardedArray(array.shape, DTYPES[array.dtype.name], list(boxes), pieces)


def rows_of(shape: Sequence[int], rank: int, ranks: int, dimension: int = 0) -> Box:
    """The part of a tensor that a rank has when it is cut evenly along a dimension."""
    step = -(-shape[dimension] // ranks)
    start = min(rank * step, shape[dimension])
    stop = min(start + step, shape[dimension])
    offset, extent = [0] * len(shape), list(shape)
    offset[dimension], extent[dimension] = start, stop - start
    return Box(tuple(offset), tuple(extent))


def split_rows(array: np.ndarray, ranks: int, fill: bool = True, dimension: int = 0) -> list[ShardedArray]:
    """An array cut evenly along a dimension, a part a rank."""
    return [shard_array(array, [rows_of(array.shape, rank, ranks, dimension)], fill) for rank in range(ranks)]


def split_all(arrays: Mapping[str, np.ndarray], ranks: int = 2) -> list[dict[str, Any]]:
    """Arrays for each of some ranks: what has several rows is cut, all else is whole."""
    cut = {key: split_rows(one, ranks) if one.ndim and len(one) > 1 else [one] * ranks for key, one in arrays.items()}
    return [{key: parts[rank] for key, parts in cut.items()} for rank in range(ranks)]


def check_pieces(tensor: ShardedArray, expected: np.ndarray) -> None:
    """Assert that every piece holds what the global array has there."""
    for box, piece in zip(tensor.boxes, tensor.pieces, strict=True):
        assert same_bits(np.ascontiguousarray(piece).reshape(box.shape), expected[box.slices].copy()), box


def everything(array: np.ndarray) -> list[Box]:
    """The one box that is the whole array."""
    return [whole(array.shape)]


# -- values


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal and of the same types; NaN is like NaN, 0.0 unlike -0.0, a dict's order is free."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        kinds = {key: type(key) for key in b}
        return len(a) == len(b) and all(kinds.get(key) is type(key) and alike(a[key], b[key]) for key in a)
    if isinstance(a, (np.ndarray, np.generic)):
        return same_bits(np.asarray(a), np.asarray(b))
    return repr(a) == repr(b)


# -- folders


def files_in(folder: Path) -> dict[str, bytes]:
    """Name and content of everything in a folder."""
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir()) if entry.is_file()}


def without_times(path: Path) -> bytes:
    """What a `.metadata` would be if nobody had measured how long the save took, which data files do not say."""
    metadata = decode_metadata(path.read_bytes(), path.name, int(path.name.partition(".")[0]))
    return encode_metadata(msgspec.structs.replace(metadata, times=None))


def saves_in(folder: Path) -> dict[str, int]:
    """The save id of every committed checkpoint, with its unique_id."""
    return {read_metadata(folder, unique_id).save_id: unique_id for unique_id in list_checkpoints(folder)}


def data_files(folder: Path) -> list[Path]:
    """The native data files in a folder."""
    return sorted(path for path in folder.glob("*.*.*.safetensors"))


def age(path: Path, seconds: float = 3600.0) -> None:
    """Make a file look as if it had last been modified so long ago."""
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def age_claims(folder: Path) -> None:
    """Make all that claim something in a folder look dead."""
    claims = list(folder.glob("*.claim"))
    assert claims
    for claim in claims:
        age(claim)


def another_host(path: Any, number: int) -> FaultyStorage:
    """A folder as it is seen from another host."""
    return FaultyStorage(path, lambda operation, name: None, FolderIdentity(f"host{number}", number, number))


# -- faults


class Killed(BaseException):
    """What a storage raises once its process is supposed to be dead."""


Step = tuple[int, str, str]
"""An operation: the rank, what it does, to which name."""


@dataclass
class Watch:
    """Storages, one a rank, that count what is done to them, and can fail or die at a rank's n-th operation.

    Attributes:
        folders: Each rank's folder.
        at: The rank and the number of its operation at which something happens; None to watch only.
        error: What is raised there.
        kills: Who is dead after that: ``"none"``, ``"rank"`` (nothing that this rank does has an effect any more) or
            ``"all"``.
        frozen: With ``"all"``: where to copy the folders to at that instant.
        steps: What was done.
    """

    folders: Sequence[Path]
    at: tuple[int, int] | None = None
    error: Callable[[], BaseException] = Killed
    kills: str = "none"
    frozen: Path | None = None
    steps: list[Step] = field(default_factory=list)
    happened: Step | None = None
    _dead: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def storages(self) -> list[FaultyStorage]:
        """One for each rank."""
        return [FaultyStorage(folder, self._hook(rank)) for rank, folder in enumerate(self.folders)]

    def _hook(self, rank: int) -> Callable[[str, str], None]:
        def before(operation: str, name: str) -> None:
            with self._lock:
                if rank in self._dead:
                    raise Killed
                self.steps.append((rank, operation, name))
                count = self._counts[rank] = self._counts.get(rank, -1) + 1
                if self.at == (rank, count):
                    self._strike(rank, operation, name)

        return before

    def _strike(self, rank: int, operation: str, name: str) -> None:
        self.happened = (rank, operation, name)
        if self.kills == "all":
            self._dead = set(range(len(self.folders)))
            if self.frozen is not None:
                for folder in dict.fromkeys(self.folders):
                    if folder.exists():
                        shutil.copytree(folder, self.frozen / folder.name)  # keeps modification times
        elif self.kills == "rank":
            self._dead = {rank}
        raise self.error()

    def count_by_rank(self) -> dict[int, int]:
        """How many operations each rank did."""
        return {rank: count + 1 for rank, count in sorted(self._counts.items())}

    def names_of(self, operation: str, rank: int | None = None) -> list[str]:
        """The names to which an operation was done."""
        return [name for r, done, name in self.steps if done == operation and rank in (None, r)]


class CountingStorage(LocalStorage):
    """A folder that notes which byte ranges of which files are read."""

    def __init__(self, path: Any, log: list[tuple[str, int, int]]) -> None:
        super().__init__(path)
        self._log = log

    def open(self, name: str) -> Any:
        """Open a file whose reads are noted."""
        return _CountingReadable(super().open(name), name, self._log)


class _CountingReadable:
    def __init__(self, inner: Any, name: str, log: list[tuple[str, int, int]]) -> None:
        self._inner, self._name, self._log = inner, name, log
        self.size = inner.size
        self.close = inner.close

    def read_into(self, buffers: Sequence[Any], offset: int, once: bool = False) -> None:
        self._log.append((self._name, offset, offset + sum(len(buffer) for buffer in buffers)))
        self._inner.read_into(buffers, offset, once)

    def is_cached(self) -> bool:
        return bool(self._inner.is_cached())


def data_reads(folder: Path, log: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The noted reads that are of tensor data, not of headers, in order of their place."""
    starts = {path.name: 8 + int.from_bytes(path.read_bytes()[:8], "little") for path in data_files(folder)}
    return sorted(read for read in log if read[0] in starts and read[1] >= starts[read[0]])


@contextlib.contextmanager
def replaced_bytes(path: Path, changes: Mapping[int, int]) -> Iterator[None]:
    """Change bytes of a file (position to new value) for a while."""
    original = {}
    with path.open("r+b") as file:
        for place, value in changes.items():
            file.seek(place)
            original[place] = file.read(1)
            file.seek(place)
            file.write(bytes([value]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            for place, byte in original.items():
                file.seek(place)
                file.write(byte)
