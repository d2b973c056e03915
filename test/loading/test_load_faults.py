"""A load whose disk fails at any single operation: it succeeds all the same, or every rank raises."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, RankFailureError
from paddle_dist_ckpt.files import reader
from paddle_dist_ckpt.options import LoadOptions
from test.jobs import (
    Killed,
    Watch,
    alike,
    blank_like,
    check_pieces,
    errors_of,
    load_alone,
    load_on,
    make_array,
    same_bits,
    save_alone,
    save_on,
    split_rows,
    try_load,
)
from test.strategies import some
from test.torture.crafting import write_metadata

ARRAY, COPY = make_array((60, 70)), make_array((80, 90), "int16")


def blank_states(ranks: int) -> list[dict[str, Any]]:
    """Targets in which the copy is tied to another key, so that there is a staged pass."""
    states = []
    for part in split_rows(ARRAY, ranks, fill=False, dimension=1):
        part.pieces = [blank_like(piece) for piece in part.pieces]
        shared = blank_like(COPY)
        states.append({"cut": part, "copy": shared, "tied": shared, "n": None, "text": None})
    return states


def is_loaded(state: dict[str, Any]) -> bool:
    check_pieces(state["cut"], ARRAY)
    return alike(state["copy"], COPY) and state["n"] == 1 and state["text"] == "long" * 2000


def is_untouched(state: dict[str, Any]) -> bool:
    pieces = [*state["cut"].pieces, state["copy"]]
    return all(np.array_equal(piece.view("u1"), blank_like(piece).view("u1")) for piece in pieces)


@pytest.mark.parametrize(
    ("exchange", "mode"), some(itertools.product(["auto", "always", "never"], ["fail", "kill the rank"]), 3)
)
def test_a_load_cut_short_anywhere(tmp_path: Path, exchange: Any, mode: str) -> None:
    saved = [{"cut": part, "copy": COPY, "tied": COPY, "n": 1, "text": "long" * 2000} for part in split_rows(ARRAY, 2)]
    save_on(saved, tmp_path)
    options = LoadOptions(exchange=exchange, timeout=60)
    dry = Watch([tmp_path] * 2)
    load_on(blank_states(2), dry.storages(), options=options)
    raised = 0
    for rank, count in dry.count_by_rank().items():
        for step in range(count):
            error = (lambda: OSError(errno.EIO, "injected")) if mode == "fail" else Killed
            watch = Watch([tmp_path] * 2, (rank, step), error, "none" if mode == "fail" else "rank")
            states = blank_states(2)
            results = try_load(states, watch.storages(), options=options)
            if not any(isinstance(result, BaseException) for result in results):
                assert all(map(is_loaded, states)), watch.happened
                continue
            raised += 1
            touched = not all(map(is_untouched, states))
            for place, result in enumerate(results):
                if isinstance(result, Killed):
                    assert place == rank
                    continue
                assert isinstance(result, CheckpointError), (watch.happened, result)
                if isinstance(result, RankFailureError):
                    assert list(result.failures) == [rank], (watch.happened, result)
                else:
                    assert isinstance(result, CheckpointCorruptedError)
                assert touched <= ("partly written" in str(result)), (watch.happened, str(result))
            assert all(state["n"] is None for state in states)
    assert raised


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), RuntimeError("(External) copy failed")])
def test_what_paddle_raises_in_one_process_is_said_of_the_folder(
    tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a copy to a device, when a part of the targets may have been filled."""
    save_alone({"w": COPY}, tmp_path)

    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(reader, "_hand_over", fail)
    with pytest.raises(CheckpointError) as caught:
        load_alone({"w": np.zeros((90, 80), "int16").T[:80, :90]}, tmp_path)
    assert all(part in str(caught.value) for part in (str(tmp_path), "copy failed", "partly written"))
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_that_is_none_is_found_before_anything_is_touched(tmp_path: Path, ranks: int) -> None:
    """As somebody can write it, with a digest that fits."""
    save_alone({"cut": ARRAY, "copy": COPY, "n": float("inf"), "text": "a"}, tmp_path, 0)
    head, body = (tmp_path / "0.metadata").read_bytes().split(b"\n", 1)
    forged = body.rstrip(b"\n").replace(b'{"float":"inf"}', b'{"float":"7"}')
    write_metadata(tmp_path, forged, msgspec.json.decode(head)["save"])
    states = [{"cut": blank_like(ARRAY), "copy": blank_like(COPY), "n": 0.0, "text": ""} for _ in range(ranks)]
    for error in errors_of(try_load(states, tmp_path), CheckpointError):
        assert "n: a stored value is not well-formed" in str(error)
        assert "partly written" not in str(error)
    for state in states:
        assert same_bits(state["cut"], blank_like(ARRAY))
        assert same_bits(state["copy"], blank_like(COPY))
        assert (state["n"], state["text"]) == (0.0, "")
