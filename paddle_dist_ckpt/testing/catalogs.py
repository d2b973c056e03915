"""Reads tensors straight from where a catalog says that they lie, for tests of readers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..readers.catalog import Catalog
from ..storage.base import Storage
from ..tree.paths import flat_keys, format_path

__all__ = ["read_catalog"]


def read_catalog(storage: Storage, catalog: Catalog) -> dict[str, npt.NDArray[Any]]:
    """Each tensor by its flat key, as raw items of its element type (:attr:`DType.raw`).

    Raises:
        AssertionError: pieces overlap, or are not the whole tensor.
    """
    keys = flat_keys([format_path(tensor.path) for tensor in catalog.tensors])
    arrays = {}
    for key, tensor in zip(keys, catalog.tensors, strict=True):
        array = np.zeros(tensor.shape, tensor.dtype.raw)
        times = np.zeros(tensor.shape, np.uint8)
        for piece in tensor.pieces:
            data = np.zeros(piece.box.size * tensor.dtype.itemsize, np.uint8)
            file = storage.open(catalog.files[piece.file].name)
            try:
                file.read_into([data], piece.position)
            finally:
                file.close()
            array[piece.box.slices] = data.view(tensor.dtype.raw).reshape(piece.box.shape)
            times[piece.box.slices] += 1
        assert bool((times == 1).all()), f"{key}: its pieces do not make up the tensor, each part once"
        arrays[key] = array
    return arrays
