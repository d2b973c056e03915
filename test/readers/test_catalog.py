"""A catalog says where each tensor lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from paddle_dist_ckpt.readers.assembly import Assembly
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.catalog import Catalog, Piece, StoredChecksum, StoredFile, StoredTensor
from paddle_dist_ckpt.readers.orders import ArrayPart, LyingArray
from paddle_dist_ckpt.readers.window import WindowedFile
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


def test_a_file_that_changes_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3000))
    with WindowedFile(LocalStorage(tmp_path), "file", Budget()) as file:
        for start, stop in ((0, 3001), (-1, 5), (5, 4)):
            with pytest.raises(CheckpointCorruptedError, match=f"it has 3000 bytes, no range {start} to {stop}"):
                file.window(start, stop)
        for position, nbytes in ((2999, 2), (-1, 1), (0, -1)):
            with pytest.raises(CheckpointCorruptedError, match="it has 3000 bytes, so it ends before byte"):
                file.read(position, nbytes)
        assert file.read(2998, 2) == bytes(2)
        os.truncate(tmp_path / "file", 2000)
        with pytest.raises(CheckpointCorruptedError, match="file: it has become shorter than 3000 bytes"):
            file.read(1999, 2)


def lying(box: Box, position: int) -> ArrayPart:
    """A part that lies in the first file."""
    return ArrayPart(box, 0, LyingArray(DTYPES["float32"], box.shape, position))


@pytest.mark.parametrize(
    ("path", "shape", "part", "text"),
    [
        (("w",), (2, -1), None, r"a: 'w' has the shape \[2, -1\]"),
        (("w", 1 << 63), (2,), None, "has a key beyond 64 bits"),
        (("w",), (2, 3), lying(Box((0,), (6,)), 0), "a: 'w' has 2 dimensions, and a part of 1"),
        (("w",), (2,), lying(Box((1,), (2,)), 0), "outside of its shape"),
        (("w",), (2,), lying(Box((0,), (2,)), 93), "a: 'w' has 8 bytes at 93 of a, which has 100"),
        (("w",), (2,), lying(Box((0,), (2,)), -1), "a: 'w' has 8 bytes at -1 of a, which has 100"),
    ],
)
def test_tensors_that_cannot_lie_where_a_format_says_are_refused(
    tmp_path: Path, path: tuple[Any, ...], shape: tuple[int, ...], part: ArrayPart | None, text: str
) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    assembly = Assembly(LocalStorage(tmp_path), ["a"], Budget())
    assert assembly.file("a", "it") == 0
    with pytest.raises((CheckpointCorruptedError, UnsupportedValueError), match=text):
        assembly.add_tensor("a", path, DTYPES["float32"], shape, None, [] if part is None else [part])
    assembly.add_tensor("a", ("fits",), DTYPES["float32"], (2,), None, [lying(Box((0,), (2,)), 92)])
