"""JSON documents of any size: the same text, in however many pieces it is made."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.cli import documents


@dataclass
class Facts:
    """As commands have them."""

    name: str
    rows: list[Any]


VALUES: dict[str, Any] = {
    "numbers": list(range(5000)),
    "a text": 'a\nb"\\é\u202e😀\x1b' * 3000,
    "half of a pair": "\ud83d" * 50,
    "keys that are halves of pairs": [{"\ud83d": 1, "\\ud83d": [2] * 3000}],
    "nested": [[], [[1, 2.5, None], {"a": [True] * 3000, "b": {}}], (4, (5,))] * 3,
    "a dict of much": {f"k{i}" * 40: ["x" * i] * 3 for i in range(300)},
    "keys that are no text": {1: 2, "a": [3] * 2000},
    "what JSON lacks": [float("nan"), float("inf"), 2**70, b"ab", 1 + 2j, -0.0],
    "numpy's": [np.float64(0.5), np.float32(0.5), np.str_("a"), np.zeros(2), np.float64("nan")],
    "rows": [Facts("a", [1, 2]), Facts("b", [{"c": [7] * 3000}]), Facts("c", [b"ab", np.float64(1), {1: b"ab"}])],
    "a key of much": {"k" * 100_000: 1, "l": []},
    "a hidden character": "a\x7fb",
    "deep lists": [functools.reduce(lambda inner, _: [inner, 1], range(80), list(range(i))) for i in range(50)],
    "nothing": [],
}


@pytest.mark.parametrize("name", VALUES)
def test_the_text_does_not_depend_on_its_pieces(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for together, piece in [(10**9, 10**9), (1000, 1 << 16), (50, 100), (3, 7)]:
        monkeypatch.setattr(documents, "_TOGETHER", together)
        monkeypatch.setattr(documents, "_PIECE", piece)
        for document in ({"key": "a", "value": VALUES[name]}, Facts("a", [VALUES[name], 1])):
            documents.print_json(document)
            texts.append(capsys.readouterr().out)
    assert texts == texts[:2] * 4
    assert texts[0].isascii() or "é" in texts[0]
    assert "\x7f" not in texts[0]
    assert json.loads(texts[0])["key"] == "a"
    assert "\n  " in texts[0]
    assert "\n" + " " * 65 not in texts[0]


def test_values_come_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_TOGETHER", 20)
    value = {"n": list(range(99)), "t": "a\nb" * 999, "d": [{"a": [1.5, None, True, []]}] * 9}
    documents.print_json({"value": value, "odd": [math.nan, -math.inf, 2**64]})
    found = json.loads(capsys.readouterr().out)
    assert found == {"value": value, "odd": ["NaN", "-Infinity", str(2**64)]}


def test_what_json_lacks_is_text_wherever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = [np.float64(0.5), np.float32(0.5), np.float16("nan"), np.int64(-7), np.bool_(True)]
    odd = [b"ab", *numbers, np.complex64(1), {"x": b"ab"}, {1: b"ab"}, np.arange(2, dtype=np.int8)]
    documents.print_json(Facts("a", [*odd, Facts("b", odd)]))
    shown = ["b'ab'", 0.5, 0.5, "NaN", -7, True, "(1+0j)", {"x": "b'ab'"}, "{1: b'ab'}", "array([0, 1], dtype=int8)"]
    found = json.loads(capsys.readouterr().out)
    assert found == {"name": "a", "rows": [*shown, {"name": "b", "rows": shown}]}


def test_no_key_of_a_dict_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    alike, apart = {"\ud800": 1, "\\ud800": [2] * 3000}, {"\ud800": 1, "\\ud801": 2}
    documents.print_json({"alike": alike, "apart": apart})
    found = json.loads(capsys.readouterr().out)
    assert found["alike"].startswith(r"{'\ud800': 1, '\\ud800': [2, 2, ")
    assert found["apart"] == {r"\ud800": 1, r"\ud801": 2}


def test_few_items_are_made_text_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = documents._text
    monkeypatch.setattr(documents, "_text", lambda value, indent: sizes.append(len(value)) or real(value, indent))
    parts = list(documents._parts([[7] * 10_000, [[8] * 10] * 1000, "x" * 10**6, [Facts("a", [9] * 10**6)]], ""))
    facts = {"name": "a", "rows": [9] * 10**6}
    assert json.loads("".join(parts)) == [[7] * 10_000, [[8] * 10] * 1000, "x" * 10**6, [facts]]
    assert max(map(len, parts)) <= 1 << 17
    assert max(sizes) <= 1 << 16
