"""``recipes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions
from paddle_dist_ckpt.cli.making import read_rules
from test.cli.commands import answer, fails, run, save_model
from test.jobs import load_whole, make_array, save_alone

FUSED = """
from paddle_dist_ckpt import concat, stored

fused = concat(stored("model.{i}.q").T, stored("model.{i}.k").T, axis=1)
recipes = {"net.{i}.qk": fused, "half": stored("model.w")[:2]}
gone = {"x": stored("model.v"), "y": stored("model.w")[:9], "half": stored("model.w").cast("float16")}
number = 7


def made():
    return {"half": stored("model.w")[:2].T}
"""
STATEMENTS = ["model.w -> _", "model.$LAYER_ID.q^T, model.$LAYER_ID.k^T -> net.$LAYER_ID.qk, axis=1"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    arrays = {f"{i}.{name}": make_array((3, 4), seed=10 * i + n) for i in (0, 1) for n, name in enumerate("qk")}
    save_model(tmp_path / "saved", {**arrays, "w": make_array((4, 5)), "b": make_array((6,))}, step=7)
    (tmp_path / "rules.py").write_text(FUSED, "utf-8")
    return tmp_path / "saved"


def test_what_is_made(saved: Path, tmp_path: Path) -> None:
    facts = answer("recipes", saved, tmp_path / "rules.py")
    assert {made["key"]: (made["shape"], made["dtype"], made["bytes"]) for made in facts["made"]} == {
        "net.0.qk": ([4, 6], "float32", 96),
        "net.1.qk": ([4, 6], "float32", 96),
        "half": ([2, 5], "float32", 40),
    }
    assert facts["made"][1]["recipe"] == "concat(stored('model.1.q').T, stored('model.1.k').T, axis=1)"
    part = {"stored": "model.1.k", "offset": [0, 0], "shape": [3, 4], "axes": [1, 0], "to": [0, 3]}
    assert facts["made"][1]["parts"][1] == part
    assert (facts["as_stored"], facts["unused"], facts["problems"], facts["bytes"]) == (["model.b"], [], [], 256)
    text = run("recipes", saved, tmp_path / "rules.py")
    assert (
        "net.1.qk  (4, 6) float32, reads 96 B\n  concat(stored('model.1.q').T, stored('model.1.k').T, axis=1)\n" in text
    )
    assert "  [0:4, 3:6]  from model.1.k [0:3, 0:4], axes (1, 0)\n" in text
    assert text.endswith("3 tensors made, 1 as stored; 256 B to be read\n")
    recipes: dict[str, Any] = {}
    exec(FUSED, recipes)
    whole = load_whole(saved, options=LoadOptions(recipes=recipes["recipes"]))
    assert {key for key, value in whole.items() if isinstance(value, np.ndarray)} == {
        "net.0.qk", "net.1.qk", "half", "model.b"
    }  # fmt: skip


def test_which_of_the_rules_and_of_the_keys(saved: Path, tmp_path: Path) -> None:
    (made,) = answer("recipes", saved, f"{tmp_path}/rules.py:made")["made"]
    assert made["recipe"] == "stored('model.w')[:2].T"
    assert [made["key"] for made in answer("recipes", saved, tmp_path / "rules.py", "net")["made"]] == [
        "net.0.qk", "net.1.qk"
    ]  # fmt: skip
    assert "half" not in run("recipes", saved, tmp_path / "rules.py", "*.qk")


def test_a_pattern_that_no_wanted_tensor_has(saved: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text("recipes = {}")
    assert "no wanted tensor matches 'x.*'" in fails("recipes", saved, rules, "x.*")
    rules.write_text("import sys; sys.exit(0)")
    assert "rules.py ends the program (0)" in fails("recipes", saved, rules)


def test_what_a_file_of_rules_prints_is_not_on_stdout(saved: Path, tmp_path: Path) -> None:
    rules = tmp_path / "loud.py"
    rules.write_text(f"{FUSED}\nprint('loud')\n\ndef louder():\n    print('louder')\n    return made()\n", "utf-8")
    assert answer("recipes", saved, rules)["made"]
    assert answer("recipes", saved, f"{rules}:louder")["made"]
    assert answer("merge", saved, tmp_path / "out", "--recipes", rules)["tensors"]


def test_what_does_not_fit(saved: Path, tmp_path: Path) -> None:
    facts = answer("recipes", saved, f"{tmp_path}/rules.py:gone", code=1)
    assert [made["key"] for made in facts["made"]] == ["half"]
    assert [problem.partition(";")[0] for problem in facts["problems"]] == [
        "x: it is made of model.v, which in the checkpoint is missing",
        "y: stored('model.w')[:9]: no such part of a tensor of shape [4, 5]",
    ]
    assert facts["unused"] == []  # what is asked for wrongly is asked for
    text = run("recipes", saved, f"{tmp_path}/rules.py:gone", code=1)
    assert "2 problems, for which a load would be refused:\n  x: it is made of" in text


def test_into_what_is_wanted(saved: Path, tmp_path: Path) -> None:
    target = {
        "net": {"1": {"qk": np.zeros((4, 6), "float32")}},
        "half": np.zeros((2, 5), "float16"),
        "more": np.zeros(2),
    }
    save_alone({**target, "large": list(range(3000))}, tmp_path / "target")  # a value, which no recipe makes
    facts = answer("recipes", saved, tmp_path / "rules.py", "--into", tmp_path / "target", code=1)
    assert [made["key"] for made in facts["made"]] == ["half", "net.1.qk"]
    assert facts["problems"] == [
        "more: the state_dict has a tensor, in the checkpoint it is missing",
        "half: the target has dtype float16, its recipe makes float32 (of model.w)",
    ]
    facts = answer("recipes", saved, tmp_path / "rules.py", "--into", tmp_path / "target", "--cast", code=1)
    assert len(facts["problems"]) == 1
    del target["more"]
    save_alone(target, tmp_path / "target")
    facts = answer("recipes", saved, tmp_path / "rules.py", "--into", tmp_path / "target", "--cast")
    assert facts["bytes"] == 136
    assert set(facts["unused"]) == {"model.0.q", "model.0.k", "model.b"}


def test_an_aoa_config(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")
    (tmp_path / "aoa.json").write_text(json.dumps({"aoa_statements": STATEMENTS}), "utf-8")
    (tmp_path / "list.json").write_text(json.dumps(STATEMENTS), "utf-8")
    (tmp_path / "aoa.py").write_text(f"aoa_config = {{'aoa_statements': {STATEMENTS!r}}}", "utf-8")
    for rules in ("aoa.json", "list.json", "aoa.py"):
        facts = answer("recipes", saved, tmp_path / rules)
        assert [made["key"] for made in facts["made"]] == ["net.0.qk", "net.1.qk"]
        assert facts["made"][1]["recipe"] == "concat(stored('model.1.q').T, stored('model.1.k').T, axis=1)"
        assert (facts["as_stored"], facts["unused"], facts["bytes"]) == (["model.b"], ["model.w"], 216)
    (tmp_path / "list.json").write_text(json.dumps(["gone -> x"]), "utf-8")
    facts = answer("recipes", saved, tmp_path / "list.json", code=1)
    assert (facts["made"], len(facts["problems"])) == ([], 1)
    assert facts["problems"][0].startswith("aoa_config: gone should be assigned before")
    save_alone({"b": np.zeros(6, "float32"), "c": np.zeros((1, 4, 5), "float32")}, tmp_path / "target")
    (tmp_path / "list.json").write_text(json.dumps(["model.b -> b", "model.w -> c"]), "utf-8")
    facts = answer("recipes", saved, tmp_path / "list.json", "--into", tmp_path / "target", code=1)
    assert [made["recipe"] for made in facts["made"]] == ["stored('model.b')", "stored('model.w')"]
    assert facts["problems"] == ["c: the target has shape [1, 4, 5], its recipe makes [4, 5] (of model.w)"]


def test_a_file_of_python_may_have_recipes_and_statements(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"{FUSED}\naoa_config = {{'aoa_statements': {STATEMENTS!r}}}", "utf-8")
    rules = read_rules(f"{tmp_path}/a.py")
    assert [*(rules.recipes or {})] == ["net.{i}.qk", "half"]
    assert (rules.aoa_config or {})["aoa_statements"] == STATEMENTS
    (tmp_path / "a.py").write_text(f"recipes = {STATEMENTS!r}", "utf-8")
    rules = read_rules(f"{tmp_path}/a.py")
    assert (rules.recipes, (rules.aoa_config or {})["aoa_statements"]) == (None, STATEMENTS)


def test_statements_that_change_nothing(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("paddle.distributed.flex_checkpoint.aoa.aoa_engine")
    statements = ["model.$LAYER_ID.qq^T -> model.$LAYER_ID.q", "model.$LAYER_ID.k -> net.$LAYER_ID.k"]
    (tmp_path / "list.json").write_text(json.dumps(statements), "utf-8")
    like_none = f"{statements[0]!r} (no stored tensor is like it)"
    assert answer("recipes", saved, tmp_path / "list.json")["idle"] == [like_none]
    assert f"\nstatements that change nothing: {like_none}\n" in run("recipes", saved, tmp_path / "list.json")
    save_alone({"model": {"0.q": np.zeros((4, 3), "float32")}}, tmp_path / "target")
    facts = answer("recipes", saved, tmp_path / "list.json", "--into", tmp_path / "target", code=1)
    assert facts["idle"] == [like_none, f"{statements[1]!r} (nothing asks for net.0.k, net.1.k)"]
    (problem,) = facts["problems"]
    assert problem.startswith(
        "model.0.q: the target has shape [4, 3], the checkpoint [3, 4], its transpose; 'model.$LAYER_ID.qq^T"
    )


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"aoa_statements": [], "aoa_config_revers": true}', "it has 'aoa_config_revers'"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("a.json", "{}", "it has no aoa_statements"),
        ("a.json", "7", "not int"),
        ("a.json", '{"aoa_statements": [7]}', "must have a list of str"),
        ("a.txt", "", "ends with .json or .py"),
        ("a.py", "x = 1", "has no recipes and no aoa_config"),
        ("a.py:y", "x = 1", "has no y"),
        ("a.py:x", "x = 1", "not int"),
        ("a.py:x", "x = 'a -> b'", "not str"),
        ("a.json", '{"aoa_config_reverse": true}', "must have aoa_statements"),
        ("a.py:x", "x = {'a': 'b'}", "recipes must have expressions"),
        ("b.py", None, "No such file"),
    ],
)
def test_rules_that_are_none(saved: Path, tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name.partition(":")[0]).write_text(text, "utf-8")
    assert says in fails("recipes", saved, tmp_path / name)


def test_of_much_that_is_made_the_first_is_shown(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.cli.recipes._MOST_KEYS", 1)
    monkeypatch.setattr("paddle_dist_ckpt.cli.recipes._MOST_PARTS", 1)
    text = run("recipes", saved, tmp_path / "rules.py")
    assert text.count("  from ") == 1
    assert "\n  … 1 more part; see --all\n… 2 more tensors; see --all\n" in text
    text = run("recipes", saved, tmp_path / "rules.py", "--all")
    assert text.count("  from ") == 5
    assert "see --all" not in text
