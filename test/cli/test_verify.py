"""``verify`` and ``rebuild``."""

from __future__ import annotations

import os
from pathlib import Path

from paddle_dist_ckpt.cli.output import human_bytes
from test.cli.commands import answer, fails, run, save_model
from test.jobs import data_files, make_array, without_times
from test.readers.golden import GOLDEN

ARRAYS = {"a": make_array((40, 50)), "b": make_array((7,), "int64"), "c": make_array((9000, 40))}


def test_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS, 3)
    text = run("verify", tmp_path)
    assert "2 files, " in text
    assert text.endswith(", every block is as it was written\n")
    found = answer("verify", tmp_path, "--id", 3)
    sizes = [path.stat().st_size for path in data_files(tmp_path)]
    assert (found["ok"], found["files"], found["total_bytes"]) == (True, 2, sum(sizes))
    assert found["verified_bytes"] == sum(array.nbytes for array in ARRAYS.values())
    assert found["problems"] == []


def test_every_damaged_tensor_and_file_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS)
    first, second = data_files(tmp_path)
    data = bytearray(first.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for place in (start, len(data) - 1):  # in the first tensor of the file, and in the last
        data[place] ^= 1
    first.write_bytes(data)
    second.unlink()
    found = answer("verify", tmp_path, code=1)
    assert not found["ok"]
    assert [problem["file"] for problem in found["problems"]] == [first.name, first.name, second.name]
    text = run("verify", tmp_path, code=1)
    for problem in found["problems"]:
        assert problem["text"] in text
    assert sum("model." in line and first.name in line for line in text.splitlines()) == 2


def test_damage_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"of another encoding: \xff")
    save_model(folder, ARRAYS)
    path = data_files(folder)[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = answer("verify", folder, code=1)["problems"]
    assert "of another encoding: \\udcff/" in problem["text"]


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    assert "there is no folder" in fails("verify", tmp_path / "none")
    save_model(tmp_path, ARRAYS, 1)
    (tmp_path / "1.metadata").write_bytes(b"nonsense")
    assert "paddle-dist-ckpt rebuild can make it again" in fails("verify", tmp_path)


def test_a_lost_metadata_file_is_made_again(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS, 4)
    before = without_times(tmp_path / "4.metadata")
    (tmp_path / "4.metadata").unlink()
    save = data_files(tmp_path)[0].name.split(".")[1]
    assert answer("rebuild", tmp_path) == {"path": str(tmp_path), "unique_id": 4, "save_id": save, "files": 2}
    assert (tmp_path / "4.metadata").read_bytes() == before
    assert "no complete save without a .metadata; there is one with each of these ids: 4" in fails("rebuild", tmp_path)
    assert f"there is no folder {tmp_path}/nowhere" in fails("rebuild", tmp_path / "nowhere")
    (tmp_path / "4.metadata").unlink()
    assert "recovered checkpoint 4" in run("rebuild", tmp_path, "--save", save)


def test_it_is_said_what_could_be_seen_of_other_formats(tmp_path: Path) -> None:
    folder = GOLDEN / "torch-dcp-2.13"
    found = answer("verify", folder)
    assert found["verified_bytes"] > 0
    size = human_bytes(found["verified_bytes"])
    assert run("verify", folder).endswith(f", nothing is missing; checksums are there of {size}, and match\n")
    text = run("verify", GOLDEN / "hf-safetensors")
    assert text.endswith(", nothing is missing (there are no checksums)\n")
