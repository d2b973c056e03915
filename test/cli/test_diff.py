"""``diff``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_dist_ckpt.cli import comparison, matching
from paddle_dist_ckpt.cli.comparison import ComparisonFacts, compare_together
from paddle_dist_ckpt.cli.differences import compare_items
from paddle_dist_ckpt.cli.matching import Side
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.cli.commands import answer, fails, run, save_model
from test.jobs import all_ok, data_files, make_array, save_on
from test.readers.test_torch_dcp import conjugate
from test.readers.torch_writer import DCPWriter
from test.torture.crafting import Entry, write_checkpoint

DTYPE_NAMES = ("bfloat16", "float8_e4m3fn", "bool", "int64", "complex64", "complex128", "float64", "uint8")
ARRAYS = {name: make_array((40, 50), name) for name in DTYPE_NAMES} | {
    "empty": np.zeros((0, 3), np.int8),
    "scalar": np.array(7.5),
    "w": np.arange(2000, dtype=np.float32).reshape(50, 40),
}


def changed(**arrays: Any) -> dict[str, Any]:
    return {**ARRAYS, **arrays}


def test_equal_however_they_are_cut(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS, 1, step=7, nan=float("nan"), large=list(range(3000)))
    save_on([{"model": ARRAYS, "step": 7, "nan": float("nan"), "large": list(range(3000))}], tmp_path / "b")
    found = answer("diff", tmp_path / "a", tmp_path / "b")
    assert found["equal"]
    assert found["same"] == len(ARRAYS) + 3
    assert (found["a"]["unique_id"], found["b"]["unique_id"]) == (1, 0)
    assert "equal: 14 keys" in run("diff", tmp_path / "a", tmp_path / "b")


def test_keys_that_are_not_read_are_no_equal_ones(tmp_path: Path) -> None:
    writer = DCPWriter()
    conjugate(writer)
    writer.describe("w", "float32", (4, 6), [((0, 0), (4, 6))])
    writer.add_value("n", 5, b"")
    (tmp_path / "a").mkdir()
    for name, content in writer.all_files.items():
        (tmp_path / "a" / name).write_bytes(content)
    save_on([{"n": 5}], tmp_path / "b")
    save_on([{"n": 5, "w": np.zeros((4, 6), np.float32)}], tmp_path / "c")
    for other in ("a", "b", "c"):
        found = answer("diff", tmp_path / "a", tmp_path / other, code=1)
        assert (found["equal"], found["same"], found["only_in_b"]) == (False, 1, [])
        assert "conj" in found["unread_in_a"]["w"]
        assert list(found["unread_in_b"]) == (["w"] if other == "a" else [])
    said = run("diff", tmp_path / "b", tmp_path / "a", code=1)
    assert "not read in b: w: " in said
    assert "1 equal, 0 different, 0 only in a, 0 only in b, 1 not read" in said
    assert answer("diff", tmp_path / "a", tmp_path / "b", "n")["equal"]
    for one, other, side in (("a", "b", "unread_in_a"), ("b", "a", "unread_in_b")):
        assert list(answer("diff", tmp_path / one, tmp_path / other, "w", code=1)[side]) == ["w"]
    prefixes = ("--prefix-a", "x", "--prefix-b", "x")
    assert "a is below the prefix 'x'\n" in fails("diff", tmp_path / "a", tmp_path / "a", *prefixes)
    assert re.search("w of checkpoint 0 is not read: .*conj", fails("cat", tmp_path / "a", "w"))
    assert re.search("w is not read: .*conj", fails("merge", tmp_path / "a", tmp_path / "out", "--key", "w"))


def test_everything_that_differs_is_named(tmp_path: Path) -> None:
    items = ARRAYS["w"].copy()
    items[3, 4] += 2
    items[49, 39] = np.nan
    save_model(tmp_path, changed(gone=np.zeros(3), shape=np.zeros((2, 3)), dtype=np.ones(3, np.float32)), 1, n=1, v="x")
    save_model(tmp_path, changed(new=np.zeros(3), shape=np.zeros((3, 2)), dtype=np.ones(3), w=items), 2, n=True, v="x")
    found = answer("diff", tmp_path, tmp_path, "--id-a", 1, "--id-b", 2, code=1)
    assert not found["equal"]
    assert (found["only_in_a"], found["only_in_b"]) == (["model.gone"], ["model.new"])
    assert found["values"] == [{"key": "n", "a": 1, "b": True}]
    tensors = {tensor["key"].removeprefix("model."): tensor for tensor in found["tensors"]}
    assert list(tensors) == ["dtype", "shape", "w"]
    assert tensors["shape"]["shapes"] == [[2, 3], [3, 2]]
    assert tensors["shape"]["elements"] is None
    assert (tensors["dtype"]["dtypes"], tensors["dtype"]["differing"]) == (["float32", "float64"], 0)
    assert (tensors["dtype"]["max_abs"], tensors["dtype"]["max_rel"], tensors["dtype"]["nan"]) == (0, 0, [0, 0])
    assert tensors["w"] == {
        "key": "model.w",
        "shapes": [[50, 40], [50, 40]],
        "dtypes": ["float32", "float32"],
        "elements": 2000,
        "differing": 2,
        "max_abs": 2.0,
        "max_rel": pytest.approx(2 / 126),
        "nan": [0, 1],
    }
    assert found["same"] == len(ARRAYS) - 1 + 1
    text = run("diff", tmp_path, tmp_path, "--id-a", 1, "--id-b", 2, code=1)
    for line in ("only in a: model.gone", "only in b: model.new", "value: n: 1 | True"):
        assert line in text
    assert [re.split(" {2,}", line) for line in text.splitlines() if " of " in line] == [
        ["model.dtype", "float32 | float64", "0 of 3", "0", "0"],
        ["model.w", "float32", "2 of 2,000", "2", "0.0159", "0 | 1"],
    ]
    assert text.count("\nshape: ") == 1
    assert text.endswith(f"{len(ARRAYS)} equal, 4 different, 1 only in a, 1 only in b\n")
    assert "shape: model.shape: (2, 3) float64 | (3, 2) float64" in text


def test_a_part_by_pattern_and_prefix(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS, n=1, models={"w": 1})
    save_on([{**changed(w=ARRAYS["w"] + 1)}], tmp_path / "b")
    sides = (tmp_path / "a", tmp_path / "b", "--prefix-a", "model")
    found = answer("diff", *sides, code=1)
    assert [tensor["key"] for tensor in found["tensors"]] == ["w"]
    assert (found["same"], found["only_in_a"], found["only_in_b"]) == (len(ARRAYS) - 1, [], [])
    found = answer("diff", *sides[:2], code=1)
    ours, theirs = [*(f"model.{key}" for key in sorted(ARRAYS)), "models.w", "n"], sorted(ARRAYS)
    assert (found["same"], found["only_in_a"], found["only_in_b"]) == (0, ours, theirs)
    assert answer("diff", *sides, "bfloat*")["same"] == 1
    assert "neither checkpoint has a key" in fails("diff", *sides, "nothing")
    said = fails("diff", *sides[:2], "--prefix-a", "model.")
    assert f"in {tmp_path}/a is below the prefix 'model.'; a prefix ends without a dot: 'model'" in said
    assert f"in {tmp_path}/b is below the prefix 'mod'\n" in fails("diff", *sides, "--prefix-b", "mod")
    for one, other, side in (("a", "b", "only_in_a"), ("b", "a", "only_in_b")):
        found = answer("diff", tmp_path / one, tmp_path / other, "models", code=1)
        assert (found["equal"], found[side]) == (False, ["models.w"])


def test_a_tensor_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.cli.comparison._BATCH_BYTES", 1000)
    items = ARRAYS["w"].copy()
    items[::10] += np.arange(5, dtype=np.float32)[:, None] ** 2
    items[1::10, 0] = np.nan
    save_model(tmp_path, ARRAYS, 1)
    save_model(tmp_path, changed(w=items), 2)
    for ids, nan in (((1, 2), [0, 5]), ((2, 1), [5, 0])):
        (tensor,) = answer("diff", tmp_path, tmp_path, "--id-a", ids[0], "--id-b", ids[1], code=1)["tensors"]
        assert (tensor["key"], tensor["differing"], tensor["max_abs"]) == ("model.w", 165, 16.0)
        assert (tensor["max_rel"], tensor["nan"]) == (pytest.approx(4 / 404), nan)


def test_element_types_are_compared_by_value(tmp_path: Path) -> None:
    items = (ARRAYS["w"] + 1) / 3
    save_model(tmp_path, {"w": items, "half": np.array([0.5, np.nan])}, 1)
    cast = {"w": items.astype(ARRAYS["bfloat16"].dtype), "half": np.array([0.5, np.nan], np.float32)}
    save_model(tmp_path, cast, 2)
    half, tensor = answer("diff", tmp_path, tmp_path, "--id-a", 1, code=1)["tensors"]
    assert (half["differing"], half["max_abs"], half["max_rel"], half["nan"]) == (0, 0, 0, [1, 1])
    assert tensor["dtypes"] == ["float32", "bfloat16"]
    assert 0 < tensor["max_rel"] <= 2**-8


def test_of_single_files_the_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": ARRAYS["w"]}, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found = answer("diff", "a.safetensors", "b.safetensors")
    assert [found[side]["path"] for side in "ab"] == [f"{tmp_path}/a.safetensors", f"{tmp_path}/b.safetensors"]
    assert found["equal"]


def test_a_tensor_here_and_a_value_there(tmp_path: Path) -> None:
    save_model(tmp_path, {"w": np.zeros((2, 3))}, 1, large=list(range(3000)))
    save_on([{"model": {"w": 7}, "large": list(range(3000))}], tmp_path, 2)
    found = answer("diff", tmp_path, tmp_path, "--id-a", 1, code=1)
    tensor = "a tensor of shape (2, 3), float64"
    assert (found["values"], found["same"]) == ([{"key": "model.w", "a": tensor, "b": 7}], 1)
    found = answer("diff", tmp_path, tmp_path, "--id-b", 1, code=1)
    assert (found["values"], found["same"]) == ([{"key": "model.w", "a": 7, "b": tensor}], 1)
    save_on([{"model": {"w": tensor}, "large": list(range(3000))}], tmp_path, 3)
    for ids in (("--id-a", 1), ("--id-b", 1)):
        assert not answer("diff", tmp_path, tmp_path, *ids, code=1)["equal"]


def test_values_that_look_alike_are_told_apart_by_their_types(tmp_path: Path) -> None:
    save_model(tmp_path / "a", {}, n=1, s="x", listed=[1.5])
    save_model(tmp_path / "b", {}, n=np.int64(1), s=np.str_("x"), listed=[1.5])
    text = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "value: n: 1 (int) | 1 (int64)\n" in text
    assert "value: s: 'x' (str) | 'x' (str_)\n" in text
    assert "listed" not in text


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS)
    assert "there is no folder" in fails("diff", tmp_path / "a", tmp_path / "b")
    save_model(tmp_path / "b", ARRAYS)
    path = data_files(tmp_path / "b")[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "checksum" in fails("diff", tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([0.0], [-0.0], (1, 0.0, 0.0, 0, 0)),
        ([np.inf, 1], [np.inf, 2], (1, 1.0, 0.5, 0, 0)),
        ([np.inf], [1.0], (1, np.inf, np.inf, 0, 0)),
        ([np.nan], [np.nan], None),
        ([np.nan, 4], [1, 1], (2, 3.0, 0.75, 1, 0)),
        ([1.0], [np.nan], (1, 0.0, 0.0, 0, 1)),
    ],
)
def test_how_far_items_are_apart(a: list[float], b: list[float], expected: tuple[float, ...] | None) -> None:
    raw = [np.array(items, np.float32).view("<u4") for items in (a, b)]
    with np.errstate(all="raise"):  # what numpy warns of would be told among the command's own lines
        found = compare_items(3, raw[0], DTYPES["float32"], raw[1], DTYPES["float32"])
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.differing, found.max_abs, found.max_rel, found.nan_a, found.nan_b) == expected


def test_complex_items_are_apart_in_both_of_their_parts() -> None:
    raw = [np.array(items, np.complex64).view(DTYPES["complex64"].raw) for items in ([3 + 4j, 1], [3 - 4j, 1])]
    found = compare_items(0, raw[0], DTYPES["complex64"], raw[1], DTYPES["complex64"])
    assert found is not None
    assert (found.differing, found.max_abs, found.max_rel) == (1, 8.0, 1.6)


def test_large_integers_are_apart_by_what_lies_between_them() -> None:
    for name, items in (("int64", [2**53 + 1, -(2**63)]), ("uint64", [2**53 + 1, 2**64 - 1])):
        numbers = np.array(items, name)
        raw = [numbers.view("<u8"), (numbers - np.array([1, 0], name)).view("<u8")]
        found = compare_items(0, raw[0], DTYPES[name], raw[1], DTYPES[name])
        assert found is not None
        assert (found.differing, found.max_abs) == (1, 1.0)
        floats = numbers.astype(np.float64).view("<u8")  # of which the first is one less
        found = compare_items(0, raw[0][:1], DTYPES[name], floats[:1], DTYPES["float64"])
        assert found is not None
        assert (found.differing, found.max_abs) == (1, 1.0)


def test_items_of_other_types_differ_in_value_whatever_their_bits() -> None:
    items = np.array([1.0, np.nan, np.nan, 2.0], np.float32)
    found = compare_items(0, items.view("<u4"), DTYPES["float32"], items.view("<u4"), DTYPES["int32"])
    assert found is not None
    assert found.differing == 4
    wide = np.array([1.0, np.nan, 3.0, np.nan]).view("<u8")
    found = compare_items(0, items.view("<u4"), DTYPES["float32"], wide, DTYPES["float64"])
    assert found is not None
    assert (found.differing, found.max_abs, found.nan_a, found.nan_b) == (2, 0.0, 2, 2)


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "a", {"w": ARRAYS["w"]}, 0)
    save_model(tmp_path / "b", {"w": ARRAYS["w"]}, 0, large=list(range(3000)))
    for module, name, replaced in ((comparison, "_compare_regions", "a"), (matching, "leaf_values", "b")):
        plain = getattr(module, name)

        def read(*args: Any, plain: Any = plain, replaced: str = replaced) -> Any:
            save_model(tmp_path / replaced, {"w": ARRAYS["w"]}, 0)
            return plain(*args)

        save_model(tmp_path / "a", {"w": ARRAYS["w"]}, 0, large=0)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, read)
            text = fails("diff", tmp_path / "a", tmp_path / "b")
        assert "was replaced while it was being read" in text


@pytest.mark.parametrize("shape", [[1 << 20], [0, 3]])
def test_holes_and_nothing_of_other_types_differ_in_the_type_alone(tmp_path: Path, shape: list[int]) -> None:
    for name, dtype in (("a", "float32"), ("b", "uint8")):
        write_checkpoint(tmp_path / name, {"/w": Entry(shape, [[]] * len(shape), dtype)})
    (tensor,) = answer("diff", tmp_path / "a", tmp_path / "b", code=1)["tensors"]
    assert tensor["dtypes"] == ["float32", "uint8"]
    assert (tensor["elements"], tensor["differing"], tensor["max_abs"]) == (int(np.prod(shape)), 0, 0)
    assert answer("diff", tmp_path / "a", tmp_path / "a")["same"] == 1


def test_a_hole_is_not_what_others_have_written_there(tmp_path: Path) -> None:
    both, written = {"/both": Entry([1 << 16], [[]])}, np.ones(1 << 16, np.float32).tobytes()
    write_checkpoint(tmp_path / "a", {**both, "/w": Entry([1 << 16], [[]])})
    write_checkpoint(tmp_path / "b", {**both, "/w": Entry([1 << 16], [[]], data=written)})
    for one, other in (("a", "b"), ("b", "a")):
        found = answer("diff", tmp_path / one, tmp_path / other, code=1)
        (tensor,) = found["tensors"]
        assert (found["same"], tensor["key"], tensor["differing"], tensor["max_abs"]) == (1, "w", 1 << 16, 1)


@pytest.mark.parametrize("sizes", [[], [5], [1] * 20, [9, 1, 1, 1, 9, 1, 1], [1000, 1, 1000, 1000]])
def test_ranks_have_neighbours_of_about_equally_many_bytes_and_read_few_together(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_BATCH_BYTES", 10)
    monkeypatch.setattr(comparison, "_BATCH_WINDOWS", 4)
    regions = comparison._Regions(np.arange(len(sizes)), [whole((n,)) for n in sizes], np.array(sizes, np.int64))
    shares = [regions.share(3, rank) for rank in range(3)]
    assert [i for share in shares for i in share.tensor] == list(range(len(sizes)))
    for share in shares:
        assert int(share.nbytes.sum()) <= sum(sizes) / 3 + max(sizes, default=0)
        assert [box.size for box in share.boxes] == share.nbytes.tolist()
        batches = list(share.batches())
        assert [i for batch in batches for i in batch] == list(range(len(share.boxes)))
        totals = [sum(share.nbytes[batch.start : batch.stop]) for batch in batches]
        for total, batch in zip(totals, batches, strict=True):
            assert len(batch) == 1 or (total <= 10 and len(batch) <= 4)
            if batch.stop < len(share.boxes):  # nor are there fewer than fit
                assert len(batch) == 4 or total + share.nbytes[batch.stop] > 10


@pytest.mark.parametrize(("args", "said"), [((), ""), (("1 byte",), ": 1 byte")])
def test_memory_that_is_short_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    def lack(*_: Any) -> Any:
        raise MemoryError(*args)

    save_model(tmp_path, {"w": ARRAYS["w"]}, step=7)
    monkeypatch.setattr(matching, "leaf_values", lack)
    assert fails("diff", tmp_path, tmp_path) == f"error: not enough memory{said} (--debug shows where)\n"


def test_ranks_compare_together(tmp_path: Path) -> None:
    array = ARRAYS["w"].copy()
    array[[0, 49], :3] = np.nan
    save_model(tmp_path / "a", ARRAYS)
    save_model(tmp_path / "b", changed(w=array))

    def work(rank: SimulatedRank) -> list[ComparisonFacts]:
        with rank.hub.session("diff", 60) as session:
            one, other = (Side(LocalStorage(tmp_path / name), None) for name in ("a", "b"))
            return compare_together(session, one, other, None, False)

    (first,), *others = all_ok(run_ranks(3, work))
    assert others == [[], []]
    (tensor,) = first.tensors
    assert (tensor.key, tensor.differing, first.same) == ("model.w", 6, len(ARRAYS) - 1)
