"""What stands in the pickles of PyTorch: tensors in those of ``torch.save``, descriptions in a `.metadata`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.dtypes import DTYPES
from .checks import counts_of
from .numpy_pickles import NUMPY
from .pickled_values import Built, Lying, Refused, ordered_dict, recorded

__all__ = ["METADATA", "SAVED", "SavedBuffer", "SavedTensor", "TorchDType", "storage_of"]


class TorchDType(NamedTuple):
    """An element type by its name in torch."""

    name: str


class _SavedStorage(NamedTuple):
    """The memory of tensors: its element type (None: bytes), the member that it is, and how many elements it has."""

    dtype: TorchDType | None
    key: str
    size: int


class SavedTensor(NamedTuple):
    """A tensor as a pickle has it: a view of a storage, in elements.

    Attributes:
        key: The storage's member.
        storage_size: How many elements of ``storage_dtype`` the storage has; bytes where that is None.
        storage_dtype: The storage's element type.
        dtype: The tensor's.
        offset: Where in the storage it starts.
        shape: Its shape.
        stride: How far apart neighbours of each dimension are.
        marks: What else is said of it, such as that it is to be conjugated.
    """

    key: str
    storage_size: int
    storage_dtype: TorchDType | None
    dtype: TorchDType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    marks: tuple[str, ...]


class SavedBuffer(Built):
    """An `io.BytesIO`, as extensions of layers have their states: by what is in it."""

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content = Lying(-1, 0, data=b"")

    def build(self, state: Any) -> None:
        """Take the state: the bytes, the position, and attributes of its own, which are none."""
        content, position, more = state
        if type(content) is not Lying or content.form == "text" or type(position) is not int or more is not None:
            raise Refused("has a BytesIO of something else than bytes and a position")
        self.content = content


def storage_of(token: Any) -> Any:
    """What a persistent id stands for."""
    word, dtype, key, _, count = token
    if word != "storage" or not isinstance(dtype, (TorchDType, _Untyped)) or type(key) is not str:
        raise TypeError("a persistent id that is no storage")
    return _SavedStorage(None if isinstance(dtype, _Untyped) else dtype, key, *counts_of([count]))


class _Untyped:
    """The class of storages that hold bytes."""


def _view(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> SavedTensor:
    """A tensor whose storage has a type: ``rest`` is whether it requires a gradient, its hooks, its marks."""
    return _tensor(storage, offset, shape, stride, storage.dtype, rest[2] if len(rest) > 2 else None)


def _view_of_type(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> SavedTensor:
    """A tensor of a type of its own, which stands behind the hooks."""
    return _tensor(storage, offset, shape, stride, rest[2], rest[3] if len(rest) > 3 else None)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any, marks: Any) -> SavedTensor:
    if not isinstance(storage, _SavedStorage) or not isinstance(dtype, TorchDType):
        raise TypeError("a tensor without a storage or a type")
    shape, stride, (start,) = counts_of(shape), counts_of(stride), counts_of([offset])
    if len(shape) != len(stride):
        raise ValueError("a tensor of two numbers of dimensions")
    said = tuple(mark for mark, value in marks.items() if value) if marks else ()
    if any(type(mark) is not str for mark in said):
        raise TypeError("marks that are no names")
    return SavedTensor(storage.key, storage.size, storage.dtype, dtype, start, shape, stride, said)


def _parameter(tensor: Any, *_: Any) -> SavedTensor:
    if not isinstance(tensor, SavedTensor):
        raise TypeError("a parameter that is no tensor")
    return tensor


def _ignored(*_: Any) -> None:
    """For what does not matter here."""


def _member(kind: Any, name: Any) -> None:
    """A member of an enumeration, which does not matter here, as Python 3.11.2 has it (the others call the class)."""
    if kind is not _ignored or type(name) is not str:
        raise Refused("asks for an attribute of something else than an enumeration")


_OTHER_DTYPES = (  # which cannot be held, as messages say of each
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"),
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)
_STORAGES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
_TORCH: dict[str, Any] = {
    **{f"torch.{name}": TorchDType(name) for name in (*DTYPES, *_OTHER_DTYPES)},
    "torch.Size": lambda sizes=(): counts_of(sizes),
    "collections.OrderedDict": ordered_dict,
}
SAVED: dict[str, Any] = {
    **NUMPY,
    **_TORCH,
    **{f"torch.{name}Storage": TorchDType(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _Untyped(),
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_of_type,
    "torch._utils._rebuild_parameter": _parameter,
    "_io.BytesIO": SavedBuffer,
}
"""What a pickle of ``torch.save`` may name."""
_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.0 to 2.2 have a tensor's properties
METADATA: dict[str, Any] = {
    **_TORCH,
    **{
        f"{_DCP}.metadata.{kind}": recorded(kind)
        for kind in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "StorageMeta",
        )
    },
    f"{_DCP}.filesystem._StorageInfo": recorded("_StorageInfo"),
    # The plans of all ranks, `all_local_plans`, which Megatron-LM has left in what it writes:
    **{
        name: recorded(name)
        for name in (
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
            *(f"{_DCP}.planner.{kind}" for kind in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
        )
    },
    f"{_DCP}.planner.WriteItemType": _ignored,
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _ignored,
    f"{_OLD}.TensorProperties": recorded("TensorProperties"),
    f"{_OLD}.MEM_FORMAT_ENCODING": _ignored,
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    "torch.serialization._get_layout": lambda *parts: parts[0],
    **{
        f"{module}.{kind}Path": _ignored  # of the folder that it was written to
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
}
"""What a `.metadata` of torch.distributed.checkpoint may name."""
