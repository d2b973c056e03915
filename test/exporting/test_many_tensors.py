"""Exports of very many tiny tensors: in little memory for each."""

from __future__ import annotations

from pathlib import Path

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
