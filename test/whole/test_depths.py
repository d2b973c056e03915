"""Saves and loads take as long at all depths of the caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    LoadOptions,
    SaveOptions,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
    verify,
)
from test import strategies
from test.pace import check_all_depths

CALLS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "save": lambda state, path: save_state_dict(state, path, unique_id=0, options=SaveOptions(no_dist=True)),
    "load": lambda state, path: load_state_dict(dict(state), path, options=LoadOptions(no_dist=True)),
    "load whole": lambda state, path: load_merged_state_dict(path),
    "verify": lambda state, path: verify(path),
    "values": lambda state, path: read_metadata(path).values,
}


@pytest.mark.parametrize("name", CALLS if strategies.long_run else ("save", "verify"))  # in which most was seen
def test_calls_take_as_long_at_all_depths(name: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {f"layers.{i}.weight": np.zeros(1, np.float32) for i in range(50)}
    state |= {f"values.{i}": [[[[i]]]] * 30 for i in range(200)}
    save_state_dict(state, tmp_path, options=SaveOptions(no_dist=True))
    check_all_depths(lambda: CALLS[name](state, tmp_path))
