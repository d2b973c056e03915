"""``inspect``."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import LocalStorage, Metadata, SaveOptions, export, list_checkpoints
from paddle_dist_ckpt.cli import inspection
from paddle_dist_ckpt.cli.output import print_columns
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.manager.steps import NOTE, step_folder
from test.cli.commands import answer, fails, run, save_model
from test.jobs import make_array, save_alone, save_on, sharded
from test.pace import slowness
from test.readers.golden import GOLDEN

LAYER = {"weight": make_array((8, 6), "bfloat16"), "bias": make_array((6,))}


def layers(number: int) -> dict[str, np.ndarray]:
    found = {f"layers.{i}.{name}": array for i in range(number) for name, array in LAYER.items()}
    return {"embed": make_array((40, 5)), **found}


def test_a_checkpoint_is_shown(tmp_path: Path) -> None:
    save_model(tmp_path, layers(12), 3, step=7, note="x" * 9000)
    text = run("inspect", tmp_path)
    for part in ("checkpoint 3", "by 2 ranks", "25 tensors", "0…11", "12 alike", "(8, 6)", "bfloat16", "2 rows"):
        assert part in text
    assert "step  7" in text
    assert "a value of 8.7" in text
    assert "\x1b" not in text
    everything = run("inspect", tmp_path, "--all")
    assert everything.count("weight") == 12
    assert "alike" not in everything
    assert "weight" not in run("inspect", tmp_path, "--depth", 2)


def test_facts_in_json(tmp_path: Path) -> None:
    save_model(tmp_path, layers(2), 3, step=7, odd={1: float("nan")})
    save_model(tmp_path, layers(1), 4)
    found = answer("inspect", tmp_path, "--id", 3)
    assert (found["unique_id"], found["ids"], found["format"], found["world_size"]) == (3, [3, 4], "native", 2)
    assert [tensor["key"] for tensor in found["tensors"]] == [
        "model.embed",
        *(f"model.layers.{i}.{name}" for i in range(2) for name in ("bias", "weight")),
    ]
    assert found["tensors"][2] == {
        "key": "model.layers.0.weight",
        "kind": "tensor",
        "shape": [8, 6],
        "dtype": "bfloat16",
        "bytes": 96,
        "pieces": 2,
        "grid": [2, 1],
    }
    assert found["values"] == [
        {"key": "odd.1", "value": "NaN", "bytes": None},
        {"key": "step", "value": 7, "bytes": None},
    ]
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])


def test_values_are_in_the_order_of_their_keys_wherever_they_are_stored(tmp_path: Path) -> None:
    save_model(tmp_path, layers(1), z=1, large="x" * 9000, a=2)
    found = answer("inspect", tmp_path)["values"]
    assert [(value["key"], value["value"]) for value in found] == [("a", 2), ("large", None), ("z", 1)]
    assert found[1]["bytes"] > 9000


def test_of_many_values_the_first_are_shown(tmp_path: Path) -> None:
    save_model(tmp_path, layers(1), **{f"v{i:02}": i for i in range(25)})
    text = run("inspect", tmp_path)
    assert ("\nv19  19\n" in text, "v20" in text, "… 5 more values; see --all" in text) == (True, False, True)
    text = run("inspect", tmp_path, "--all")
    assert ("\nv24  24\n" in text, "more value" in text) == (True, False)


def test_how_tensors_are_cut(tmp_path: Path) -> None:
    grid = [Box((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)]
    columns = [Box((0, j), (4, 3)) for j in (0, 3)]
    odd = [Box((0, 0), (1, 6)), Box((1, 0), (3, 2)), Box((1, 2), (3, 4))]
    array = make_array((4, 6))
    save_on([{"g": sharded(array, grid), "c": sharded(array, columns), "o": sharded(array, odd), "w": array}], tmp_path)
    text = run("inspect", tmp_path)
    for key, cut in {"c": "2 columns", "g": "2x2 grid", "o": "3 pieces", "w": "whole"}.items():
        (line,) = (line for line in text.splitlines() if f"─ {key} " in line)
        assert line.endswith(cut)


def test_patterns(tmp_path: Path) -> None:
    save_model(tmp_path, layers(2), step=7)
    keys = [tensor["key"] for tensor in answer("inspect", tmp_path, "model.layers.1")["tensors"]]
    assert keys == ["model.layers.1.bias", "model.layers.1.weight"]
    keys = [tensor["key"] for tensor in answer("inspect", tmp_path, "*.bias")["tensors"]]
    assert keys == ["model.layers.0.bias", "model.layers.1.bias"]
    text = fails("inspect", tmp_path, "modle.layers.0.*")
    assert "no key of checkpoint 0 matches 'modle.layers.0.*'; there are, for example: model.layers.0.bias, " in text


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (None, ["a", "a.b", "a.b.c", "ab", "A", "b.a"]),
        ("a", ["a", "a.b", "a.b.c"]),
        ("a.", ["a.b", "a.b.c"]),
        ("a.b", ["a.b", "a.b.c"]),
        ("a*", ["a", "a.b", "a.b.c", "ab"]),
        ("*.[ac]", ["a.b.c", "b.a"]),
        ("", []),
    ],
)
def test_which_keys_a_pattern_asks_for(pattern: str | None, found: list[str]) -> None:
    keys = ["a", "a.b", "a.b.c", "ab", "A", "b.a"]
    assert [key for key in keys if inspection.matches(key, pattern)] == found


def test_what_is_not_there(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'none'}" in fails("inspect", tmp_path / "none")
    assert "holds no committed checkpoint" in fails("inspect", tmp_path)
    save_model(tmp_path, layers(1))
    assert "with unique_id 5; its only one has the id 0" in fails("inspect", tmp_path, "--id", 5)


def test_errors_advise_commands(tmp_path: Path) -> None:
    save_model(tmp_path / "a", layers(1))
    (tmp_path / "a" / "0.metadata").write_bytes(b"x")
    text = fails("inspect", tmp_path / "a")
    assert "paddle-dist-ckpt rebuild can make it again; to load an older checkpoint, pass its --id" in text
    (tmp_path / "a" / "0.metadata").unlink()
    assert "or paddle-dist-ckpt rebuild makes it again" in fails("inspect", tmp_path / "a")
    save_alone({"a": make_array((4,))}, step_folder(tmp_path / "steps", 1), 1)
    assert fails("verify", tmp_path / "steps").endswith("step-00000001, the latest\n")
    (tmp_path / "r.py").write_text("from paddle_dist_ckpt import stored\nrecipes = {'b': stored('no')}")
    text = fails("merge", tmp_path / "steps" / "step-00000001", tmp_path / "out", "--recipes", tmp_path / "r.py")
    assert "b: it is made of no, which in the checkpoint is missing" in text
    assert "LoadOptions" not in text


def test_a_folder_of_steps(tmp_path: Path) -> None:
    for step, loss in ((100, 0.5), (200, 0.25), (300, 0.75)):
        note = {NOTE: {"step": step, "metrics": {"loss": loss}}}
        save_alone({"a": make_array((4,))}, step_folder(tmp_path, step), step, options=SaveOptions(user_metadata=note))
    step_folder(tmp_path, 400).mkdir()
    (tmp_path / "notes.txt").write_text("of no step")
    found = answer("inspect", tmp_path)
    assert [(step["step"], step["metrics"]) for step in found["steps"]] == [
        (100, {"loss": 0.5}),
        (200, {"loss": 0.25}),
        (300, {"loss": 0.75}),
    ]
    assert (found["latest"], found["lowest"], found["highest"]) == (300, {"loss": 200}, {"loss": 300})
    assert found["uncommitted"] == ["step-00000400"]
    text = run("inspect", tmp_path)
    assert "loss is lowest at step 200, highest at step 300" in text
    rows = [line.split() for line in text.splitlines()[2:5]]  # with the size, and its unit, and the time
    assert [[row[0], *row[4:]] for row in rows] == [["100", "0.5"], ["200", "0.25"], ["300", "0.75", "latest"]]
    assert "step-00000400 holds no checkpoint: it is being saved, or a save has failed" in text
    assert f"pass {step_folder(tmp_path, 300)}, the latest" in fails("inspect", tmp_path, "a")
    (step_folder(tmp_path, 300) / "300.metadata").write_bytes(b"x")
    found = answer("inspect", tmp_path, code=1)
    assert (found["latest"], found["uncommitted"], [*found["unread"]]) == (200, ["step-00000400"], ["step-00000300"])
    assert "step-00000300 cannot be read: " in run("inspect", tmp_path, code=1)


def test_steps_of_many_metrics(tmp_path: Path) -> None:
    """Of these the first stand in the table, which would have as many cells as all metrics times all steps."""
    for step in range(3):
        metrics = {"a": 1.0, "b": math.nan, "c": math.inf} | {f"m{step}_{i:03}": float(i) for i in range(500)}
        note = {NOTE: {"step": step, "metrics": metrics}}
        save_alone({"a": make_array((4,))}, step_folder(tmp_path, step), step, options=SaveOptions(user_metadata=note))
    found = answer("inspect", tmp_path)
    of_all = {"a": 2, "c": 2} | {f"m{step}_{i:03}": step for step in range(3) for i in range(500)}
    assert found["lowest"] == found["highest"] == of_all
    text = run("inspect", tmp_path)
    assert "m0_016 " in text
    assert "m0_017" not in text
    assert "1,483 more metrics; see --json" in text


def test_other_formats_by_folder_and_by_file(tmp_path: Path) -> None:
    shown = answer("inspect", GOLDEN / "torch-dcp-2.13")
    assert (shown["format"], shown["world_size"]) == ("torch_dcp", 2)
    assert {value["key"] for value in shown["values"]} == {"lr", "note"}
    shutil.copy(GOLDEN / "hf-safetensors" / "model-00001-of-00002.safetensors", tmp_path / "one.safetensors")
    (tmp_path / "other.txt").write_text("not of it")
    assert answer("inspect", tmp_path / "one.safetensors")["format"] == "safetensors"
    assert "saved    by 2 ranks" in run("inspect", GOLDEN / "paddle-2.6.2")


def test_what_a_terminal_would_obey_is_made_visible(tmp_path: Path) -> None:
    save_alone({"a\x1b[2J\nb": make_array((4,)), "v": "x\x1b]0;title\x07\ud800"}, tmp_path)
    text = run("inspect", tmp_path)
    assert "a\\x1b[2J\\nb" in text
    assert "\x1b" not in text
    found = answer("inspect", tmp_path)
    assert found["tensors"][0]["key"] == "a\x1b[2J\nb"
    assert found["values"][0]["value"] == "x\x1b]0;title\x07\\ud800"
    assert "\\x1b" in fails("cat", tmp_path, "\x1b")


def test_a_single_file_is_called_by_its_own_name(tmp_path: Path) -> None:
    save_model(tmp_path / "a", layers(1))
    file = tmp_path / "model.pdparams"
    export(tmp_path / "a", file, "pdparams")
    assert run("inspect", file).startswith(f"{file}  checkpoint")
    assert answer("inspect", file)["path"] == answer("verify", file)["path"] == str(file)
    found = answer("diff", tmp_path / "a", file)
    assert (found["equal"], found["a"]["path"], found["b"]["path"]) == (True, str(tmp_path / "a"), str(file))


def test_other_checkpoints_of_the_folder_are_named(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        save_alone({"a": make_array((4,))}, tmp_path, number)
    assert "\nother ids  1, 5\n" in run("inspect", tmp_path, "--id", 2)


def test_other_checkpoints_of_another_format_are_named(tmp_path: Path) -> None:
    save_alone({"a": make_array((4,))}, tmp_path / "own")
    for number in (0, 3):
        export(tmp_path / "own", tmp_path / f"{number}", "paddle")
        data = (tmp_path / f"{number}" / "0.metadata").read_bytes()
        (tmp_path / f"{number}.metadata").write_bytes(data.replace(b"0_0.distcp", f"0_{number}.distcp".encode()))
        shutil.copy(tmp_path / f"{number}" / "0_0.distcp", tmp_path / f"0_{number}.distcp")
    assert "\nother ids  0\n" in run("inspect", tmp_path)
    assert answer("inspect", tmp_path, "--id", 0)["ids"] == list_checkpoints(tmp_path) == [0, 3]
    save_alone({"a": make_array((4,))}, tmp_path, 7)
    assert answer("inspect", tmp_path, "--id", 0)["ids"] == [0, 3, 7]


def test_what_is_not_read_of_another_format_is_said_with_the_reason(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F4", "shape": [2], "data_offsets": [4, 5]},
    }
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(5))
    text = run("inspect", tmp_path)
    assert "\nnot read: 1 key\n" in text
    assert "F4" in text.partition("not read")[2]
    assert "F4" in answer("inspect", tmp_path, "b")["left_out"]["b"]
    assert answer("inspect", tmp_path, "a")["left_out"] == {}


def test_layers_that_differ_are_lines_of_their_own(tmp_path: Path) -> None:
    arrays = {f"{i}.w": make_array((4,) if i == 2 else (6,)) for i in range(4)} | {"9.v": make_array((6,))}
    save_alone({"layers": arrays}, tmp_path)
    lines = run("inspect", tmp_path).splitlines()
    assert [line.partition("  ")[0] for line in lines[-6:-5]] == ["└─ layers"]
    assert [line[3:].lstrip(" │├└─").partition("  ")[0] for line in lines[-5:]] == ["0…1", "w", "2.w", "3.w", "9.v"]


def test_of_very_many_names_no_more_levels_are_shown_than_fit(tmp_path: Path) -> None:
    save_alone({f"part{chr(97 + i // 26)}{chr(97 + i % 26)}": {"x": make_array((i + 1,))} for i in range(70)}, tmp_path)
    text = run("inspect", tmp_path)
    assert text.count("part") == 70
    assert text == run("inspect", tmp_path, "--depth", 1)


def test_a_step_that_is_removed_while_steps_are_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_alone({"a": make_array((4,))}, step_folder(tmp_path, step), step)
    read = inspection.read_checkpoint

    def removed(storage: LocalStorage, unique_id: int) -> Metadata:
        if unique_id == 1:
            shutil.rmtree(storage.location)
        return read(storage, unique_id)

    monkeypatch.setattr(inspection, "read_checkpoint", removed)
    assert [step["step"] for step in answer("inspect", tmp_path)["steps"]] == [2]


def test_an_error_that_nobody_has_thought_of_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unforeseen(*_: object) -> None:
        raise KeyError("layers")

    save_alone({"a": make_array((4,))}, tmp_path)
    monkeypatch.setattr(inspection, "read_checkpoint", unforeseen)
    assert fails("inspect", tmp_path) == "error: KeyError: 'layers' (--debug shows where)\n"


def test_columns_stand_below_each_other_whatever_the_letters(tmp_path: Path) -> None:
    """Chinese letters are as wide as two others on a terminal."""
    save_alone({"权重": make_array((4,)), "w\u0301": make_array((40,)), "步数": 1, "steps": 2}, tmp_path)
    lines = run("inspect", tmp_path).split("\n")
    assert lines[-3:-1] == ["steps  2", "步数   1"]
    assert [line for line in lines if line.startswith(("├", "└"))] == [
        "├─ w\u0301     (40)   float32  160 B  whole",
        "└─ 权重  (4)    float32   16 B  whole",
    ]


def test_the_width_of_long_keys_is_known_soon(capsys: pytest.CaptureFixture[str]) -> None:
    """Also behind the lines of a tree, which are not ASCII: they had each letter looked at."""
    rows = [(f"\u2502   \u251c\u2500\u2500 {'a' * 500}{i}", "1") for i in range(20_000)]
    start = time.process_time()
    print_columns([*rows, ("\u6743\u91cd", "2")])
    assert time.process_time() - start < 1.7 * slowness()
    assert f"{'a' * 500}7  1\n" in capsys.readouterr().out
