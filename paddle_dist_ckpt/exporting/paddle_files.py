"""Checkpoints as Paddle itself writes them: ``dist.save_state_dict`` of 3.3, and ``paddle.save``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..core.shards import Kind
from ..errors import UnsupportedValueError
from ..tree.building import build_tree
from ..tree.paths import Part, parent_of, parse_path, plain_key
from .pickles import Instance, Pairs, Template, pickled
from .plan import ExportFile, ExportTensor, fill_files

__all__ = ["plan_paddle", "plan_pdparams"]

_MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_NAMES = "StructuredToParameterName@@"  # where data files keep the variables' names
_OF_ARRAYS = ("uint16", "uint32", "uint64")  # element types of which Paddle has no tensors
_RESERVED = (_NAMES, "UnpackBigParamInfor@@")  # the latter where files of old protocols say what is in slices


def plan_paddle(tensors: Sequence[ExportTensor], most: int) -> list[ExportFile]:
    """Data files of whole tensors, as if each were of one rank, and last the metadata.

    Raises:
        UnsupportedValueError: the format has no such element type or keeps the key for itself, or a tensor's path has
            more than str keys.
    """
    for tensor in tensors:
        _check_name(tensor.key, tensor.key)
        if tensor.dtype.name in _OF_ARRAYS:
            raise UnsupportedValueError(f"{tensor.key}: Paddle's files cannot hold tensors of {tensor.dtype.name}")
    groups = fill_files(tensors, most)
    names = [f"{rank}_0.distcp" for rank in range(len(groups))]
    every = list(itertools.chain.from_iterable(groups))
    metadata = Instance(
        _MODULE,
        "Metadata",
        {
            "state_dict_metadata": Pairs((tensor.key, _local_metadata(tensor)) for tensor in every),
            "storage_metadata": Pairs(
                (_index(tensor), name) for name, group in zip(names, groups, strict=True) for tensor in group
            ),
            "flat_mapping": Pairs((tensor.key, _parts_of(tensor)) for tensor in every),
        },
    )
    files = [ExportFile(name, pickled(_named(group))) for name, group in zip(names, groups, strict=True)]
    return [*files, ExportFile("0.metadata", pickled(metadata))]


def _named(tensors: Sequence[ExportTensor]) -> Pairs:
    """The content of a data file. Paddle makes tensors of those arrays alone that have a variable's name."""
    names = Pairs((tensor.key, tensor.name or tensor.key) for tensor in tensors)
    return Pairs(itertools.chain(((tensor.key, tensor) for tensor in tensors), [(_NAMES, names)]))


def _local_metadata(tensor: ExportTensor) -> Template:
    """What is said of the parts of a tensor, of which there is one."""

    def make() -> list[Instance]:
        state = {
            "global_offset": (0,) * len(tensor.shape),
            "local_shape": tensor.shape,
            "dtype": tensor.dtype.name,
            "global_shape": tensor.shape,
            "is_flattened": False,
            "flattened_range": None,
        }
        return [Instance(_MODULE, "LocalTensorMetadata", state)]

    return Template(f"parts {tensor.dtype.name} {tensor.shape}".encode(), make)


def _index(tensor: ExportTensor) -> Instance:
    def make() -> dict[str, Any]:
        return {
            "global_offset": (0,) * len(tensor.shape),
            "is_flattened": False,
            "flattened_range": None,
            "replica_id": None,
            "local_shape": tensor.shape,
        }

    common = Template(f"index {tensor.shape}".encode(), make)
    return Instance(_MODULE, "LocalTensorIndex", {"tensor_key": tensor.key}, common)


def _parts_of(tensor: ExportTensor) -> tuple[str, ...]:
    parts = parse_path(tensor.path)
    names = tuple(part for part in parts if isinstance(part, str))
    if len(names) < len(parts):
        raise UnsupportedValueError(f"{tensor.key}: Paddle's checkpoints have dicts with str keys only")
    return names


def _check_name(key: str, name: Part) -> None:
    """Refuse a name in a file's dict that Paddle, and whoever reads its files, uses for something else: what has it
    would be lost."""
    if name in _RESERVED:
        raise UnsupportedValueError(f"{key}: Paddle's files keep the name {name!r} for themselves")


def _check_no_bytes(path: str, value: Any) -> None:
    """Refuse a value that has byte strings, for which ``paddle.load`` refuses the whole file."""
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, bytes):
        raise UnsupportedValueError(f"{plain_key(path)}: bytes are not loaded by Paddle; store them as a numpy array")
    for item in items:
        _check_no_bytes(path, item)


def plan_pdparams(tensors: Sequence[ExportTensor], values: Sequence[tuple[str, Any]], name: str) -> list[ExportFile]:
    """One file with the nested state_dict, which ``paddle.load`` reads.

    Args:
        tensors: What to write.
        values: Path and value of what is no tensor.
        name: The file's name.

    Raises:
        UnsupportedValueError: the format has no such element type or keeps a name for itself, or a value is no plain
            one.
    """
    for tensor in tensors:
        _check_name(tensor.key, parse_path(tensor.path)[0])
    for path, value in values:
        _check_name(plain_key(path), parse_path(path)[0])
        _check_no_bytes(path, value)
    # As Paddle does it: of a file with a pair of name and array, the pairs become tensors and other arrays stay arrays.
    # An array of bfloat16, which Paddle writes as uint16, would be one of integers then.
    arrays = {tensor.path for tensor in tensors if tensor.kind == Kind.ARRAY or tensor.dtype.name in _OF_ARRAYS}
    # An array behind a text in a tuple of two would be a tensor of that name, and the text would be lost.
    texts = {parent_of(path) for path, value in values if path.endswith("/~t0") and isinstance(value, str)}
    paths = [*(tensor.path for tensor in tensors), *(path for path, _ in values)]
    for pair in [parent for parent in texts if f"{parent}/~t1" in arrays]:
        if not any(path.startswith(f"{pair}/~t2") for path in paths):
            arrays.remove(f"{pair}/~t1")
    has_pairs = len(arrays) < len(tensors)
    if has_pairs:
        arrays -= {tensor.path for tensor in tensors if tensor.dtype.name == "bfloat16"}
    for tensor in tensors:
        if tensor.dtype.name in _OF_ARRAYS and not (has_pairs and tensor.path in arrays):
            raise UnsupportedValueError(
                f"{tensor.key}: Paddle would make a tensor of it, and has none of {tensor.dtype.name}; beside a "
                "tensor, and not behind a text in a tuple of two, it would stay an array"
            )
    leaves = [
        (tensor.path, tensor if tensor.path in arrays else (tensor.name or tensor.key, tensor)) for tensor in tensors
    ]
    return [ExportFile(name, pickled(build_tree([*leaves, *values])))]
