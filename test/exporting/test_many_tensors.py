"""Exports of very many tiny tensors: in little memory for each, and in few steps."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import export
from paddle_dist_ckpt.exporting import stream
from test.jobs import little_memory, load_whole, save_alone

MANY, MOST_BYTES = 6000, 1500  # tensors; for each, of which `.metadata` takes a third, once decoded


@pytest.mark.parametrize("kind", ["safetensors", "native", "paddle", "pdparams"])
def test_tiny_tensors_take_little_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_TOGETHER", 256)
    state = {f"layer.{i}.w": np.full(1, i % 256, np.uint8) for i in range(MANY)}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "first", format=kind)  # what is imported and made once
    with little_memory(MOST_BYTES * MANY):
        export(tmp_path / "ckpt", tmp_path / "out", format=kind)
    if kind == "native":
        found = load_whole(tmp_path / "out")
        assert all(np.array_equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize(("kind", "most"), [("safetensors", 53), ("native", 75), ("paddle", 115), ("pdparams", 70)])
def test_tiny_tensors_take_few_steps(kind: str, most: int, tmp_path: Path) -> None:
    """Calls of functions are counted, for each tensor."""
    state = {f"layer.{i}.w": np.full(1, i % 256, np.uint8) for i in range(1000)}
    save_alone(state, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "first", format=kind)  # what is imported and made once
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        export(tmp_path / "ckpt", tmp_path / "out", format=kind)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert calls < most * len(state)
