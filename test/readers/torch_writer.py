"""Writes checkpoints as torch.distributed.checkpoint does, without torch, and wrong ones as it does not."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DCP", "DTYPES", "Call", "DCPWriter", "Global", "Outside", "pickled", "saved", "tensor"]

DCP = "torch.distributed.checkpoint"
DTYPES = {  # torch's name, the class of its storages, and a numpy dtype of the same size
    "bool": ("BoolStorage", "?"),
    "uint8": ("ByteStorage", "u1"),
    "int8": ("CharStorage", "i1"),
    "int16": ("ShortStorage", "i2"),
    "int32": ("IntStorage", "i4"),
    "int64": ("LongStorage", "i8"),
    "float16": ("HalfStorage", "f2"),
    "bfloat16": ("BFloat16Storage", "u2"),
    "float32": ("FloatStorage", "f4"),
    "float64": ("DoubleStorage", "f8"),
    "complex64": ("ComplexFloatStorage", "c8"),
    "complex128": ("ComplexDoubleStorage", "c16"),
    "uint16": (None, "u2"),
    "uint32": (None, "u4"),
    "uint64": (None, "u8"),
    "float8_e4m3fn": (None, "u1"),
    "float8_e5m2": (None, "u1"),
}


class Global(NamedTuple):
    """What a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Call:
    """What a pickle calls, and the state that it gives to what comes of it."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None


class Outside(NamedTuple):
    """An object that a pickle knows by a persistent id."""

    token: Any


def pickled(value: Any) -> bytes:
    """A pickle; an object that is there several times is memoized."""
    writer = _Pickler()
    writer.write(value)
    return b"\x80\x02" + bytes(writer.out) + b"."


class _Pickler:
    def __init__(self) -> None:
        self.out = bytearray()
        self.memo: dict[int, int] = {}

    def write(self, value: Any) -> None:
        shared = type(value) in (tuple, list, dict, Call)
        if shared and id(value) in self.memo:
            self.out += b"j" + struct.pack("<I", self.memo[id(value)])
            return
        self._write(value)
        if shared and value != ():
            self.memo[id(value)] = len(self.memo)
            self.out += b"r" + struct.pack("<I", self.memo[id(value)])

    def _write(self, value: Any) -> None:
        out = self.out
        if isinstance(value, Global):
            out += b"c" + f"{value.module}\n{value.name}\n".encode()
        elif isinstance(value, Outside):
            self.write(value.token)
            out += b"Q"
        elif isinstance(value, Call):
            self.write(value.function)
            self.write(value.args)
            out += b"R"
            if value.state is not None:
                self.write(value.state)
                out += b"b"
        elif value is None or type(value) is bool:
            out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif type(value) is int:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            out += b"\x8a" + bytes([len(data)]) + data
        elif type(value) is float:
            out += b"G" + struct.pack(">d", value)
        elif type(value) is str:
            text = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(text)) + text
        elif type(value) is bytes:
            self.write(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))
        elif type(value) in (tuple, list):
            out += b"("
            for item in value:
                self.write(item)
            out += b"t" if type(value) is tuple else b"l"
        else:
            out += b"}("
            for key, item in value.items():
                self.write(key)
                self.write(item)
            out += b"u"


def tensor(
    dtype: str,
    shape: tuple[int, ...],
    key: str = "0",
    stride: Any = None,
    offset: int = 0,
    size: Any = None,
    **rest: Any,
) -> Call:
    """A tensor as ``torch.save`` pickles it; ``rest``: ``marks`` and ``device``."""
    name, code = DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64)) if size is None else size
    steps = stride or tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    marks = (rest["marks"],) if "marks" in rest else ()
    hooks = Call(Global("collections", "OrderedDict"))
    if name:
        token = ("storage", Global("torch", name), key, "cpu", count)
        return Call(
            Global("torch._utils", "_rebuild_tensor_v2"), (Outside(token), offset, shape, steps, False, hooks, *marks)
        )
    token = ("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", count * np.dtype(code).itemsize)
    return Call(
        Global("torch._utils", "_rebuild_tensor_v3"),
        (Outside(token), offset, shape, steps, False, hooks, Global("torch", dtype), *marks),
    )


def saved(
    value: Any, *storages: bytes, order: bytes | None = b"little", pickle: bytes | None = None, **how: Any
) -> bytes:
    """A zip of ``torch.save``, of a value or of any pickle; ``how`` goes to :class:`zipfile.ZipFile`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as file:
        file.writestr("archive/data.pkl", pickled(value) if pickle is None else pickle)
        if order is not None:
            file.writestr("archive/byteorder", order)
        for i, data in enumerate(storages):
            file.writestr(f"archive/data/{i}", data)
        file.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def size_of(parts: Any) -> Call:
    """A torch.Size."""
    return Call(Global("torch", "Size"), (tuple(parts),))


@dataclass
class DCPWriter:
    """A checkpoint in the making.

    Attributes:
        files: The data files.
        tensors: What `.metadata` says of keys.
        ranges: Where things are.
        paths: The nested paths of keys.
        old: Whether to spell modules as torch 2.0 does.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    ranges: dict[Any, Any] = field(default_factory=dict)
    paths: Any = None
    old: bool = False

    def describe(self, key: str, dtype: str, shape: Any, chunks: list[tuple[Any, Any]]) -> None:
        """Say of a key what tensor it is."""
        self.tensors[key] = self.record(
            "TensorStorageMetadata",
            properties=self.properties(dtype),
            size=size_of(shape),
            chunks=[self.record("ChunkStorageMetadata", offsets=size_of(o), sizes=size_of(s)) for o, s in chunks],
        )

    def put(self, key: str, at: Any, content: bytes, name: str = "__0_0.distcp", **told: Any) -> None:
        """Add a zip to a file and say where it is."""
        start = len(self.files.get(name, b""))
        self.files[name] = self.files.get(name, b"") + content
        index = {"fqn": key, "index": 0} | ({} if at is None else {"offset": size_of(at)})
        info = {"relative_path": name, "offset": start, "length": len(content), **told}
        self.ranges[self.record("MetadataIndex", **index)] = Call(Global(f"{DCP}.filesystem", "_StorageInfo"), (), info)

    def add(self, key: str, dtype: str, array: np.ndarray, cuts: list[Any] | None = None) -> None:
        """Add a tensor, whole or cut into these slices, one file each."""
        chunks = []
        for i, cut in enumerate(cuts or [tuple(slice(None) for _ in array.shape)]):
            part = array[cut]
            offset = tuple(s.indices(n)[0] for s, n in zip(cut, array.shape, strict=True))
            chunks.append((offset, part.shape))
            self.put(key, offset, saved(tensor(dtype, part.shape), part.tobytes()), f"__{i}_0.distcp")
        self.describe(key, dtype, array.shape, chunks)

    def add_value(self, key: str, value: Any, *storages: bytes) -> None:
        """Add what is no tensor."""
        self.tensors[key] = self.record("BytesStorageMetadata")
        self.put(key, None, saved(value, *storages))

    def record(self, kind: str, **state: Any) -> Call:
        """An object of one of the classes of `.metadata`."""
        return Call(Global(f"{DCP}.metadata", kind), (), state or None)

    def properties(self, dtype: str) -> Call:
        """A tensor's properties."""
        module = "torch.distributed._shard.sharded_tensor.metadata" if self.old else f"{DCP}.metadata"
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        encoding = Call(Global(module, "MEM_FORMAT_ENCODING" if self.old else "_MEM_FORMAT_ENCODING"), (0,))
        state = (Global("torch", dtype), layout, False, encoding, False)
        return Call(Global(module, "TensorProperties"), (), state)

    @property
    def metadata(self) -> bytes:
        """The content of `.metadata`."""
        newer = {} if self.old else {"storage_meta": self.record("StorageMeta"), "version": "1.0.0"}
        return pickled(
            self.record(
                "Metadata", state_dict_metadata=self.tensors, planner_data=self.paths, storage_data=self.ranges, **newer
            )
        )

    @property
    def all_files(self) -> dict[str, bytes]:
        """All files."""
        return {**self.files, ".metadata": self.metadata}
