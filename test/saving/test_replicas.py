"""Plain tensors and values that several ranks have, and partial tensors, whose addends are reduced."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import RankFailureError, StateDictMismatchError, UnsupportedValueError
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.reports import SaveReport
from paddle_dist_ckpt.saving import present, rank_files, reduce
from paddle_dist_ckpt.saving.async_save import AsyncSave
from paddle_dist_ckpt.saving.describe import LocalState
from paddle_dist_ckpt.testing import NumpyAdapter, ShardedArray, SimulatedRank, run_ranks
from test.jobs import (
    all_ok,
    blank_like,
    data_files,
    errors_of,
    everything,
    laid_out,
    load_on,
    load_whole,
    make_array,
    rows_of,
    same_bits,
    save_on,
    sharded,
    try_load,
    try_save,
)
from test.strategies import some


def differing_states() -> list[dict[str, Any]]:
    array = make_array((50, 50), "int32")
    return [
        {
            "same": array,
            "local": array + rank,
            "n": rank,
            "m": 1,
            "text": "x" * (6000 + rank),
            "other layout": laid_out(array, "fortran" if rank % 2 else "c"),
            "nan": float("nan"),
        }
        for rank in range(3)
    ]


def options(check: Any) -> SaveOptions:
    return SaveOptions(check_replicas=check, block_bytes=4096, timeout=60)


def test_differing_replicas_are_warned_of_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        reports = save_on(differing_states(), tmp_path, options=options("warn"))
    for report in reports:
        assert [warning.split(":")[0].lstrip("/") for warning in report.warnings] == ["local", "n", "text"]
    (record,) = caplog.records
    first, *lines = record.getMessage().split("\n  ")
    assert first == f"{tmp_path}: 3 plain tensors or values differ among ranks:"
    assert lines == list(reports[0].warnings)
    merged = load_whole(tmp_path)
    assert same_bits(merged["local"], make_array((50, 50), "int32"))
    assert merged["n"] == 0


def test_dicts_in_values_are_the_same_whatever_the_order_of_their_keys(tmp_path: Path) -> None:
    """Which differs among ranks where dicts are made of sets, and says nothing."""
    lists = [[{"a": 1, "b": {"x": (1, 2), "y": 0.0}}], [{"b": {"y": 0.0, "x": (1, 2)}, "a": 1}]]
    save_on([{"groups": one} for one in lists], tmp_path, options=options("error"))
    assert load_whole(tmp_path)["groups"] == lists[0]
    for other in ([{"b": {"y": -0.0, "x": (1, 2)}, "a": 1}], [{"b": {"y": 0.0, "x": (2, 1)}, "a": True}]):
        errors_of(
            try_save([{"groups": one} for one in (lists[0], other)], tmp_path, options=options("error")),
            UnsupportedValueError,
        )


def test_differing_replicas_as_an_error(tmp_path: Path) -> None:
    for error in errors_of(try_save(differing_states(), tmp_path, options=options("error")), UnsupportedValueError):
        assert all(name in str(error) for name in ("local", "n", "text"))
        assert "same" not in str(error)
        assert "layout" not in str(error)
    assert list(tmp_path.iterdir()) == []
    states = [{key: state[key] for key in ("same", "m", "other layout", "nan")} for state in differing_states()]
    assert save_on(states, tmp_path, options=options("error"))[0].warnings == ()


def test_differing_replicas_that_nobody_compares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports = save_on(differing_states(), tmp_path, options=options("off"))
    assert all(report.warnings == () for report in reports)
    assert not caplog.records
    assert load_whole(tmp_path)["n"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128"])
def test_one_differing_bit_is_seen(tmp_path: Path, dtype: str) -> None:
    array = make_array((600, 700), dtype)
    other = laid_out(array, "fortran")
    other[599, 699] = 0 if array[599, 699] != 0 else 1
    states = [{"w": array, "v": array}, {"w": other, "v": laid_out(array, "fortran")}]
    (report, _) = save_on(states, tmp_path)
    assert [warning.split(":")[0].lstrip("/") for warning in report.warnings] == ["w"]


@pytest.mark.parametrize(("coordinator", "kept"), [(0, 1), (2, 2), (3, 1)])
def test_a_plain_tensor_is_the_coordinators_or_else_the_lowest_ranks(
    tmp_path: Path, coordinator: int, kept: int
) -> None:
    states: list[dict[str, Any]] = [
        {"x": rank} | ({"w": np.full(5000, rank), "n": rank, "text": f"{rank}" * 5000} if rank in (1, 2) else {})
        for rank in range(4)
    ]
    reports = save_on(states, tmp_path, options=options("off"), coordinator=coordinator)
    merged = load_whole(tmp_path)
    assert (merged["w"] == kept).all()
    assert merged["n"] == kept
    assert merged["text"] == f"{kept}" * 5000
    assert merged["x"] == coordinator
    assert [report.bytes_written > 0 for report in reports] == [rank == kept for rank in range(4)]


def test_a_distributed_replica_is_written_once_and_its_parts_shared_out(tmp_path: Path) -> None:
    array = make_array((1024, 512))
    reports = save_on([{"w": sharded(array, everything(array))} for _ in range(4)], tmp_path, options=SaveOptions())
    assert sum(report.bytes_written for report in reports) == array.nbytes == reports[0].total_bytes
    assert max(report.bytes_written for report in reports) <= array.nbytes // 4 + (64 << 10)
    assert same_bits(load_whole(tmp_path)["w"], array)


# -- partial tensors

OPERATIONS = {
    "sum": np.add.reduce,
    "avg": lambda parts: np.add.reduce(parts) / len(parts),
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
    "any": np.logical_or.reduce,
    "all": np.logical_and.reduce,
}


def partial(
    addend: np.ndarray, operation: str, position: int, count: int, boxes: list[Box] | None = None
) -> ShardedArray:
    """One rank's addend of a partial tensor, or the boxes that it has of it."""
    boxes = boxes if boxes is not None else [whole(addend.shape)]
    pieces = [np.array(addend[box.slices]) for box in boxes]
    reduction = Reduction(operation, position, count)
    return ShardedArray(addend.shape, DTYPES[addend.dtype.name], boxes, pieces, reduction=reduction)


REDUCED = [
    *((operation, "float64") for operation in ("sum", "avg", "max", "min", "prod")),
    *((operation, "int32") for operation in ("sum", "max", "min", "prod")),
    *((operation, "bool") for operation in ("any", "all", "max", "min")),
    ("sum", "bfloat16"),
    ("avg", "float16"),
    ("max", "bfloat16"),
    ("sum", "complex64"),
    ("avg", "complex128"),
    ("sum", "float8_e4m3fn"),
]


@pytest.mark.parametrize(
    ("reduced", "shape"), some(itertools.product(REDUCED, [(), (7,), (130, 200)]), len(REDUCED) + 5), ids=str
)
def test_addends_are_reduced_exactly_once(tmp_path: Path, reduced: tuple[str, str], shape: tuple[int, ...]) -> None:
    operation, dtype = reduced
    rng = np.random.default_rng(5)
    kind = getattr(ml_dtypes, dtype, dtype)
    addends = [rng.integers(0 if dtype == "bool" else -2, 2 if dtype == "bool" else 4, shape) for _ in range(4)]
    arrays = [np.asarray(addend).astype(kind) for addend in addends]
    before = [array.copy() for array in arrays]
    states = [{"w": partial(array, operation, rank, 4), "n": 1} for rank, array in enumerate(arrays)]
    reports = save_on(states, tmp_path)
    if operation in ("any", "all"):
        expected = OPERATIONS[operation](np.stack(addends))
    else:
        expected = OPERATIONS[operation](
            np.stack([array.astype("complex128" if "c" in dtype else "float64") for array in arrays])
        )
        expected = expected.real if "c" not in dtype else expected
    merged = load_whole(tmp_path)["w"]
    assert merged.dtype == kind
    np.testing.assert_array_equal(merged.astype("complex128"), np.asarray(expected).astype(kind).astype("complex128"))
    assert sum(report.bytes_written for report in reports) == arrays[0].nbytes
    for state, array in zip(states, before, strict=True):
        assert same_bits(state["w"].pieces[0].reshape(shape), array), "saving changes no tensor"


def test_partial_over_one_axis_and_cut_and_replicated_over_others(tmp_path: Path) -> None:
    """Eight ranks: two addends, rows cut in two, each held twice."""
    rng = np.random.default_rng(5)
    addends = [rng.integers(-9, 9, (60, 300)).astype("float64") for _ in range(2)]
    states = []
    for rank in range(8):
        axis, cut = rank // 4, rank // 2 % 2
        states.append({"w": partial(addends[axis], "sum", axis, 2, [rows_of((60, 300), cut, 2)])})
    reports = save_on(states, tmp_path)
    assert same_bits(load_whole(tmp_path)["w"], addends[0] + addends[1])
    assert sum(report.bytes_written for report in reports) == addends[0].nbytes


@pytest.mark.parametrize("chunk", [16, 48, 4096])
def test_large_addends_are_reduced_in_chunks(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each may begin and end within a tensor, or have several; and not all ranks get as many."""
    monkeypatch.setattr(reduce, "_CHUNK_BYTES", chunk)
    rng = np.random.default_rng(5)
    arrays: list[dict[str, np.ndarray]] = [
        {
            "a": rng.integers(-9, 9, (41, 3)).astype("float64"),
            "b": rng.integers(-9, 9, (7,)).astype("int16"),
            "c": rng.integers(-9, 9, (5, 5)).astype("float32"),
            "d": rng.integers(-9, 9, (3,)).astype("complex128"),
        }
        for _ in range(3)
    ]
    states = [{key: partial(one, "sum", rank, 3) for key, one in mine.items()} for rank, mine in enumerate(arrays)]
    save_on(states, tmp_path)
    for key, found in load_whole(tmp_path).items():
        assert same_bits(found, arrays[0][key] + arrays[1][key] + arrays[2][key]), key


def let_rank_1_fail(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a function that is given a state raise on the rank whose state has "one" in it."""
    real = getattr(module, name)

    def fail(*arguments: Any) -> Any:
        (state,) = (one for one in arguments if isinstance(one, LocalState))
        if "/one" in state.tensors.paths:
            raise MemoryError("Unable to allocate 3.1 GiB")
        return real(*arguments)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("module", "name"), [(rank_files, "plan_files"), (reduce, "_packed")])
def test_a_rank_that_cannot_take_part_in_the_collectives_says_why(
    tmp_path: Path, module: Any, name: str, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which wait for it, hear of that at once, and not of a collective that hangs."""
    let_rank_1_fail(module, name, monkeypatch)
    addend = np.ones((300, 100))  # large enough that each writes a part

    def work(rank: SimulatedRank) -> SaveReport:
        state = {"w": partial(addend, "sum", rank.rank, 2), ("zero", "one")[rank.rank]: addend}
        save = rank.save_in_background if in_background else rank.save
        saved = save(state, tmp_path, None, SaveOptions(timeout=4))
        return saved.result() if isinstance(saved, AsyncSave) else saved

    for error in errors_of(run_ranks(2, work), RankFailureError):
        assert set(error.failures) == {1}
        assert "MemoryError: Unable to allocate" in str(error)
    assert not list(tmp_path.glob("*.metadata"))


@pytest.mark.parametrize(("module", "name"), [(present, "plan_files"), (reduce, "_on_host"), (reduce, "_packed")])
def test_a_rank_that_cannot_take_part_in_a_gathering_says_why(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_rank_1_fail(module, name, monkeypatch)
    addend = np.ones((300, 100))

    def work(rank: SimulatedRank) -> Any:
        state = {"w": partial(addend, "sum", rank.rank, 2), ("zero", "one")[rank.rank]: addend}
        with rank.hub.session("gather_state_dict", 4) as session:
            return present.present(lambda: state, session, rank.transport, NumpyAdapter(), "auto")

    for error in errors_of(run_ranks(2, work), RankFailureError):
        assert set(error.failures) == {1}
        assert "MemoryError: Unable to allocate" in str(error)


def test_a_rank_without_memory_for_its_addends_keeps_no_later_save_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives have not begun by then, and so have left out nothing that other ranks count on."""
    real, failed = reduce._on_host, list[int]()

    def fail(part: Any, state: LocalState) -> Any:
        if "/one" in state.tensors.paths and not failed:
            failed.append(1)
            raise MemoryError("Unable to allocate 3.1 GiB")
        return real(part, state)

    monkeypatch.setattr(reduce, "_on_host", fail)
    addend = np.ones((300, 100))

    def work(rank: SimulatedRank) -> SaveReport:
        state = {"w": partial(addend, "sum", rank.rank, 2), ("zero", "one")[rank.rank]: addend}
        with pytest.raises(RankFailureError, match="MemoryError: Unable to allocate") as caught:
            rank.save(state, tmp_path, None, SaveOptions(timeout=10))
        assert set(caught.value.failures) == {1}
        return rank.save(state, tmp_path)

    all_ok(run_ranks(2, work))
    assert same_bits(load_whole(tmp_path)["w"], 2 * addend)


def test_a_missing_addend_is_refused(tmp_path: Path) -> None:
    array = np.ones((4, 4))
    states = [{"w": partial(array, "sum", 0, 3)}, {"w": partial(array, "sum", 2, 3)}]
    for error in errors_of(try_save(states, tmp_path), UnsupportedValueError):
        assert "w" in str(error)
    assert not data_files(tmp_path)


def test_different_reductions_are_refused(tmp_path: Path) -> None:
    array = np.ones((4, 4))
    for other in (partial(array, "max", 1, 2), sharded(array, everything(array)), partial(array, "sum", 1, 3)):
        errors_of(try_save([{"w": partial(array, "sum", 0, 2)}, {"w": other}], tmp_path), UnsupportedValueError)


def test_the_average_of_integers_is_refused(tmp_path: Path) -> None:
    array = np.ones((4, 4), int)
    states = [{"w": partial(array, "avg", rank, 2)} for rank in range(2)]
    for error in errors_of(try_save(states, tmp_path), UnsupportedValueError):
        assert "w" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_loading_into_a_partial_sum_gives_the_value_to_one_and_zeros_to_others(tmp_path: Path, exchange: Any) -> None:
    array = make_array((40, 50), "int64")
    save_on([{"w": array}], tmp_path)
    states = [{"w": partial(blank_like(array), "sum", rank, 3)} for rank in range(3)]
    load_on(states, tmp_path, options=LoadOptions(exchange=exchange, timeout=60))
    assert same_bits(states[0]["w"].pieces[0], array)
    assert not any(state["w"].pieces[0].any() for state in states[1:])
    save_on(states, tmp_path)
    assert same_bits(load_whole(tmp_path)["w"], array)


@pytest.mark.parametrize("operation", ["avg", "max", "min"])
def test_loading_into_other_partials_gives_the_value_to_all(tmp_path: Path, operation: str) -> None:
    array = make_array((40, 50), "int16").astype("float32")
    save_on([{"w": array}], tmp_path)
    states = [{"w": partial(blank_like(array), operation, rank, 2)} for rank in range(2)]
    load_on(states, tmp_path)
    assert all(same_bits(state["w"].pieces[0], array) for state in states)


def test_loading_into_a_partial_product_is_refused(tmp_path: Path) -> None:
    array = np.ones((4, 4))
    save_on([{"w": array}], tmp_path)
    states = [{"w": partial(np.zeros((4, 4)), "prod", rank, 2)} for rank in range(2)]
    errors_of(try_load(states, tmp_path), StateDictMismatchError)
    assert not any(state["w"].pieces[0].any() for state in states)
