"""Tensors as Hugging Face lays them out: one safetensors file, or several with an index.

The format is that of https://github.com/huggingface/safetensors; the names of files and the index are those of
transformers' ``save_pretrained``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ..errors import UnsupportedValueError
from ..files.header import EntryRecord, entries_text
from .plan import ExportFile, ExportTensor, fill_files

__all__ = ["plan_safetensors"]

_ALIGNMENT = 4096  # of the first tensor, so that windows can be written past the page cache
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
_RESERVED = "__metadata__"
_METADATA = {"format": "pt"}  # which transformers asks for; it says nothing about the tensors


def plan_safetensors(tensors: Sequence[ExportTensor], most: int, stem: str, of_torch: bool) -> list[ExportFile]:
    """The files of an export in safetensors format.

    Args:
        tensors: What to write; no two of one key.
        most: The most bytes of tensors in a file, if it has more than one.
        stem: What the files' names begin with.
        of_torch: Whether they say that they are in the format of torch.

    Returns:
        The data files, and last, if there are several, the index.

    Raises:
        UnsupportedValueError: the format has no such element type or name, or a header would be too long.
    """
    for tensor in tensors:
        if tensor.dtype.view_items != 1:
            raise UnsupportedValueError(f"{tensor.key}: safetensors has no element type {tensor.dtype.name}")
        if tensor.key == _RESERVED:
            raise UnsupportedValueError(f"safetensors keeps the name {_RESERVED!r} for itself; a tensor is called so")
    groups = fill_files(tensors, most)
    if len(groups) == 1:
        return [_file(f"{stem}.safetensors", groups[0], of_torch)]
    names = [f"{stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    weight_map = {tensor.key: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    text = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
    files = [_file(name, group, of_torch) for name, group in zip(names, groups, strict=True)]
    return [*files, ExportFile(f"{stem}.safetensors.index.json", [text])]


def _file(name: str, tensors: Sequence[ExportTensor], of_torch: bool) -> ExportFile:
    # The larger items first, as the safetensors library does it, so that each tensor is aligned to its items.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.key))
    spans = itertools.pairwise(itertools.accumulate((tensor.nbytes for tensor in ordered), initial=0))
    metadata = [(_RESERVED, _METADATA)] if of_torch else []
    records = (
        (tensor.key, EntryRecord(tensor.dtype.safetensors, tensor.shape, span))
        for tensor, span in zip(ordered, spans, strict=True)
    )
    text = b"{" + entries_text(itertools.chain(metadata, records)) + b"}"
    length = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    if length > _MAX_HEADER_BYTES:
        raise UnsupportedValueError(f"{name} needs a header of {length} bytes; {_MAX_HEADER_BYTES} are possible")
    return ExportFile(name, [length.to_bytes(8, "little"), text, b" " * (length - len(text)), *ordered])
