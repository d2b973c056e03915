"""The commands ``merge`` and ``convert``."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_dist_ckpt import ExportReport, list_checkpoints, verify
from test.cli.commands import answer, fails, run, save_model
from test.jobs import files_in, load_whole, make_array, same_bits, save_alone

ROOT = Path(__file__).resolve().parents[2]
ARRAYS = {"weight": make_array((40, 30)), "bias": make_array((7,), "int32"), "none": make_array((0, 3))}


def test_merge(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", ARRAYS, step=3)
    text = run("merge", tmp_path / "ckpt", tmp_path / "out")
    assert text.splitlines()[0] == f"{tmp_path / 'out'}  safetensors"
    assert "1 file, " in text
    assert "3 tensors" in text
    assert "left out: step" in text
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: same_bits(found[f"model.{key}"], array) for key, array in ARRAYS.items()} == dict.fromkeys(
        ARRAYS, True
    )


def test_convert_to_each_format(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", ARRAYS, step=3)
    for to in ("native", "safetensors", "paddle", "pdparams"):
        document = answer("convert", tmp_path / "ckpt", tmp_path / to, "--to", to)
        assert (document["path"], document["format"], document["tensors"]) == (str(tmp_path / to), to, 3)
        assert document["left_out"] == ([] if to in ("native", "pdparams") else ["step"])
    assert verify(tmp_path / "native").ok
    assert load_whole(tmp_path / "native")["step"] == 3
    assert (tmp_path / "paddle" / "0.metadata").is_file()
    assert pickle.loads((tmp_path / "pdparams").read_bytes())["step"] == 3


def test_recipes_from_a_file(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", ARRAYS, step=3)
    rules, imported = tmp_path / "rules.py", "from paddle_dist_ckpt import stored\n"
    rules.write_text(f"{imported}transposed = {{'model.weight': stored('model.weight').T}}\n")
    run("merge", tmp_path / "ckpt", tmp_path / "out", "--recipes", f"{rules}:transposed", "--prefix", "model")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(ARRAYS)
    assert same_bits(found["weight"], ARRAYS["weight"].T)
    assert same_bits(found["bias"], ARRAYS["bias"])
    rules.write_text(f"{imported}recipes = {{'x': stored('model.weigth')}}\n")
    to = ("convert", tmp_path / "ckpt", tmp_path / "other", "--to", "native", "--recipes")
    assert "x: it is made of model.weigth, which in the checkpoint is missing" in fails(*to, rules)
    assert "recipes come from a file that ends with .json or .py" in fails(*to, "rules.txt")
    assert not (tmp_path / "other").exists()


def test_a_part_of_an_older_checkpoint_converted(tmp_path: Path) -> None:
    array = np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10)
    save_model(tmp_path / "ckpt", {"weight": array, "other": array}, unique_id=4)
    save_model(tmp_path / "ckpt", ARRAYS, unique_id=9)
    options = ["--id", 4, "--prefix", "model", "--key", "model.w*", "--key", "model.x*", "--dtype", "bfloat16"]
    assert "no key matches ['model.x*']" in fails("merge", tmp_path / "ckpt", tmp_path / "out", *options)
    options = ["--id", 4, "--prefix", "model", "--key", "model.w*", "--dtype", "bfloat16"]
    run("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "native", *options)
    found = load_whole(tmp_path / "out")
    assert list(found) == ["weight"]
    assert same_bits(found["weight"], array.astype(ml_dtypes.bfloat16))


def test_many_files(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", ARRAYS)
    document = answer("merge", tmp_path / "ckpt", tmp_path / "out", "--max-shard-bytes", 100)
    assert sorted(document["files"]) == sorted(files_in(tmp_path / "out"))
    assert len(document["files"]) > 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "onnx"], "onnx"),
        ([], "--to"),
        (["--to", "native", "--dtype", "int8"], "dtype must be"),
        (["--to", "native", "--key", "nothing"], "no key matches"),
        (["--to", "native", "--id", "8"], "unique_id 8"),
        (["--to", "native", "--max-shard-bytes", "0"], "--max-shard-bytes"),
    ],
)
def test_wrong_use(tmp_path: Path, arguments: list[str], text: str) -> None:
    save_model(tmp_path / "ckpt", ARRAYS)
    assert text in fails("convert", tmp_path / "ckpt", tmp_path / "out", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_prefix_of_keys_that_are_not_nested_is_told_with_the_pattern_that_selects_them(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(
        {"model.embed.weight": ARRAYS["weight"], "head.weight": ARRAYS["weight"]}, tmp_path / "hf" / "model.safetensors"
    )
    to = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "native")
    assert "keys=['model.*'] selects them, or --key 'model.*' of a command" in fails(*to, "--prefix", "model")
    assert "selects them" not in fails(*to, "--prefix", "modle")
    assert "--key 'model.*' of a command" in fails(*to, "--prefix", "model.")
    assert answer(*to, "--key", "model.*")["tensors"] == 1


def test_keys_and_prefixes_are_named_as_they_are_typed(tmp_path: Path) -> None:
    """Of several branches with a prefix, that of the error, passed to the command, means one."""
    one, other = make_array((3,)), make_array((4,))
    save_alone({"a.b": {"x": one}, "a": {"b": {"x": other}}}, tmp_path / "ckpt")
    to = ("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "safetensors")
    told = re.search("such as '(.*)', means one of them", fails(*to, "--prefix", "a.b"))
    assert told is not None
    assert r"below the prefix 'b\.a'; there are" in fails(*to, "--prefix", r"b\.a")
    assert "; a prefix ends without a dot: 'a.b'\n" in fails(*to, "--prefix", "a.b.")
    assert r"no key matches ['a\.c']; there are" in fails(*to, "--key", r"a\.c")
    run(*to, "--prefix", told[1])
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["x"], one)


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", ARRAYS)
    assert "is there already" in fails("merge", tmp_path / "ckpt", tmp_path / "ckpt")
    assert "no folder" in fails("merge", tmp_path / "none", tmp_path / "out")


@pytest.mark.long
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    save_model(tmp_path / "ckpt", ARRAYS, step=3)
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--host", "127.0.0.1"]
    script = tmp_path / "paddle-dist-ckpt"  # as it is where the package is installed
    script.write_text(f"#!{sys.executable}\nfrom paddle_dist_ckpt.cli.main import main\n\nmain()\n", encoding="utf-8")
    script.chmod(0o755)
    command = [str(script), "convert", "ckpt", "out", "--to", "native", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*launch, "--log_dir", "logs", *command],
        env={**env, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    logs = [path.read_text(errors="replace") for path in sorted(tmp_path.glob("logs/workerlog.*"))]
    assert done.returncode == 0, done.stdout[-1000:] + "".join(log[-2000:] for log in logs)
    first, second = logs
    document = json.loads(first[first.index("\n{\n") :])
    assert '"files"' not in second
    ranks = {name.partition("_")[0] for name in document["files"] if name != "0.metadata"}
    assert ranks == {"0", "1"}
    assert list_checkpoints(tmp_path / "out") == [0]
    assert verify(tmp_path / "out").ok
    found = load_whole(tmp_path / "out")
    assert found["step"] == 3
    assert all(same_bits(found["model"][key], array) for key, array in ARRAYS.items())


@pytest.mark.parametrize(("rank", "says"), [("0", "1 file, 4 B, 1 tensor\n"), ("1", "")])
def test_of_several_ranks_the_first_says_what_was_written(
    rank: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ExportReport(path=str(tmp_path), format="native", files=("a",), total_bytes=4, tensors=1, left_out=())
    monkeypatch.setattr("paddle_dist_ckpt.export_calls.export", lambda *_, **__: report)
    monkeypatch.setenv("PADDLE_TRAINER_ID", rank)
    assert run("convert", tmp_path, tmp_path / "out", "--to", "native") == (
        f"{tmp_path}  native\n{says}" if says else ""
    )
    assert bool(run("convert", tmp_path, tmp_path / "out", "--to", "native", "--json")) == (rank == "0")
