"""What a checkpoint holds, and what a manager's folder of steps holds, as plain facts."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..core.layouts import Layout
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..files.names import step_of
from ..folder.catalogs import foreign_ids
from ..folder.checkpoint import read_checkpoint
from ..folder.ids import committed_ids, metadata_ids
from ..folder.nothing import managers_text
from ..folder.selection import Selection, unread
from ..storage import Folders, LocalStorage, local_path
from ..storage.base import Storage
from ..tree.values import from_jsonable
from ..visible import visible
from .contents import examples_text

__all__ = [
    "CheckpointFacts",
    "StepsFacts",
    "TensorFacts",
    "checkpoint_facts",
    "matches",
    "no_steps_text",
    "steps_facts",
]


class TensorFacts(msgspec.Struct, frozen=True, gc=False):
    """A tensor.

    Attributes:
        key: Its flat key.
        kind: ``"tensor"`` or ``"array"`` (of numpy).
        shape: Its global shape.
        dtype: Name of its element type.
        bytes: Its size.
        pieces: In how many pieces it is stored.
        grid: In how many parts each dimension is cut, if the pieces are a grid; else None.
    """

    key: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int
    grid: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """A value that is no tensor.

    Attributes:
        key: Its flat key.
        value: The value in JSON's terms; None if it is too large to be in `.metadata`.
        bytes: Its size if it is in a data file, else None.
    """

    key: str
    value: Any
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint.

    Attributes:
        path: Its folder.
        format: ``"native"`` for this library's own.
        unique_id: Its number in the folder.
        ids: The numbers of all checkpoints in the folder.
        world_size: How many ranks have saved it.
        created: When, in UTC.
        library: Name and version of the writer.
        paddle_version: Version of Paddle there, or None.
        save_id: The save's random id, which its data files' names have.
        files: How many data files it has.
        file_bytes: Their size.
        tensor_bytes: Size of the tensors listed here.
        user_metadata: What ``SaveOptions.user_metadata`` held.
        tensors: The tensors that were asked for.
        values: The values that were asked for.
        left_out: Flat keys of what was asked for beside that and is not read, with the reasons.
    """

    path: str
    format: str
    unique_id: int
    ids: list[int]
    world_size: int
    created: str
    library: str
    paddle_version: str | None
    save_id: str
    files: int
    file_bytes: int
    tensor_bytes: int
    user_metadata: Any
    tensors: list[TensorFacts]
    values: list[ValueFacts]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step of a :class:`paddle_dist_ckpt.CheckpointManager`: its number, the size of its data files, its metrics."""

    step: int
    bytes: int
    created: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepsFacts:
    """A manager's folder of steps.

    Attributes:
        path: The folder.
        steps: The committed steps, ascending.
        latest: The last one.
        lowest: For each metric the step where it is lowest.
        highest: For each metric the step where it is highest.
        uncommitted: Names of steps' folders without a checkpoint: being saved, or left by a save that failed.
        unread: Names of those that cannot be read, with the reasons.
    """

    path: str
    steps: list[StepFacts]
    latest: int | None
    lowest: dict[str, int]
    highest: dict[str, int]
    uncommitted: list[str]
    unread: dict[str, str]


def matches(key: str, pattern: str | None) -> bool:
    """Whether a flat key is, lies below, or is matched by a pattern as fnmatch has it; None matches all."""
    return (
        pattern is None
        or key == pattern
        or key.startswith(pattern.removesuffix(".") + ".")
        or fnmatch.fnmatchcase(key, pattern)
    )


def checkpoint_facts(storage: Storage, unique_id: int | None, pattern: str | None) -> CheckpointFacts:
    """What a checkpoint holds. Reads its `.metadata` alone.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or nothing matches the pattern.
        CheckpointError: it cannot be read.
    """
    metadata = read_checkpoint(storage, unique_id)
    tensors, values = _leaves(metadata, pattern)
    left_out = {key: reason for key, reason in unread(metadata, Selection()).items() if matches(key, pattern)}
    if pattern is not None and not (tensors or values or left_out):
        examples = examples_text(metadata, pattern)
        asked = f"no key of checkpoint {metadata.unique_id} matches '{visible(pattern)}'"
        raise CheckpointNotFoundError(f"{asked}; {examples}")
    ids = committed_ids(storage)
    if metadata.format != "native":  # those of our own are not beside others in any list, but they are in the folder
        ids = sorted({*ids, *foreign_ids(storage), metadata.unique_id})
    return CheckpointFacts(
        path=storage.location,
        format=metadata.format,
        unique_id=metadata.unique_id,
        ids=ids,
        world_size=metadata.world_size,
        created=metadata.created,
        library=metadata.library,
        paddle_version=metadata.paddle_version,
        save_id=metadata.save_id,
        files=len(metadata.files),
        file_bytes=sum(info.size for info in metadata.files),
        tensor_bytes=sum(tensor.bytes for tensor in tensors),
        user_metadata=metadata.user_metadata,
        tensors=tensors,
        values=values,
        left_out=left_out,
    )


def _leaves(metadata: Metadata, pattern: str | None) -> tuple[list[TensorFacts], list[ValueFacts]]:
    table = metadata.table
    tensors: list[TensorFacts] = []
    values = [
        ValueFacts(key, _decoded(tree))
        for path, tree in metadata.value_records
        if matches(key := metadata.key(path), pattern)
    ]
    layouts = [(each.shape, math.prod(each.shape), len(each.parts), _grid(each)) for each in table.layouts]
    columns = zip(table.paths, table.dtypes, table.kinds.tolist(), table.layout_of.tolist(), strict=True)
    for path, dtype, kind, number in columns:
        key, (shape, items, pieces, grid) = metadata.key(path), layouts[number]
        if not matches(key, pattern):
            continue
        nbytes = items * dtype.itemsize
        if kind == Kind.VALUE:
            values.append(ValueFacts(key, None, nbytes))
        else:
            name = "array" if kind == Kind.ARRAY else "tensor"
            tensors.append(TensorFacts(key, name, shape, dtype.name, nbytes, pieces, grid))
    return tensors, sorted(values, key=lambda value: value.key)


def _decoded(tree: Any) -> Any:
    """The value of a tree in tagged JSON form; of one that is damaged what is wrong, so that others are shown."""
    try:
        return from_jsonable(tree)
    except CheckpointCorruptedError as error:
        return f"({error})"


def _grid(layout: Layout) -> tuple[int, ...] | None:
    starts = layout.starts()
    return tuple(map(len, starts)) if starts is not None else None


def steps_facts(path: str) -> StepsFacts | None:
    """What a manager's folder of steps holds; None if the folder is none."""
    root = Path(local_path(path))
    if not root.is_dir() or not any(child.name.startswith("step-") for child in root.iterdir()):
        return None
    from ..manager.steps import Steps, step_folder

    found, opened = Steps(root), Folders()
    folders = found.folders(opened)
    if not folders or any(name.endswith(".metadata") for name in LocalStorage(root).names()):
        return None
    found.look(opened)
    steps = list(_steps(root, found.metrics))
    committed = {fact.step for fact in steps}
    lowest, highest = dict[str, tuple[float, int]](), dict[str, tuple[float, int]]()  # of equals the later step
    for fact in steps:
        for name, value in fact.metrics.items():
            if not math.isnan(value):
                lowest[name] = min((value, -fact.step), lowest.get(name, (value, 0)))
                highest[name] = max((value, fact.step), highest.get(name, (value, 0)))
    return StepsFacts(
        path=str(root.absolute()),
        steps=steps,
        latest=max(committed, default=None),
        lowest={name: -step for name, (_, step) in sorted(lowest.items())},
        highest={name: step for name, (_, step) in sorted(highest.items())},
        uncommitted=[
            step_folder(root, step).name for step in folders if step not in committed and step not in found.unread
        ],
        unread={step_folder(root, step).name: str(error) for step, error in sorted(found.unread.items())},
    )


def no_steps_text(path: str) -> str:
    """Why a folder is not taken for a manager's folder of steps, in words, and which one to pass if that is known."""
    root = Path(local_path(path)).absolute()
    if not root.is_dir():
        return f"{root} is a file; pass a folder of steps" if root.exists() else f"there is no folder {root}"
    storage = LocalStorage(root)
    if not metadata_ids(storage):
        return f"{root} is no folder of steps: it has no folder such as step-00000100"
    if step_of(root.name) is not None:
        return f"{root} is the folder of one step; pass {root.parent}, that of all steps"
    if managers_text(storage):
        return f"{root} holds a checkpoint itself, beside the steps: delete removes it, if it is of no use"
    return f"{root} holds a checkpoint itself, and is no folder of steps"


def _steps(root: Path, metrics: Mapping[int, Mapping[str, float]]) -> Iterator[StepFacts]:
    from ..manager.steps import step_folder

    for step, found in sorted(metrics.items()):
        try:
            metadata = read_checkpoint(LocalStorage(step_folder(root, step)), step)
        except CheckpointError:  # removed meanwhile
            continue
        size = sum(info.size for info in metadata.files)
        yield StepFacts(step, size, metadata.created, dict(found))
