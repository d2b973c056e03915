"""Values of a great many small parts: stored with what their objects take, so that any reader's budget holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dist_ckpt import UnsupportedValueError, verify
from paddle_dist_ckpt.core.decoding import objects_of
from paddle_dist_ckpt.files import codec
from paddle_dist_ckpt.tree.values import decode_value, encode_value, padded
from test.jobs import data_files, load_whole, save_alone


def test_what_people_store_is_saved_and_loaded(tmp_path: Path) -> None:
    state = {
        "order": list(range(1_000, 601_000)),
        "seen": [{"shard": i, "at": (i, 0.5)} for i in range(20_000)],
        "random": (3, tuple(range(625)), None),
        "counters": {f"counter_{i}": i for i in range(5_000)},
    }
    save_alone(state, tmp_path)
    assert load_whole(tmp_path, flat=False) == state
    assert verify(tmp_path).ok
    (file,) = data_files(tmp_path)
    assert file.stat().st_size > 40 * 600_000


def test_blanks_pay_for_objects() -> None:
    for value in (list(range(1_000_000)), [[]] * 300_000):
        text = encode_value(value, "key")
        stored = padded(text)
        assert stored.startswith(text)
        assert len(stored) == objects_of(text)
        assert decode_value(stored) == value
    assert padded(b'"[[[["') == b'"[[[["' + b" " * 18


def test_too_many_for_one_metadata_are_refused_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MOST_OF_RECORDS", 10_000)
    with pytest.raises(UnsupportedValueError, match=r"too many for one \.metadata; put them"):
        save_alone({str(i): i for i in range(100)}, tmp_path)
    assert not list(tmp_path.glob("*.metadata"))
