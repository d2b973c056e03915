"""A sample of the damaged checkpoints of other formats."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from .foreign import attempt


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_damage_is_refused_or_harmless(first: int, tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    try:
        for seed in range(first, first + 10):
            folder = tmp_path / str(seed)
            folder.mkdir()
            outcomes += attempt(seed, folder)
    finally:
        logging.disable(logging.NOTSET)
    assert outcomes["refused"] > 40
    assert outcomes["read"] > 20
    assert outcomes["loaded"]
