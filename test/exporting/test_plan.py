"""Which bytes of an export's files come from where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.exporting.plan import (
    CONVERTED_BYTES,
    ExportFile,
    ExportTensor,
    StoredPart,
    cut_in_windows,
    divide_files,
    fill_files,
)
from test.strategies import examples, shapes


def tensor(nbytes: int, key: str = "t") -> ExportTensor:
    return as_stored(0, key, (nbytes,), "uint8")


def as_stored(row: int, key: str, shape: tuple[int, ...], stored: str, dtype: str | None = None) -> ExportTensor:
    return ExportTensor(f"/{key}", key, shape, DTYPES[dtype or stored], [StoredPart(row, DTYPES[stored])])


@st.composite
def files(draw: st.DrawFn) -> ExportFile:
    parts: list[bytes | ExportTensor] = []
    for i in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            parts.append(bytes(range(draw(st.integers(0, 200)))))
        else:
            dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
            parts.append(as_stored(i, str(i), draw(shapes(most=20)), dtype))
    return ExportFile("file", parts)


@examples(35)
@given(file=files(), most=st.sampled_from([4096, 8192, 1 << 20]))
def test_windows_make_up_the_file(file: ExportFile, most: int) -> None:
    """Every byte comes from where it should: windows filled by numpy are the same as the parts one after the other."""
    rng = np.random.default_rng(0)
    arrays = {
        part.key: rng.integers(0, 256, part.nbytes, np.uint8).view(part.dtype.raw).reshape(part.shape)
        for part in file.parts
        if isinstance(part, ExportTensor)
    }
    expected = b"".join(part if isinstance(part, bytes) else arrays[part.key].tobytes() for part in file.parts)
    found = b""
    for window in cut_in_windows(file, most):
        assert window.start == len(found)
        assert 0 < window.nbytes <= most
        data = bytearray(window.nbytes)
        for start, known in window.known:
            data[start : start + len(known)] = known
        for piece in window.pieces:
            data[piece.start : piece.stop] = arrays[piece.tensor.key][piece.box.slices].tobytes()
        found += bytes(data)
    assert found == expected
    assert file.nbytes == len(expected)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float64"), ("float64", "float16")]
)
def test_what_is_converted_is_cut_in_small_pieces(stored: str, dtype: str) -> None:
    part = as_stored(0, "t", (3000, 1000), stored, dtype)
    windows = cut_in_windows(ExportFile("file", [b"abc", part]))
    sources = [source for window in windows for piece in window.pieces for source in piece.sources()]
    sizes = [source.box.size for source in sources]
    assert sum(sizes) == 3_000_000
    assert max(sizes) * DTYPES[stored].itemsize <= CONVERTED_BYTES


def test_windows_start_at_pages_again_after_a_part_of_odd_size() -> None:
    windows = cut_in_windows(ExportFile("file", [b"abc", tensor(20_000)]), 8192)
    assert [window.start for window in windows] == [0, 8192, 16384]


def test_a_large_tensor_is_cut_and_a_small_one_shares() -> None:
    windows = cut_in_windows(ExportFile("file", [tensor(10, "a"), tensor(5000, "b"), tensor(10, "c")]), 4096)
    assert [[piece.tensor.key for piece in window.pieces] for window in windows] == [["a", "b"], ["b", "c"]]


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([], 10, [[]]),
        ([4, 4, 4], 10, [[4, 4], [4]]),
        ([20, 1, 30], 10, [[20], [1], [30]]),
        ([10, 10], 10, [[10], [10]]),
        ([0, 0, 11], 10, [[0, 0], [11]]),
    ],
)
def test_files_are_filled_in_order(sizes: list[int], most: int, groups: list[list[int]]) -> None:
    found = fill_files([tensor(size) for size in sizes], most)
    assert [[one.nbytes for one in group] for group in found] == groups


def test_files_are_divided_by_size() -> None:
    assert divide_files([5, 9, 4, 1], 2) == [[1, 3], [0, 2]]
    assert divide_files([5], 3) == [[0], [], []]
