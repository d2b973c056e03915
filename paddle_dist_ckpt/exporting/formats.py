"""The formats that a checkpoint can be exported to, and what of it goes into which file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.decoding import MOST_COST, json_cost
from ..core.dtypes import DType, dtype_named
from ..core.garbage import no_collections
from ..core.messages import prepare
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..files.metadata import Metadata, SaveInfo
from ..files.names import DEFAULT_SUFFIX
from ..files.room import check_values_fit, is_too_much
from ..folder.checkpoint import check_sizes
from ..folder.selection import Chosen, Selection, unread
from ..folder.stored_values import read_json, read_values
from ..options import SaveOptions
from ..storage.base import Storage
from ..tree.paths import flat_keys
from ..tree.values import values_of
from .native import NewCheckpoint, plan_native
from .paddle_files import plan_paddle, plan_pdparams
from .plan import ExportFile, ExportTensor, StoredPart, divide_files
from .safetensors import plan_safetensors

__all__ = ["FORMATS", "Choose", "ExportPlan", "ExportRequest", "plan_export"]

Choose = Callable[[Metadata], Chosen]
"""Says what is exported of a checkpoint."""


class ExportRequest(msgspec.Struct, frozen=True):
    """What is to be exported; the same on all ranks.

    Attributes:
        out: The folder that is to be made, or the file, as an absolute path.
        format: One of :data:`FORMATS`.
        unique_id: Which checkpoint; None for the newest.
        prefix: See :func:`paddle_dist_ckpt.export`, as for the others.
        keys: Flat keys, or patterns.
        dtype: The floating-point type to convert to, or None.
        max_shard_bytes: The most bytes of tensors in a file, if there are several.
        stem: What the names of safetensors files begin with.
        of_torch: Whether these say that they are in the format of torch, which transformers asks for, and PaddleNLP
            refuses.
        made: A digest of what tensors are made of, by which ranks are compared.
        block_bytes: For this library's own format, see :class:`paddle_dist_ckpt.SaveOptions`, as for the next.
        data_suffix: How the names of data files end there.
    """

    out: str
    format: str
    unique_id: int | None
    prefix: str | None
    keys: list[str] | None
    dtype: str | None
    max_shard_bytes: int
    stem: str = "model"
    of_torch: bool = True
    made: str = ""
    block_bytes: int = SaveOptions().block_bytes
    data_suffix: str = DEFAULT_SUFFIX

    @property
    def selection(self) -> Selection:
        """Which part of the checkpoint."""
        return Selection(self.prefix, self.keys)


prepare([ExportRequest])


@dataclass(frozen=True, slots=True, eq=False)
class ExportPlan:
    """Who writes which files.

    Attributes:
        source: What the checkpoint holds.
        files: The files.
        shares: Which of them each rank writes.
        left_out: Flat keys of the values that the format has no place for, of what cannot be read, and of what is not
            made.
        draft: For this library's own format: what `.metadata` says, but for the digests of the files.
    """

    source: Metadata
    files: list[ExportFile]
    shares: list[list[int]]
    left_out: list[str]
    draft: Metadata | None = None

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        parts = [part for file in self.files for part in file.parts]
        return sum(isinstance(part, ExportTensor) and part.kind != Kind.VALUE for part in parts)


class _Selected(NamedTuple):
    """What is exported: tensors; large values, which are stored like tensors; other values, path and tree."""

    tensors: list[ExportTensor]
    large: list[ExportTensor]
    values: list[tuple[str, Any]]


class _Job(NamedTuple):
    """What else the planning needs to know."""

    source: Storage
    metadata: Metadata
    request: ExportRequest
    ranks: int
    save: SaveInfo


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format to export to.

    Attributes:
        plan: Plans the files.
        holds_values: Whether it has a place for values.
        is_file: Whether what is made is one file, and not a folder.
    """

    plan: Callable[[_Selected, _Job], ExportPlan]
    holds_values: bool = False
    is_file: bool = False


@no_collections()
def plan_export(
    source: Storage, metadata: Metadata, request: ExportRequest, choose: Choose, ranks: int, save: SaveInfo
) -> ExportPlan:
    """Plan an export; on every rank alike.

    Args:
        source: The checkpoint's folder.
        metadata: What it holds.
        request: What is wanted of it.
        choose: Says what that is.
        ranks: How many ranks write.
        save: What a checkpoint that is made of it is called.

    Raises:
        See :func:`paddle_dist_ckpt.export`.
    """
    target, table = FORMATS[request.format], metadata.table
    found = choose(metadata)
    paths = found.paths
    # In a checkpoint of this library keys follow from its own paths alone.
    keys = flat_keys(list(paths.values())) if request.format == "native" else found.keys(metadata)
    wanted = dtype_named(request.dtype) if request.dtype is not None else None
    chosen, making = _Selected([], [], []), _TensorMaker(metadata, found, wanted)
    left_out = []
    for path, key in zip(paths, keys, strict=True):
        if path in found.made:
            chosen.tensors.append(making.made(path, key))
            continue
        row = table.index.get(path)
        kind = Kind(int(table.kinds[row])) if row is not None else Kind.VALUE
        if kind == Kind.VALUE and not target.holds_values:
            left_out.append(key)
        elif row is not None:
            tensor = making.as_stored(path, key, row, kind)
            (chosen.large if kind == Kind.VALUE else chosen.tensors).append(tensor)
    if target.holds_values:
        chosen.values.extend((paths[path], tree) for path, tree in metadata.value_records if path in paths)
    named = [key for key in left_out if request.keys is not None and key in request.keys]
    if named:
        raise UnsupportedValueError(f"{', '.join(named[:5])}: no tensor, so the format has no place for it")
    used = sorted({part.row for tensor in (*chosen.tensors, *chosen.large) for part in tensor.parts})
    check_sizes(source, metadata, sorted(set(table.select(used)[0].shard_file.tolist())))
    plan = target.plan(chosen, _Job(source, metadata, request, ranks, save))
    plan.left_out.extend(dict.fromkeys([*left_out, *found.unmade, *unread(metadata, request.selection)]))
    return plan


class _TensorMaker:
    """Makes the tensors of an export; ``wanted`` is the type to convert floating-point tensors to, if there is one."""

    def __init__(self, metadata: Metadata, chosen: Chosen, wanted: DType | None) -> None:
        self._metadata, self._chosen, self._wanted = metadata, chosen, wanted
        self._rows = {metadata.key(path): row for row, path in enumerate(metadata.table.paths)} if chosen.made else {}

    def as_stored(self, path: str, key: str, row: int, kind: Kind) -> ExportTensor:
        """A tensor, or what else is stored like one, as it is in the checkpoint."""
        table = self._metadata.table
        dtype, shape = table.dtypes[row], table.shape_of(row)
        place, stored = self._chosen.paths[path], StoredPart(row, dtype)
        return ExportTensor(place, key, shape, self._converted(dtype), stored, table.names[row], kind)

    def made(self, path: str, key: str) -> ExportTensor:
        """A tensor that is made of parts of others. What a recipe casts has the type that it says."""
        one, table = self._chosen.made[path], self._metadata.table
        rows = [self._rows[part.key] for part in one.parts]
        parts = [StoredPart(row, table.dtypes[row], part) for row, part in zip(rows, one.parts, strict=True)]
        dtype = one.dtype_of(self._chosen.stored)
        return ExportTensor(
            self._chosen.paths[path], key, tuple(one.shape), dtype if one.is_cast else self._converted(dtype), parts
        )

    def _converted(self, dtype: DType) -> DType:
        return self._wanted if self._wanted is not None and dtype.category == "float" else dtype


def _divided(job: _Job, files: list[ExportFile]) -> ExportPlan:
    return ExportPlan(job.metadata, files, divide_files([file.nbytes for file in files], job.ranks), [])


def _safetensors(chosen: _Selected, job: _Job) -> ExportPlan:
    request = job.request
    return _divided(job, plan_safetensors(chosen.tensors, request.max_shard_bytes, request.stem, request.of_torch))


def _paddle(chosen: _Selected, job: _Job) -> ExportPlan:
    return _divided(job, plan_paddle(chosen.tensors, job.request.max_shard_bytes))


def _pdparams(chosen: _Selected, job: _Job) -> ExportPlan:
    values = list(values_of(chosen.values).items())
    values += _read_values(job.source, job.metadata, chosen.large)
    return _divided(job, plan_pdparams(chosen.tensors, values, Path(job.request.out).name))


def _native(chosen: _Selected, job: _Job) -> ExportPlan:
    most, suffix = job.request.max_shard_bytes, job.request.data_suffix
    new = NewCheckpoint(most, job.ranks, job.save, job.metadata.user_tree, suffix)
    files, draft = plan_native([*chosen.tensors, *chosen.large], chosen.values, new)
    _check_values(job, files, draft)
    shares = [[i for i, file in enumerate(files) if file.own and file.own.info.rank == r] for r in range(job.ranks)]
    return ExportPlan(job.metadata, files, shares, [], draft)


def _check_values(job: _Job, files: Sequence[ExportFile], draft: Metadata) -> None:
    """See that the values will not be refused for their cost in memory when they are loaded.

    Values that the checkpoint stores as entries are read for this only if they might be too many.
    """
    parts = (part for file in files for part in file.parts if isinstance(part, ExportTensor))
    large, nbytes = [part for part in parts if part.kind == Kind.VALUE], sum(file.nbytes for file in files)
    stored = [part for part in large if part.data is None]
    cost = draft.cost + sum(json_cost(part.data) for part in large if part.data is not None)
    if is_too_much(cost + MOST_COST * sum(part.nbytes for part in stored), nbytes):
        found = read_json(job.source, job.metadata, [part.parts[0].row for part in stored])
        cost += sum(json_cost(data.data) for data in found if not isinstance(data, CheckpointCorruptedError))
        check_values_fit(cost, nbytes)


def _read_values(source: Storage, metadata: Metadata, large: Sequence[ExportTensor]) -> list[tuple[str, Any]]:
    """Path and value of what is stored like tensors."""
    found = list(read_values(source, metadata, [tensor.parts[0].row for tensor in large]))
    damaged = [value for value in found if isinstance(value, CheckpointCorruptedError)]
    if damaged:
        raise damaged[0]
    return [(tensor.path, value) for tensor, value in zip(large, found, strict=True)]


FORMATS: Mapping[str, ExportFormat] = {
    "safetensors": ExportFormat(_safetensors),
    "paddle": ExportFormat(_paddle),
    "pdparams": ExportFormat(_pdparams, holds_values=True, is_file=True),
    "native": ExportFormat(_native, holds_values=True),
}
