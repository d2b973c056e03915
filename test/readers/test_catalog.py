"""A catalog says where each tensor lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.readers.catalog import Catalog, Piece, StoredChecksum, StoredFile, StoredTensor
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing.catalogs import read_catalog


def test_tensors_are_read_from_where_it_says_that_they_lie(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    (tmp_path / "a").write_bytes(b"..." + array[:, :2].tobytes())
    (tmp_path / "b").write_bytes(array[:, 2:].tobytes())
    pieces = [Piece(Box((0, 0), (4, 2)), 0, 3), Piece(Box((0, 2), (4, 4)), 1, 0)]
    catalog = Catalog(
        format="test",
        unique_id=0,
        world_size=2,
        files=[StoredFile("a", 35), StoredFile("b", 64)],
        tensors=[StoredTensor(("model", "w"), DTYPES["float32"], (4, 6), "linear_0.w_0", pieces)],
        checksums=[StoredChecksum(1, 0, 64, 0)],
    )
    found = read_catalog(LocalStorage(tmp_path), catalog)
    assert list(found) == ["model.w"]
    assert np.array_equal(found["model.w"].view(np.float32), array)
