"""What is exported can be read by those it is for: on real ranks, by Paddle's own functions and by safetensors."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    ExportReport,
    LoadOptions,
    RankFailureError,
    Recipe,
    SaveOptions,
    export,
    export_state_dict,
    load_merged_state_dict,
    read_metadata,
    state_exports,
    stored,
    verify,
)
from paddle_dist_ckpt.export_calls import export_request
from paddle_dist_ckpt.folder.hidden import HiddenFolder
from paddle_dist_ckpt.state_exports import export_filled_with
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import export_with
from test.exporting.test_safetensors import opened
from test.jobs import all_ok, errors_of, save_alone
from test.paddle import cases_export as cases
from test.paddle.test_sharded_weight import on_ranks
from test.paddle.versions import LATER_THAN_3_0, lacks
from test.ranks.fresh import FreshRanks, logs_of
from test.ranks.pool import RankPool

newer = lacks(LATER_THAN_3_0, "has its metadata classes elsewhere")


@newer
@pytest.mark.parametrize("destination", ["mp2_columns", "mp2_rows", "uneven4"])
def test_paddle_loads_it_on_other_ranks(pool: RankPool, tmp_path: Path, destination: str) -> None:
    reports = pool.run(
        cases.save_and_export, "mp2_rows", str(tmp_path / "ckpt"), str(tmp_path / "out"), "paddle", ranks=2
    )
    assert len(reports[0].files) == 4
    ranks = cases.LAYOUTS[destination].ranks
    wrong = pool.run(cases.load_by_paddle, destination, str(tmp_path / "out"), ranks=ranks)
    assert wrong == [[]] * ranks


@newer
@pytest.mark.parametrize("most", [1 << 30, 100])
def test_paddle_loads_tensors_that_have_no_variables_names(tmp_path: Path, most: int) -> None:
    arrays = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(30, np.float32)}
    save_alone({"model": arrays}, tmp_path / "c")
    report = export(tmp_path / "c", tmp_path / "out", "paddle", prefix="model", max_shard_bytes=most)
    assert len(report.files) == (2 if most > 100 else 3)
    state = {key: paddle.zeros(list(array.shape)) for key, array in arrays.items()}
    with mock.patch.object(paddle.Tensor, "cuda", lambda tensor: tensor):  # it asks for a GPU, which it does not need
        paddle.distributed.load_state_dict(state, str(tmp_path / "out"))
    for key, array in arrays.items():
        np.testing.assert_array_equal(state[key].numpy(), array)


def test_a_dtype_of_paddle_is_taken_for_its_name(tmp_path: Path) -> None:
    save_alone({"a": np.ones((2, 2), "float32")}, tmp_path / "c")
    export(tmp_path / "c", tmp_path / "out", dtype=paddle.bfloat16)
    assert opened(tmp_path / "out")["a"].dtype == "bfloat16"
    assert str(stored("a").cast(paddle.float16)) == str(stored("a").cast("float16"))
    for bad in ("bflot16", paddle.int32):
        with pytest.raises(ValueError, match="float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64"):
            export(tmp_path / "c", tmp_path / "other", dtype=bad)


@pytest.mark.parametrize("layout", ["mp2_rows", "uneven4"])
def test_a_live_state_dict_as_safetensors(pool: RankPool, tmp_path: Path, layout: str) -> None:
    ranks = cases.LAYOUTS[layout].ranks
    pool.run(cases.export_live, layout, str(tmp_path / "out"), "safetensors", ranks=ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = opened(tmp_path / "out")
    assert sorted(found) == sorted(cases.SHAPES)
    for name, array in cases.arrays().items():
        assert found[name].dtype.name == ("bfloat16" if name == "half" else "float32")
        np.testing.assert_array_equal(found[name].view(array.dtype), array, err_msg=name)


def test_what_one_rank_passes_wrongly_is_raised_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    path, out = str(tmp_path / "c"), str(tmp_path / "out")
    for outcomes in pool.run(cases.bad_arguments_on_one_rank, path, out, ranks=2):
        assert [outcome.error for outcome in outcomes] == ["ValueError"] * 3
        assert all(outcome.seconds < 15 for outcome in outcomes)
    assert not Path(out).exists()


def test_what_is_beside_a_live_state_dicts_place_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not by the export of the hidden checkpoint again, nor is that one."""
    (tmp_path / ".out.export-0123456789abcdef").mkdir()
    export_state_dict({"a": paddle.ones([2])}, tmp_path / "out")
    assert [record.args[0] for record in caplog.records if record.levelno == logging.WARNING and record.args] == [
        tmp_path / ".out.export-0123456789abcdef"
    ]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", ["save_with", "export_with"])
def test_an_interrupt_between_the_steps_of_an_export_is_told_to_all(
    pool: RankPool, tmp_path: Path, call: str, victim: int
) -> None:
    results = pool.run(cases.interrupted_between, str(tmp_path / "out"), 2, victim, call, ranks=2)
    for rank, (raised, seconds, then) in enumerate(results):
        assert raised.startswith("KeyboardInterrupt" if rank == victim else "RankFailureError"), raised
        assert seconds < 30
        assert then is None


def test_no_rank_leaves_the_hidden_folder_of_an_export_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, local = threading.Event(), threading.local()
    remove, prepare, save_with = HiddenFolder.remove, LocalStorage.prepare, state_exports.save_with

    def removing(folder: HiddenFolder) -> None:
        remove(folder)
        removed.set()

    def preparing(storage: LocalStorage) -> None:
        if getattr(local, "rank", 0) == 1:
            assert removed.wait(30)
        prepare(storage)

    def saving(ranks: Any, *given: Any) -> Any:
        if ranks.rank == 0:
            raise KeyboardInterrupt
        local.rank = ranks.rank
        return save_with(ranks, *given)

    monkeypatch.setattr(HiddenFolder, "remove", removing)
    monkeypatch.setattr(LocalStorage, "prepare", preparing)
    monkeypatch.setattr(state_exports, "save_with", saving)
    request, options = export_request(tmp_path / "out"), SaveOptions(timeout=60)
    first, second = on_ranks(
        [{"a": paddle.ones([2])}] * 2,
        lambda ranks, state: state_exports.export_state_with(ranks, state, request, options),
    )
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RankFailureError)
    assert not list(tmp_path.iterdir())


def test_a_file_for_paddle_load(pool: RankPool, tmp_path: Path) -> None:
    pool.run(cases.export_live, "mp2_columns", str(tmp_path / "model.pdparams"), "pdparams", ranks=2)
    found = paddle.load(str(tmp_path / "model.pdparams"))
    assert set(found) == set(cases.SHAPES)
    for name, array in cases.arrays().items():
        assert found[name].dtype == (paddle.bfloat16 if name == "half" else paddle.float32)
        np.testing.assert_array_equal(found[name].numpy().view(array.dtype), array, err_msg=name)


@pytest.mark.parametrize(("victim", "at"), [(0, 4), (1, 4), (0, 18)])
def test_a_rank_is_killed(tmp_path: Path, victim: int, at: int) -> None:
    """The other raises, and nothing is visible. What the coordinator has left, if it was that, keeps nobody out."""
    save_alone({f"w{i}": np.full((300, 4), i, np.float32) for i in range(8)}, tmp_path / "ckpt")
    out = tmp_path / "out"
    with FreshRanks(2, cases.export_and_die, str(tmp_path / "ckpt"), str(out), victim, at) as ranks:
        ends = ranks.wait()
    assert ends[victim].exit_code == -9, logs_of(ends)
    outcome = ends[1 - victim].result
    assert (outcome.error, outcome.ranks) == ("RankFailureError", (victim,))
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == ({"ckpt", ".out.export"} if victim == 0 else {"ckpt"})
    export(tmp_path / "ckpt", out, format="native", options=LoadOptions(no_dist=True))
    assert verify(out).ok


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(key_map={"v": "w"}),
        LoadOptions(cast=True),
        LoadOptions(resize={"w": 0}),
    ],
)
def test_options_that_would_change_what_is_written_are_refused(tmp_path: Path, options: LoadOptions) -> None:
    """And not left aside: the model that is written would be another."""
    save_alone({"w": np.ones((3, 3), np.float32)}, tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"export does not use LoadOptions\(.*=\.\.\.\): tensors are written"):
        export(tmp_path / "ckpt", tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"load_merged_state_dict does not use LoadOptions\("):
        load_merged_state_dict(tmp_path / "ckpt", options=options)


@pytest.mark.parametrize(
    ("keys", "recipes"),
    [
        (["abc", "ab"], [{}, {}]),
        (["abc", "abc"], [{"a": stored("b"), "b": stored("c")}, {"a": stored("b"), "b": stored("a")}]),
        (["abc", "abc"], [{"a": stored("c").T.T}, {"a": stored("c")}]),
    ],
    ids=["keys", "recipes", "the same otherwise"],
)
def test_ranks_that_ask_for_different_merges_write_none(
    tmp_path: Path, keys: list[str], recipes: list[dict[str, Recipe]]
) -> None:
    """Each of which fills some of the tensors, and knows of its own alone."""
    save_alone({key: np.full((2, 2), i, "float32") for i, key in enumerate("abc")}, tmp_path / "c")

    def merge(rank: SimulatedRank) -> ExportReport:
        request = export_request(tmp_path / "out", keys=list(keys[rank.rank]))
        loading = LoadOptions(timeout=60, recipes=recipes[rank.rank])
        return export_filled_with(rank.connection, tmp_path / "c", request, loading, False)

    for error in errors_of(run_ranks(2, merge), ValueError):
        assert str(error) == "rank 1 and rank 0 ask for different exports"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    keys[1], recipes[1] = keys[0], recipes[0]
    assert [report.tensors for report in all_ok(run_ranks(2, merge))] == [3, 3]


def test_ranks_may_name_the_same_keys_in_any_order(tmp_path: Path) -> None:
    """As sets have them, in another order in each process."""
    save_alone({key: np.ones(2, "float32") for key in "abc"}, tmp_path / "c")

    def write(rank: SimulatedRank) -> ExportReport:
        request = export_request(tmp_path / "out", keys=["a", "b"] if rank.rank else ["b", "a"])
        return export_with(rank.connection, tmp_path / "c", request, LoadOptions(timeout=60))

    assert [report.tensors for report in all_ok(run_ranks(2, write))] == [2, 2]


def test_a_state_that_becomes_a_checkpoint_is_saved_as_the_options_say(tmp_path: Path) -> None:
    state = {"a": paddle.arange(5000, dtype="float32"), "text": "x" * 20_000, "n": 3}
    options = SaveOptions(block_bytes=4096, data_suffix=".shards", user_metadata={"run": 1})
    export_state_dict(state, tmp_path / "out", "native", options=options)
    saved = read_metadata(tmp_path / "out")
    assert (saved.block_bytes, saved.user_metadata) == (4096, {"run": 1})
    assert {Path(file.name).suffix for file in saved.files} == {".shards"}
    assert verify(tmp_path / "out").ok
    loaded = load_merged_state_dict(tmp_path / "out")
    assert loaded["a"].tolist() == list(range(5000))
    assert (loaded["text"], loaded["n"]) == (state["text"], 3)
    export(tmp_path / "out", tmp_path / "again", "native")
    again = read_metadata(tmp_path / "again")
    assert again.block_bytes == SaveOptions().block_bytes
    assert {Path(file.name).suffix for file in again.files} == {".safetensors"}
