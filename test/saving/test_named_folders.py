"""Errors of saves and loads say which folder the call was about."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import (
    CheckpointError,
    CheckpointTimeoutError,
    LoadOptions,
    RankFailureError,
    SaveOptions,
    UnsupportedValueError,
)
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.core.naming import naming
from paddle_dist_ckpt.testing import NumpyAdapter, SimulatedRank, run_ranks
from paddle_dist_ckpt.wiring import naming_folder, save_with
from test.jobs import errors_of, load_alone, save_alone, try_save
from test.waiting import PATIENCE


def test_what_cannot_be_saved_is_told_with_the_folder_on_every_rank(tmp_path: Path) -> None:
    for error in errors_of(try_save([{"f": print}, {"n": 1}], tmp_path), UnsupportedValueError):
        assert str(error).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("loads", [False, True])
def test_a_silent_rank_is_told_of_with_the_folder(tmp_path: Path, loads: bool) -> None:
    save_alone({"n": 1}, tmp_path)
    over = threading.Event()

    def work(rank: SimulatedRank) -> Any:
        if rank.rank:
            return over.wait(PATIENCE)
        try:
            if loads:
                return rank.load({"n": 0}, tmp_path, None, LoadOptions(timeout=1))
            return rank.save({"n": 1}, tmp_path, None, SaveOptions(timeout=1))
        finally:
            over.set()

    error = run_ranks(2, work)[0]
    assert isinstance(error, CheckpointTimeoutError)
    assert str(error).startswith(f"{tmp_path}: ")
    assert error.missing_ranks == (1,)


def test_a_background_save_that_fails_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise CheckpointError("no reason")

    monkeypatch.setattr("paddle_dist_ckpt.saving.save._Saving.finish", fail)
    find = {"n": 1}, NumpyAdapter()
    saving = save_with(Ranks.alone(), lambda: find, tmp_path, None, True, SaveOptions())
    for _ in range(2):  # it is raised by each who asks, and named once
        with pytest.raises(CheckpointError) as caught:
            saving.result()
        assert str(caught.value) == f"{tmp_path}: no reason"


def test_a_message_that_names_the_folder_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_alone({"n": 0}, tmp_path / "nowhere")
    assert str(caught.value) == f"there is no folder {tmp_path / 'nowhere'}"


def test_all_else_of_an_error_stays() -> None:
    cause = ValueError("why")
    with pytest.raises(RankFailureError) as caught, naming("/data"):
        raise RankFailureError("it broke", {3: cause}) from cause
    assert str(caught.value) == "/data: it broke"
    assert caught.value.failures == {3: cause}
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("path", [3, "", "s3://bucket"])
def test_what_is_no_folder_hides_no_error(path: Any) -> None:
    with pytest.raises(CheckpointError) as caught, naming_folder(path):
        raise CheckpointError("it broke")
    assert str(caught.value) == "it broke"
