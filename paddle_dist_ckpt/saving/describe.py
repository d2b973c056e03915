"""Turns a rank's state_dict into the message that says what it has to save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.box import Box, whole
from ..core.boxes import Boxes
from ..core.cached import cached_property
from ..core.columns import IntArray, pack_column, pack_signed
from ..core.decoding import json_cost
from ..core.device_memory import Copies, DeviceAccess, DeviceArray, NoCopies, Request, Scattered, read_scattered
from ..core.dtypes import DTYPES
from ..core.layouts import MOST_DIMENSIONS, is_storable
from ..core.local_tensors import LocalShards, LocalTensors, device_arrays
from ..core.memory import Bytes1D, address_of, array_at, gather
from ..core.messages import encode
from ..core.shards import Kind
from ..core.tensors import Geometry, Identity, LocalShard, TensorView
from ..errors import UnsupportedValueError
from ..files.metadata import INLINE_BYTES, INLINE_TOTAL_BYTES
from ..tree.own_values import OfRanks
from ..tree.paths import RankIndex, join, parent_of, plain_key, unstorable
from ..tree.state_dict import Adapter, Leaves, PerRank, flatten
from ..tree.values import encode_value
from ..visible import each_visible
from .messages import Description, Structure, TensorList, ValueRecord

__all__ = ["KnownState", "LocalState", "describe", "digests_of"]

_OWN_STEP = 256  # ranks' own values are padded with blanks to multiples of it,
_MOST_BLANKS = 4096  # and further, to the size that they had before
_HASH_CHUNK = 4 << 20
_TOGETHER = 4 << 20  # bytes that are read from a device before any of them are hashed
_EMPTY_CONTAINERS = (b"[]", b'{"dict":[]}', b'{"tuple":[]}')


class LocalValue(NamedTuple):
    """A value of this rank as JSON; ``nbytes`` is the size of its entry in a data file, -1 if it becomes none."""

    path: str
    is_empty: bool
    nbytes: int
    json: bytes


@dataclass(frozen=True, slots=True, eq=False)
class KnownState:
    """A state that was described, in terms that do not keep its tensors alive: ``tensors`` are without their owners.

    ``outline`` is what the structure says of the values, and ``fingerprint`` the structure's digest.
    """

    identity: Identity
    tensors: LocalTensors
    outline: list[tuple[str, bool, int]]
    fingerprint: bytes


@dataclass(frozen=True, eq=False)
class LocalState:
    """What this rank has: ``tensors``, behind which are the values that become entries, and ``values``.

    ``known`` is the description from before, if the tensors are still the same.
    """

    adapter: Adapter
    tensors: LocalTensors
    values: list[LocalValue]
    known: KnownState | None

    @cached_property
    def shards(self) -> LocalShards:
        """The tensors' shards."""
        return LocalShards(self.tensors.geometries, np.array(self.tensors.geometry, np.int64))

    def shard(self, row: int) -> tuple[Geometry, LocalShard]:
        """Shard ``row``, with its tensor's geometry."""
        return self.shards.cells[self.shards.cell[row]]

    def part(self, row: int, box: Box) -> npt.NDArray[Any] | DeviceArray:
        """A box of shard ``row``, in global coordinates, as an array of raw items."""
        array, inside = self.array(row), box.relative_to(self.shard(row)[1].box.offset)
        return array.part(inside) if isinstance(array, DeviceArray) else np.asarray(array[inside.slices])

    def array(self, row: int) -> npt.NDArray[Any] | DeviceArray:
        """Shard ``row`` as an array of raw items."""
        geometry, shard = self.shard(row)
        if geometry.on_device:
            return self.device_arrays(np.array([row], np.int64))[0]
        owner = self.tensors.owners[self.shards.tensor[row]]
        return array_at(self.tensors.addresses[row], shard.box.shape, shard.strides, geometry.dtype.raw, owner)

    def device_arrays(self, rows: IntArray) -> list[DeviceArray]:
        """The same of some shards, which are all on devices."""
        return device_arrays(
            self.shards.cells,
            self.shards.cell[rows],
            [self.tensors.owners[tensor] for tensor in self.shards.tensor[rows].tolist()],
            [self.tensors.addresses[row] for row in rows.tolist()],
            self.devices,
        )

    def read(self, array: npt.NDArray[Any] | DeviceArray, start: int, stop: int, into: Bytes1D) -> None:
        """Copy bytes ``start:stop`` of an array, in the order of its items, to host memory."""
        if isinstance(array, DeviceArray):
            array.read(start, stop, into, self.copies)
        else:
            gather(array, start, stop, into)

    def contents(self, parts: Iterable[tuple[npt.NDArray[Any] | DeviceArray, int, int]]) -> Iterator[Bytes1D]:
        """Bytes of arrays, from one to another of each; small ones are copied from a device together."""
        batch, room = list[tuple[npt.NDArray[Any] | DeviceArray, int, int]](), 0
        for part in parts:
            nbytes = part[2] - part[1]
            if batch and room + nbytes > _TOGETHER:
                yield from self._contents(batch, room)
                batch, room = [], 0
            batch.append(part)
            room += nbytes
        yield from self._contents(batch, room)

    def _contents(self, parts: Sequence[tuple[npt.NDArray[Any] | DeviceArray, int, int]], nbytes: int) -> list[Bytes1D]:
        buffer, at = np.empty(nbytes, np.uint8), 0
        base = address_of(buffer)
        found, requests, scattered = list[Bytes1D](), list[Request](), list[Scattered]()
        for array, start, stop in parts:
            found.append(buffer[at : at + stop - start])
            if isinstance(array, DeviceArray):
                array.add_pieces(start, stop, base + at, requests, scattered)
            else:
                gather(array, start, stop, found[-1])
            at += stop - start
        self.copies.read(requests, buffer)
        self.copies.mark().wait()
        read_scattered(scattered, self.copies)
        return found

    @cached_property
    def copies(self) -> Copies:
        """Copies from devices. They come after all that was queued on a device before the first of them."""
        return self.devices.copies() if self.devices is not None else NoCopies()

    @cached_property
    def devices(self) -> DeviceAccess | None:
        """How to reach devices, if some of it is on one."""
        return self.adapter.devices if any(geometry.on_device for geometry in self.tensors.geometries) else None

    @property
    def host_memory(self) -> Callable[[int], Bytes1D] | None:
        """Makes memory that copies from devices are fast with; None if nothing is on one."""
        return self.devices.host_memory if self.devices is not None else None

    @cached_property
    def outline(self) -> list[tuple[str, bool, int]]:
        """What the structure says of the values: their paths, whether they are empty containers, their ``nbytes``."""
        return [value[:3] for value in self.values]

    def identified(self) -> tuple[bytes, bytes | None, KnownState | None]:
        """The digest of the structure; the structure unless it is known; how to know the state again, if possible."""
        known = self.known
        if known is not None and known.outline == self.outline:
            return known.fingerprint, None, known
        structure = self.structure()
        fingerprint = xxhash.xxh3_128_digest(structure)
        count = len(self.tensors.paths) - sum(value.nbytes >= 0 for value in self.values)
        tensors = self.tensors.with_owners([None] * count)
        owners = self.tensors.owners[:count]
        identity = known.identity if known is not None else self.adapter.identity(owners, tensors.addresses)
        known = KnownState(identity, tensors, self.outline, fingerprint) if identity is not None else None
        return fingerprint, structure, known

    def records(self) -> list[ValueRecord]:
        """The values as the coordinator wants them."""
        return [
            ValueRecord(xxhash.xxh3_64_intdigest(v.json), v.json)
            if v.nbytes < 0
            else ValueRecord(xxhash.xxh3_64_intdigest(v.json), None, json_cost(v.json))
            for v in self.values
        ]

    def structure(self) -> bytes:
        """The encoded :class:`Structure`."""
        tensors = self.tensors
        geometries = tensors.geometries
        different: dict[Description, int] = {}
        number = [different.setdefault(_description(g), len(different)) for g in geometries]
        geometry = np.array(tensors.geometry, np.int64)
        listed = TensorList(
            tensors.paths,
            tensors.names if any(name is not None for name in tensors.names) else [],
            list(different),
            pack_column(np.array(number, np.int64)[geometry]),
        )
        dimensions = max([1, *(len(g.shape) for g in geometries)])
        boxes = Boxes.of([shard.box for _, shard in self.shards.cells], dimensions)
        addends = [g.reduction.position if g.reduction is not None else -1 for g, _ in self.shards.cells]
        return encode(
            Structure(
                tensors=encode(listed),
                geometry=pack_column(geometry),
                shards=pack_column([len(g.shards) for g in geometries]),
                dimensions=dimensions,
                cells=pack_signed(np.column_stack([boxes.table, np.array(addends, np.int64)])),
                values=[(path, is_empty) for path, is_empty, _ in self.outline],
            )
        )


def _description(geometry: Geometry) -> Description:
    reduction = geometry.reduction
    operation, addends = (reduction.operation, reduction.count) if reduction is not None else (None, 0)
    return Description(geometry.dtype.name, geometry.kind, geometry.plain, geometry.shape, operation, addends)


def describe(state_dict: dict[Any, Any], adapter: Adapter, rank: int, known: Sequence[KnownState] = ()) -> LocalState:
    """Look at everything in a state_dict, copying nothing but values.

    If the tensors are the same as those of a state that is ``known`` from before, they are not looked at again.

    Raises:
        UnsupportedValueError: something in it cannot be stored; lists every such entry.
        TypeError: it is not a dict.
    """
    leaves = flatten(state_dict, adapter)
    problems = unstorable([*leaves.tensor_paths, *leaves.value_paths])
    like = [one for one in known if one.tensors.paths == leaves.tensor_paths]
    same = next((one for one in like if one.identity.matches(leaves.tensors)), None)
    latest = next(iter([same] if same is not None else [*like, *known]), None)
    before = {path: nbytes for path, _, nbytes in latest.outline} if latest is not None else {}
    if same is not None:
        tensors = same.tensors.with_owners(leaves.tensors)
    else:
        tensors = LocalTensors()
        problems += tensors.look_at(leaves.tensor_paths, leaves.tensors, adapter).values()
        problems += _too_large(tensors)
    values = _encoded(leaves, rank, before, problems)
    if problems:
        raise UnsupportedValueError("\n".join(["the state_dict holds what cannot be stored:", *each_visible(problems)]))
    for value in values:
        if value.nbytes >= 0:
            array = np.frombuffer(value.json, np.uint8)
            geometry = Geometry(Kind.VALUE, DTYPES["uint8"], array.shape, True, (LocalShard(whole(array.shape)),))
            tensors.add(value.path, TensorView(geometry, (address_of(array),), array, None))
    return LocalState(adapter, tensors, values, same)


def _too_large(tensors: LocalTensors) -> Iterator[str]:
    """A line for each tensor of a shape that a checkpoint cannot have."""
    unfit = {i for i, geometry in enumerate(tensors.geometries) if not is_storable(geometry.shape)}
    for path, i in zip(tensors.paths, tensors.geometry, strict=True) if unfit else ():
        if i in unfit:
            yield (
                f"{plain_key(path)}: a tensor of shape {list(tensors.geometries[i].shape)} cannot be stored; at most "
                f"{MOST_DIMENSIONS} dimensions, and fewer than 2**58 elements, are possible"
            )


_IN_OWN = " (a PerRank takes values alone: of a tensor, its numpy array)"


def _room_for(nbytes: int, before: int) -> int:
    """The size of the entry of a rank's own value. Such values change in every save, and sometimes a little in size;
    another size of the entry would need another plan."""
    if nbytes <= before <= nbytes + _MOST_BLANKS:
        return before
    return -(-(nbytes + nbytes // 64) // _OWN_STEP) * _OWN_STEP


def _encoded(leaves: Leaves, rank: int, before: Mapping[str, int], problems: list[str]) -> list[LocalValue]:
    """The values as JSON, those too large for `.metadata` not inline; ``before`` has their sizes before, by path."""
    values: list[LocalValue] = []
    total = 0
    for stored, value, own in _with_own(leaves, rank):
        try:
            json = encode_value(value, plain_key(parent_of(stored) if own else stored))
        except UnsupportedValueError as error:
            problems.append(f"{error}{_IN_OWN if own else ''}")
            continue
        inline = not own and len(json) <= INLINE_BYTES and total + len(json) <= INLINE_TOTAL_BYTES
        if own:
            json = json.ljust(_room_for(len(json), before.get(stored, 0)))
        total += len(json) if inline else 0
        values.append(LocalValue(stored, json in _EMPTY_CONTAINERS, -1 if inline else len(json), json))
    return values


def _with_own(leaves: Leaves, rank: int) -> Iterator[tuple[str, Any, bool]]:
    """The values with the paths at which they are stored, and whether they are a rank's own."""
    for path, value in zip(leaves.value_paths, leaves.values, strict=True):
        if not isinstance(value, PerRank):
            yield path, value, False
            continue
        by_rank = value.value if isinstance(value, OfRanks) else {rank: value.value}
        for one, own in by_rank.items():
            yield join(path, RankIndex(one)), own, True


def digests_of(state: LocalState) -> bytes:
    """xxh3_128 of the bytes of each plain tensor, which is one whole shard, to be compared among ranks.

    Ranks write parts of one tensor if these are equal, so they are as long as those of structures.
    """
    is_plain = np.array([g.plain and g.kind != Kind.VALUE for g, _ in state.shards.cells], bool)
    rows = np.flatnonzero(is_plain[state.shards.cell]).tolist()
    arrays = {row: state.array(row) for row in rows}
    small = [row for row, array in arrays.items() if isinstance(array, DeviceArray) and array.nbytes <= _TOGETHER]
    parts = ((arrays[row], 0, arrays[row].nbytes) for row in small)
    digests = {row: xxhash.xxh3_128_digest(data.data) for row, data in zip(small, state.contents(parts), strict=True)}
    return b"".join(digests[row] if row in digests else _digest(arrays[row], state) for row in rows)


def _digest(array: npt.NDArray[Any] | DeviceArray, state: LocalState) -> bytes:
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        return xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data)
    digest, buffer = xxhash.xxh3_128(), np.empty(_HASH_CHUNK, np.uint8)
    for start in range(0, array.nbytes, _HASH_CHUNK):
        stop = min(start + _HASH_CHUNK, array.nbytes)
        state.read(array, start, stop, buffer[: stop - start])
        digest.update(buffer[: stop - start].data)
    return digest.digest()
