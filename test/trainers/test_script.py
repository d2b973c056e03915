"""The scripts with PaddleFormers in the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paddle_dist_ckpt import read_metadata
from test.test_docs import MARKED, ROOT

SCRIPTS = [code for _, mark, code in MARKED if mark == "runnable with PaddleFormers"]
FOLDERS = ("model_state", "optimizer_state", "master_weight")
_INSTALL = "paddle_dist_ckpt.install()"


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "script.py", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def resumed(folder: Path, script: str, checkpoint: str) -> str:
    """The mean loss of the steps after a checkpoint, as the Trainer logs it."""
    done = run(folder, script, checkpoint)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"train_loss: ([\d.]+)", done.stdout + done.stderr)[-1]


def test_the_scripts_save_resume_and_go_back(tmp_path: Path) -> None:
    if find_spec("paddleformers") is None:
        pytest.skip("needs PaddleFormers: make test-trainers")
    train, go_back = SCRIPTS
    assert _INSTALL in train
    without = train.replace(_INSTALL, "")
    every_id = train.replace(_INSTALL, 'paddle_dist_ckpt.install(unique_id_policy="next")')

    done = run(tmp_path, train)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in FOLDERS:
        assert read_metadata(tmp_path / "output" / "checkpoint-2" / name).format == "native"
    refused = run(tmp_path, without, "output/checkpoint-2")
    assert refused.returncode != 0
    assert "can not parse the file" in refused.stderr
    done = run(tmp_path, go_back)
    assert done.returncode == 0, done.stderr[-2000:]

    loss = resumed(tmp_path, train, "output/checkpoint-2")
    assert resumed(tmp_path, without, "back/checkpoint-2") == loss

    (tmp_path / "every").mkdir()
    assert run(tmp_path / "every", every_id).returncode == 0
    refused = run(tmp_path / "every", every_id, "output/checkpoint-2")
    assert refused.returncode != 0
    assert "Found multiple metadata files" in refused.stderr
