"""Commands on checkpoints as somebody may make them who means harm."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from test.cli.commands import answer, fails, run
from test.jobs import save_alone
from test.pace import slowness
from test.rooms import ROOT
from test.strategies import some
from test.torture.budgets import Cost, bytes_on_disk, cost_of
from test.torture.crafting import SAVE, Entry, column, dumped, write_checkpoint, write_metadata

ODD = {
    "/damaged": b'{"float":"7"}',
    "/int": dumped({"int": "0x" + "f" * 4000}),
    "/text": b'{"array":["<U1",[1],"/////w=="]}',
    "/time": b'{"array":["<M8[0s]",[1],"/////////38="]}',
}


def cost(folder: Path, command: str, *args: object) -> Cost:
    """What a command costs that must succeed."""
    small = folder / "small"
    write_checkpoint(small, {"/w": Entry([4], [[]])})
    found = cost_of(lambda path: run(command, path, *args), small, folder / "large")
    assert not found.kinds, found.outcome
    return found


def check_budget(found: Cost, on_disk: int) -> None:
    assert found.memory < on_disk + (64 << 20)
    assert found.seconds < (1 + on_disk / (10 << 20)) * slowness()


@pytest.mark.parametrize("odd", sorted(ODD))
def test_a_value_that_cannot_be_shown_hides_no_other(tmp_path: Path, odd: str) -> None:
    page = tmp_path / "page.html"
    write_checkpoint(tmp_path / "c", {}, [("/a", b"7"), (odd, ODD[odd]), ("/z", b"8")])
    text = run("inspect", tmp_path / "c")
    assert {line.split()[0]: line.split()[-1] for line in text.splitlines()[-3:]} | {"a": "7", "z": "8"} == {
        line.split()[0]: line.split()[-1] for line in text.splitlines()[-3:]
    }
    assert {value["key"]: value["value"] for value in answer("inspect", tmp_path / "c")["values"]}["z"] == 8
    assert run("cat", tmp_path / "c", "z") == "8\n"
    run("report", tmp_path / "c", "--out", page)
    assert page.stat().st_size


def test_keys_of_user_metadata_are_of_any_kind(tmp_path: Path) -> None:
    user = {"dict": [[{"int": "0x" + "f" * 4000}, 1], ["b", 2]]}
    write_checkpoint(tmp_path / "c", {}, edit=lambda body: body.__setitem__("user_metadata", user))
    assert "metadata  (an integer of 16,000 bits) = 1\nmetadata  b = 2\n" in run("inspect", tmp_path / "c")
    run("report", tmp_path / "c", "--out", tmp_path / "page.html")


def test_keys_of_many_digits_and_parts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"/" + "1" * 5000: Entry([4], [[]]), "/" + "a." * 5000 + "a": Entry([4], [[]])})
    for args in ((), ("--all",)):
        text = run("inspect", tmp_path, *args)
        assert "characters … 1111" in text
        assert re.search(r"characters … [.a]+ ", text)
        assert len(text) < 5000


@pytest.mark.parametrize("shape", some([[1 << 27, 0], [8] * 9, [8] * 13, [2] * 20, [40] * 4], 3))
def test_of_a_tensor_of_any_shape_about_a_thousand_items_are_printed(tmp_path: Path, shape: list[int]) -> None:
    write_checkpoint(tmp_path / "large", {"/w": Entry(shape, [[]] * len(shape), "uint8")})
    for args in (("w",), ("w", "--json")):
        check_budget(found := cost(tmp_path, "cat", *args), bytes_on_disk(tmp_path / "large"))
        assert found.outcome
    assert len(run("cat", tmp_path / "large", "w")) < 20_000


def test_items_are_those_of_the_slice_that_is_named(tmp_path: Path) -> None:
    array = np.arange(4**7, dtype=np.float32).reshape((4,) * 7)
    write_checkpoint(tmp_path, {"/w": Entry(array.shape, [[]] * 7, data=array.tobytes())})
    said = run("cat", tmp_path, "w").split("\n", 2)
    assert said[1] == "of the first 1 dimension only the first item; see --slice"
    assert said[2] == np.array2string(array[0], threshold=1, edgeitems=1) + "\n"


def test_statistics_take_little_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "large", {"/w": Entry([48 << 20], [[]], "uint8", 0, os.urandom(1 << 20) * 48)})
    found = cost(tmp_path, "cat", "w", "--stats")
    assert found.memory < 64 << 20


def test_statistics_of_holes_are_known(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    size = 1 << 32
    head = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "large" / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.write(np.array([3, -4], np.float32).tobytes())
        file.truncate(8 + len(head) + size)
    check_budget(cost(tmp_path, "cat", "w", "--stats"), bytes_on_disk(tmp_path / "large"))
    found = answer("cat", tmp_path / "large", "w", "--stats")["stats"]
    assert (found["elements"], found["zero"]) == (size // 4, size // 4 - 2)
    assert (found["min"], found["max"], found["norm"]) == (-4, 3, 5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 150,000 tensors in 5 MiB."""
    folder, number = tmp_path_factory.mktemp("wide"), 150_000
    (folder / "large").mkdir()
    nothing = column(np.zeros(number, np.uint8))
    table = {
        "paths": [f"/model.layers.{i:06d}.weight" for i in range(number)],
        "dtypes": ["uint8"],
        "dtype": nothing,
        "kind": nothing,
        "layouts": [{"shape": [1], "cuts": [[]]}],
        "layout": nothing,
        "shard_file": nothing,
    }
    common = {"save": SAVE, "unique_id": 0, "world_size": 1, "created": "x", "library": "x", "block_bytes": 1 << 20}
    files = [[f"0_0.{SAVE}.0.safetensors", 1 << 40, "1" * 16]]
    more = {"paddle": None, "tensors": table, "user_metadata": None, "files": files, "values": []}
    write_metadata(folder / "large", dumped({**common, **more}))
    return folder


@pytest.mark.parametrize(
    ("args", "memory", "seconds"),
    [
        (("inspect",), 69, 3.0),
        pytest.param(("inspect", "--all"), 100, 12.0, marks=pytest.mark.long),  # with what it prints
        pytest.param(("inspect", "--json"), 120, 8.0, marks=pytest.mark.long),
        (("report",), 90, 4),
    ],
)
def test_very_many_tensors_are_shown_in_little_memory(
    wide: Path, tmp_path: Path, args: tuple[str, ...], memory: int, seconds: float
) -> None:
    found = cost(wide, *args, *(("--out", tmp_path / "page.html") if args == ("report",) else ()))
    assert found.memory < memory << 20
    assert found.seconds < seconds * slowness()


def test_recipes_for_a_tensor_of_very_many_shards_are_shown_soon(tmp_path: Path) -> None:
    shards = 1 << 16
    write_checkpoint(tmp_path / "large", {"/w": Entry([shards], [list(range(1, shards))], "uint8")})
    rules = tmp_path / "rules.py"
    rules.write_text("from paddle_dist_ckpt import stored\nrecipes = {'y': stored('w')[1:]}\n")
    check_budget(found := cost(tmp_path, "recipes", rules), bytes_on_disk(tmp_path / "large"))
    assert "y  (65535) uint8, reads 64 KiB\n" in found.outcome


def test_recipes_beside_very_many_tensors_take_little(tmp_path: Path) -> None:
    save_alone(
        {"w": np.ones(4, np.float32)} | {f"layer.{i}": np.zeros(1, np.uint8) for i in range(60_000)}, tmp_path / "large"
    )
    rules = tmp_path / "rules.py"
    rules.write_text("from paddle_dist_ckpt import stored\nrecipes = {'y': stored('w')[1:]}\n")
    check_budget(found := cost(tmp_path, "recipes", rules), bytes_on_disk(tmp_path / "large"))
    assert "1 tensor made, 60,000 as stored" in found.outcome


def test_keys_like_a_missing_one_are_found_soon(wide: Path) -> None:
    before = time.process_time()
    text = fails("cat", wide / "large", "model.layers.001234.wieght")
    assert time.process_time() - before < 3 * slowness()
    assert "for example: model.layers.001234.weight, " in text


@pytest.mark.parametrize("asks", [True, False])
def test_the_question_and_the_log_obey_nothing(tmp_path: Path, asks: bool) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    if asks:
        write_checkpoint(tmp_path, {}, edit=lambda body: body.__setitem__("created", evil))
        args = ["delete", str(tmp_path), "0"]
    else:
        step = tmp_path / evil / "step-00000001"
        write_checkpoint(step, {})
        (step / "0.metadata").rename(step / "1.metadata")
        args = ["inspect", str(tmp_path / evil)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "paddle_dist_ckpt", *args], {"PYTHONPATH": str(ROOT)})
    os.write(terminal, b"n\n")
    said = b""
    while True:
        try:
            said += os.read(terminal, 4096)
        except OSError:
            break
    os.waitpid(pid, 0)
    assert b"owned" in said, said
    assert b"\x1b]" not in said


def test_no_line_is_forged(tmp_path: Path) -> None:
    forged = "x\ngood  checkpoint 0: every block is as it was written\u202e"
    write_checkpoint(tmp_path, {f"/{forged}": Entry([3], [[]], "uint8", data=b"abc")})
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"d")
    text = run("verify", tmp_path, code=1)
    assert "\\ngood" in text
    assert "\ngood" not in text
    assert "\u202e" not in text


def test_names_of_metrics_obey_nothing_and_long_ones_are_shortened(tmp_path: Path) -> None:
    note = {"dict": [["step", 1], ["metrics", {"dict": [["\x1b]0;owned\x07\n", 1.0], ["l" * 10**6, 2.0]]}]]}
    user = {"dict": [["checkpoint_manager", note]]}
    for step in (1, 2):
        folder, facts = tmp_path / f"step-{step:08d}", {"user_metadata": user, "unique_id": step}
        write_checkpoint(folder, {}, edit=lambda body, facts=facts: body.update(facts))  # type: ignore[misc]
        (folder / "0.metadata").rename(folder / f"{step}.metadata")
    found = fails("prune", tmp_path, "--keep-last", 1, "--best", "loss:min", "--yes")
    assert "their metrics: \\x1b]0;owned\\x07\\n, lll" in found
    assert len(found) + len(run("inspect", tmp_path)) < 20_000


def test_keys_that_differ_and_are_long_are_shortened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {}, [("/" + "k" * 10**6, b"1")])
    write_checkpoint(tmp_path / "b", {}, [("/" + "l" * 10**6, b"1")])
    text = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "only in a: kkk" in text
    assert len(text) < 10_000


def test_json_has_no_marks_of_direction(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, [("/v", json.dumps("a\u202e\U000e0001\x9b学").encode())])
    text = run("cat", tmp_path, "v", "--json")
    assert '"value": "a\\u202e\\udb40\\udc01\\u009b学"' in text
    assert json.loads(text)["value"] == "a\u202e\U000e0001\x9b学"


def test_a_json_document_of_many_items_is_as_one_of_few(tmp_path: Path) -> None:
    array = np.arange(2500 * 2, dtype=np.float32).reshape(2500, 2)
    write_checkpoint(tmp_path, {"/w": Entry(array.shape, [[], []], data=array.tobytes())})
    document = {"key": "w", "kind": "tensor", "dtype": "float32", "shape": array.shape, "slice": None}
    assert run("cat", tmp_path, "w", "--json") == json.dumps({**document, "values": array.tolist()}, indent=2) + "\n"


def test_a_report_names_files_that_cannot_be_looked_at(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    file.unlink()
    file.symlink_to(file.name)
    run("report", tmp_path, "--out", tmp_path / "page.html")
    assert "it is no file" in (tmp_path / "page.html").read_text()
