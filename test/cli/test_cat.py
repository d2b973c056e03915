"""``cat``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.cli import contents
from paddle_dist_ckpt.cli.regions import best_along, edges, parse_slice, windows
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.core.layouts import Layout
from test.cli.commands import answer, fails, run, save_model
from test.jobs import data_files, make_array, save_alone

COUNTING = np.arange(60, dtype=np.float32).reshape(10, 6)


def test_a_small_tensor_and_a_slice(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": COUNTING})
    assert run("cat", tmp_path, "model.w") == f"model.w  (10, 6) float32, 240 B\n{COUNTING}\n"
    assert run("cat", tmp_path, "model.w", "--slice", "2:4,-1").splitlines()[1] == "[17. 23.]"
    assert answer("cat", tmp_path, "model.w", "--slice", "4:6,0")["values"] == [24.0, 30.0]
    assert answer("cat", tmp_path, "model.w")["values"] == COUNTING.tolist()


def test_of_a_large_tensor_the_edges_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(2000 * 300, dtype=np.int32).reshape(2000, 300)
    save_model(tmp_path, {"w": array})
    monkeypatch.setattr("paddle_dist_ckpt.cli.contents.TensorContent.region", None)
    text = run("cat", tmp_path, "model.w", "--slice", "3:,:-1")
    assert text.split("\n", 1)[1] == np.array2string(array[3:, :-1], threshold=5) + "\n"


def test_of_more_items_than_json_is_to_have_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, {"w": COUNTING})
    monkeypatch.setattr("paddle_dist_ckpt.cli.cat._MOST_ITEMS", 12)
    assert answer("cat", tmp_path, "model.w", "--slice", "0:2")["values"] == COUNTING[:2].tolist()
    assert answer("cat", tmp_path, "model.w", "--slice", "0:13,0")["values"] == COUNTING[:, 0].tolist()
    assert answer("cat", tmp_path, "model.w")["values"] is None


def test_statistics(tmp_path: Path) -> None:
    array = np.linspace(-3, 5, 6 << 20, dtype=np.float32).reshape(6, -1)
    array[0, :3] = np.nan, np.inf, -np.inf
    array[5, 7] = 0
    save_model(tmp_path, {"w": array, "c": np.array([3 + 4j, 0], np.complex64), "e": np.zeros((0, 3), np.int8)})
    found = answer("cat", tmp_path, "model.w", "--stats")["stats"]
    finite = array[np.isfinite(array)].astype(np.float64)
    assert (found["elements"], found["nan"], found["infinite"]) == (6 << 20, 1, 2)
    assert found["zero"] == int((finite == 0).sum())
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean())
    assert found["norm"] == pytest.approx(np.linalg.norm(finite))
    assert answer("cat", tmp_path, "model.c", "--stats")["stats"]["max"] == 5
    assert answer("cat", tmp_path, "model.e", "--stats")["stats"]["min"] is None
    assert "nan       1" in run("cat", tmp_path, "model.w", "--stats")


def test_numbers_are_numbers_in_json(tmp_path: Path) -> None:
    arrays = {
        "i": np.array([-(2**63), 2**63 - 1]),
        "u": np.array([0, 2**64 - 1], np.uint64),
        "b": np.array([False, True]),
    }
    save_model(tmp_path, arrays)
    for name in "iu":
        assert answer("cat", tmp_path, f"model.{name}")["values"] == arrays[name].tolist()
        found = answer("cat", tmp_path, f"model.{name}", "--stats")["stats"]
        assert [found["min"], found["max"]] == arrays[name].tolist()
    assert '"min": 0,' in run("cat", tmp_path, "model.b", "--stats", "--json")


def test_values(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": COUNTING}, step=7, large=list(range(3000)), name="text")
    assert run("cat", tmp_path, "step") == "7\n"
    assert run("cat", tmp_path, "name") == "text\n"
    assert answer("cat", tmp_path, "large")["value"] == list(range(3000))
    assert "neither slices nor statistics" in fails("cat", tmp_path, "step", "--stats")


@pytest.mark.filterwarnings("error")
def test_statistics_of_items_whose_squares_are_too_large(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": np.array([1.7e308, 1.7e308, -1.0])})
    found = answer("cat", tmp_path, "model.w", "--stats")["stats"]
    assert (found["max"], found["mean"], found["norm"]) == (1.7e308, "Infinity", "Infinity")


@pytest.mark.filterwarnings("error")
def test_statistics_of_complex_items_whose_magnitude_their_type_does_not_hold(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": np.array([3e38 + 3e38j, 1, complex(np.inf, 0), complex(np.nan, 1)], np.complex64)})
    found = answer("cat", tmp_path, "model.w", "--stats")["stats"]
    assert (found["nan"], found["infinite"], found["min"]) == (1, 1, 1)
    assert found["max"] == pytest.approx(3e38 * 2**0.5)


@pytest.mark.parametrize(("command", "reads"), [(("model.w",), "zeros_of"), (("large",), "read_values")])
def test_a_checkpoint_that_is_replaced_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], reads: str
) -> None:
    save_model(tmp_path, {"w": COUNTING}, 0, large=list(range(3000)))
    plain = getattr(contents, reads)

    def read(*args: Any) -> Any:
        save_model(tmp_path, {"w": COUNTING + 1}, 0, large=[])
        return plain(*args)

    monkeypatch.setattr(contents, reads, read)
    text = fails("cat", tmp_path, *command)
    assert "checkpoint 0 in" in text
    assert "was replaced while it was being read" in text


def test_numbers_that_json_lacks_are_text(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": np.array([np.nan, np.inf, -np.inf, 1], np.float16), "c": np.array([1j], np.complex64)})
    assert answer("cat", tmp_path, "model.w")["values"] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert answer("cat", tmp_path, "model.c")["values"] == ["1j"]


def test_wrong_keys_and_slices(tmp_path: Path) -> None:
    save_model(tmp_path, {"weight": COUNTING}, step=7)
    assert "has no key 'setp'; there are, for example: step\n" in fails("cat", tmp_path, "setp")
    assert "has no key 'model.wieght'; there are, for example: model.weight" in fails("cat", tmp_path, "model.wieght")
    save_alone({r"back\slash": 1}, tmp_path / "escaped")
    assert r"has no key 'back\slash'; there are, for example: back\\slash" in fails(
        "cat", tmp_path / "escaped", r"back\slash"
    )
    asked = fails("inspect", tmp_path / "escaped", r"back\slash")
    assert r"no key of checkpoint 0 matches 'back\slash'; there are, for example: back\\slash" in asked
    for wrong in ("10", "-11", "0,6", "0,0,0", "0,0,0,...", "...,...", "x", "::2", "0,"):
        fails("cat", tmp_path, "model.weight", "--slice", wrong)


def test_damage_is_found(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": COUNTING})
    path = data_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "error: " in fails("cat", tmp_path, "model.w")


def test_a_damaged_value_is_not_shown_or_compared(tmp_path: Path) -> None:
    save_model(tmp_path, {}, large="a" * 10_000)
    (path,) = (path for path in data_files(tmp_path) if b"aaaa" in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaba", 1))
    for command in (("cat", tmp_path, "large"), ("diff", tmp_path, tmp_path)):
        assert "large: " in fails(*command)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (slice(None), slice(None), slice(None))),
        ("0:2,:,-1", (slice(0, 2), slice(None), -1)),
        ("[..., 1:]", (..., slice(1, None))),
        ("-3:-1, 2", (slice(-3, -1), 2)),
        ("3:1", (slice(3, 1),)),
        ("1:99", (slice(1, 99),)),
        ("-9:2", (slice(-9, 2),)),
        ("...", (...,)),
        ("0, ..., 5", (0, ..., 5)),
        ("1, 2, 3, ...", (1, 2, 3, ...)),
        ("3, -5", (3, -5)),
    ],
)
def test_slices_are_those_of_numpy(text: str, expected: tuple[object, ...]) -> None:
    array = np.arange(120).reshape(4, 5, 6)
    box, kept = parse_slice(text, array.shape)
    found = array[box.slices]
    assert np.array_equal(found.reshape([found.shape[d] for d in kept]), array[expected])


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1, 1000), (5, 4, 3)])
def test_windows_make_up_the_region(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    box = whole(shape)
    parts = list(windows(box, 8, 64))
    assert all(0 < part.size <= 8 for part in parts)
    found = [array[part.slices].reshape(-1) for part in parts]
    assert np.array_equal(np.concatenate(found) if found else np.empty(0, int), array.reshape(-1))


@pytest.mark.parametrize(
    ("cuts", "most", "along"),
    [
        ([[], list(range(5, 80, 5))], 1600, 1),  # 16 pieces of 400 bytes side by side, of which a window holds four
        ([[], list(range(5, 80, 5))], 1599, 0),
        ([[], list(range(5, 80, 5))], 6400, 0),  # a window is all of it
        ([list(range(1, 20)), [40]], 1600, 0),
        ([list(range(1, 20)), list(range(2, 80, 2))], 1600, 1),
        ([[], []], 6399, 0),
    ],
)
def test_windows_lie_along_the_pieces_of_a_tensor(cuts: list[list[int]], most: int, along: int) -> None:
    layout = Layout.from_cuts((20, 80), cuts)
    assert best_along(layout, 4, most) == along
    assert best_along(Layout((20, 80), layout.boxes), 4, most) == along


def test_edges_are_what_numpy_shows() -> None:
    array = np.arange(9 * 7 * 40).reshape(9, 7, 40)
    small = np.full((7, 7, 7), -1)
    for part, place in edges(whole(array.shape), 3):
        small[Box(place, part.shape).slices] = array[part.slices]
    assert np.array2string(small, threshold=0) == np.array2string(array, threshold=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_statistics_of_types_that_numpy_does_not_know(tmp_path: Path, dtype: str) -> None:
    items = make_array((40, 5), dtype).view(arithmetic_dtype(DTYPES[dtype])).astype(np.float32)
    save_model(tmp_path, {"w": make_array((40, 5), dtype)})
    found = answer("cat", tmp_path, "model.w", "--stats")["stats"]
    finite = items[np.isfinite(items)].astype(np.float64)
    assert (found["nan"], found["infinite"]) == (np.isnan(items).sum(), np.isinf(items).sum())
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["norm"] == pytest.approx(np.linalg.norm(finite))


def test_statistics_of_nothing_finite(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": np.array([np.nan, np.inf, np.nan], np.float32)})
    assert answer("cat", tmp_path, "model.w", "--stats")["stats"] == {
        "elements": 3, "nan": 2, "infinite": 1, "zero": 0, "min": None, "max": None, "mean": None, "norm": None
    }  # fmt: skip


def test_statistics_of_windows_that_are_cut_again_count_each_item_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, {"w": COUNTING})
    monkeypatch.setattr(contents, "WINDOW_BYTES", 16)
    monkeypatch.setattr(contents, "_MOST_WINDOWS", 2)
    found = answer("cat", tmp_path, "model.w", "--stats")["stats"]
    assert (found["elements"], found["zero"], found["min"], found["max"], found["mean"]) == (60, 1, 0, 59, 29.5)
