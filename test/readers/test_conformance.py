"""The conformance suite passes a reader that reads a file as a whole."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError
from paddle_dist_ckpt.readers.catalog import Catalog, Piece, StoredFile, StoredTensor
from paddle_dist_ckpt.storage.base import Storage
from paddle_dist_ckpt.testing.reader_conformance import ForeignCheckpoint, ReaderTests

_NAME, _BEGIN, _MOST = "numbers.raw", b"RAW1", 1 << 20


class WholeFiles:
    """Reads float32 behind four bytes."""

    format, title = "raw", "raw numbers"

    def found(self, names: Collection[str]) -> list[int]:
        return [0] if _NAME in names else []

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        if unique_id not in self.found(names):
            raise CheckpointNotFoundError("there is none")
        try:
            data = storage.read(_NAME, _MOST)
        except FileNotFoundError:
            raise CheckpointCorruptedError(f"{_NAME} is missing") from None
        if not data.startswith(_BEGIN) or len(data) % 4 or len(data) == _MOST:
            raise CheckpointCorruptedError(f"{_NAME} is none of these")
        shape = (len(data) // 4 - 1,)
        tensor = StoredTensor(("w",), DTYPES["float32"], shape, None, [Piece(whole(shape), 0, len(_BEGIN))])
        return Catalog(self.format, 0, 1, [StoredFile(_NAME, len(data))], [tensor])


class TestWholeFiles(ReaderTests):
    @pytest.fixture
    def reader(self) -> WholeFiles:
        return WholeFiles()

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        array = np.arange(50, dtype=np.float32)
        return ForeignCheckpoint({_NAME: _BEGIN + array.tobytes()}, {"w": array})
