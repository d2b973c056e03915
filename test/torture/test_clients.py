"""Saves go on under every kind of hostile client, cost the coordinator no memory and no files to speak of, and a silent
rank is noticed in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.torture import clients
from test.torture.hostile_clients import KINDS


@pytest.mark.parametrize("seed", range(len(KINDS)), ids=list(KINDS))
def test_saves_go_on(seed: int, tmp_path: Path) -> None:
    assert sum(clients.attempt(seed, tmp_path).values()) == 20
