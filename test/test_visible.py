"""What stands in a checkpoint as messages, errors and the log have it: it can be seen, and is one line."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointError, CheckpointNotFoundError, StateDictMismatchError, UnsupportedValueError
from paddle_dist_ckpt.visible import MOST_KEY, MOST_LINE, is_made_visible, visible, visible_lines
from test.jobs import load_alone, load_whole, save_alone

EVIL = "\x1b]0;owned\x07\u202e\n2026-03-01 ERROR forged"
SHOWN = "\\x1b]0;owned\\x07\\u202e\\n2026-03-01 ERROR forged"


def test_text_that_can_be_read_stays() -> None:
    for text in ("", "model.layers.0.weight", "学习率", "é ß", "a b", "</script>"):
        assert visible(text) == text


def test_what_cannot_be_seen_is_escaped() -> None:
    assert visible("a\u202eb\u2066c\x00d\ne\ud800f\u2028g\U000e0001") == (
        "a\\u202eb\\u2066c\\x00d\\ne\\ud800f\\u2028g\\U000e0001"
    )


def test_long_text_loses_its_middle() -> None:
    found = visible("a" * 5000 + "b" * 5000)
    assert len(found) <= MOST_KEY
    assert visible(found) == found
    assert found.startswith("aaa")
    assert found.endswith("bbb")
    assert " … 9528 characters … " in found
    assert visible("a" * MOST_KEY) == "a" * MOST_KEY


@pytest.mark.parametrize("nothing", "\u034f\u115f\u2800\u3164\ufe0f\uffa0\U000e0100\U000e0fff")
def test_what_nothing_is_drawn_for_is_escaped(nothing: str) -> None:
    assert visible(f"w{nothing}") == "w" + nothing.encode("unicode_escape").decode()


def test_lines_that_follow_are_indented() -> None:
    assert visible_lines("one\ntwo\x1b\n  three") == "one\n    two\\x1b\n  three"


def test_errors_obey_nothing_and_forge_no_line(tmp_path: Path) -> None:
    save_alone({EVIL: np.zeros(3), "a": 1}, tmp_path)
    with pytest.raises(CheckpointNotFoundError) as found:
        load_whole(tmp_path, keys=["other"])
    assert str(found.value) == f"no key matches ['other']; there are, for example: {SHOWN}, a"
    with pytest.raises(StateDictMismatchError) as missing:
        load_alone({EVIL * 2: np.zeros(3), "k" * 10**6: np.zeros(3)}, tmp_path)
    assert str(missing.value).split("\n")[1].startswith(f"{SHOWN * 2}: the state_dict has a tensor")
    assert len(str(missing.value)) < 3 * MOST_LINE
    assert len(missing.value.problems[1]) > 10**6
    with pytest.raises(UnsupportedValueError, match="cannot be stored") as unfit:
        save_alone({EVIL: object()}, tmp_path)
    assert str(unfit.value).split("\n")[1].startswith(f"{SHOWN}: an object cannot be stored")


def test_a_line_of_the_log_is_one(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("paddle_dist_ckpt").warning("%s: %s", "/data", EVIL)
    logging.getLogger("paddle_dist_ckpt").warning("%s: %d", "/data", 3)
    shown = SHOWN.replace("\\n", "\n    ")
    assert caplog.messages == [f"/data: {shown}", "/data: 3"]
    assert caplog.records[1].args == ("/data", 3)


def test_a_traceback_in_the_log_obeys_nothing_and_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of others have their texts as they are, such as a key of a dict or a name of a file."""
    logger = logging.getLogger("paddle_dist_ckpt")
    try:
        raise LookupError(EVIL)
    except LookupError:
        logger.exception("failed")
    logger.error("failed", exc_info=True)  # by what there is no error of
    lines = caplog.text.splitlines()
    assert [line for line in lines if not line.startswith("    ")][1:2] == ["Traceback (most recent call last):"]
    assert "\n".join(lines).count("\n    LookupError: \\x1b]0;owned\\x07\\u202e\n    2026-03-01 ERROR forged") == 1
    assert not any(hidden in caplog.text for hidden in "\x1b\x07\u202e")


def test_a_record_whose_arguments_do_not_fit_is_left_to_logging() -> None:
    record = logging.LogRecord("paddle_dist_ckpt", logging.WARNING, "", 0, "%d", ("a",), None)
    assert is_made_visible(record)
    assert record.args == ("a",)


def test_what_many_ranks_say_is_not_cut() -> None:
    said = "; ".join(f"on rank {rank}: {'x' * 80}" for rank in range(256))
    assert str(CheckpointError(said)) == said
