"""Models that PaddleFormers saves for others and loads, and jobs that begin with more than their own checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from test.trainers.jobs import CUT, KINDS, LAYOUTS, PLACES, STAGES, Job, Jobs, Run, assert_resumed, differences, whole
from test.trainers.untouched import watched

SOURCES = ("one", "sharding2 of version 2", CUT)
PAIRS = [
    ("trained", "one", "data2"),
    ("trained", "sharding2 of version 2", "one"),
    *(("bfloat16", source, target) for source in SOURCES for target in LAYOUTS),
]
TARGETS = [(kind, target) for kind, target in PLACES if kind != "elementwise"]
FROM_HF: dict[str, Any] = {"load_from_hf": True, "ignore_load_lr_and_optim": True}
GENERATED = "flex-ckpt.auto_generated.metadata"

readers = pytest.mark.parametrize("reader", ["Paddle", "ours"])
ways = pytest.mark.parametrize(("writer", "reader"), [("Paddle", "Paddle"), ("Paddle", "ours"), ("ours", "ours")])


@readers
@pytest.mark.parametrize(("kind", "source", "target"), PAIRS)
def test_from_pretrained(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, reader: str
) -> None:
    folder, expected = jobs.exported(kind, source, True)
    found = whole(run("from_pretrained", Job(target, str(tmp_path), ours=reader == "ours", **KINDS[kind]), str(folder)))
    assert not differences(found, {key: value for key, value in whole(expected).items() if key in found})
    assert len(found) == 21
    assert reader == "Paddle" or not (folder / GENERATED).exists()


@readers
@pytest.mark.parametrize("kind", ["trained", "bfloat16"])
def test_from_pretrained_in_stages(run: Run, jobs: Jobs, tmp_path: Path, kind: str, reader: str) -> None:
    """The ranks have other statements, one for each key of their stage. The last stage's copy of what is tied is
    under a key that it has for itself alone."""
    folder, expected = jobs.exported(kind, "one", True)
    found = run("from_pretrained", Job(STAGES, str(tmp_path), ours=reader == "ours", **KINDS[kind]), str(folder))
    first, last = (outcome.parts.keys() for outcome in found)
    assert first - last
    assert last - first
    tensors = whole(found)
    assert not differences(tensors, {key: value for key, value in whole(expected).items() if key in tensors})
    assert len(tensors) == 21


@pytest.mark.parametrize("way", ["from_pretrained", "LoRA", "load_from_hf"])
@pytest.mark.parametrize("target", ["one", "sharding2 of version 2", CUT])
def test_a_read_only_folder(run: Run, jobs: Jobs, tmp_path: Path, target: str, way: str) -> None:
    """Nothing is created or changed in it, not for a moment. Paddle's own load writes a file there."""
    kind = "bfloat16"
    exported, _ = jobs.exported(kind, "one", True, **({"lora": True} if way == "LoRA" else {}))
    folder = tmp_path / "folder"
    shutil.copytree(exported, folder, ignore=shutil.ignore_patterns(GENERATED))  # which other tests may have left
    results = []
    for ours in (True, False):
        job = Job(target, str(tmp_path / str(ours)), ours=ours, lora=way == "LoRA", **KINDS[kind])
        with watched(folder, locked=ours) as happened:
            if way == "load_from_hf":
                job = dataclasses.replace(job, resume=str(folder), arguments=FROM_HF)
                results.append(whole(run("train", job)))
            else:
                results.append(whole(run("from_pretrained", job, str(folder))))
        if ours:
            assert not happened
        else:
            assert f"{GENERATED}: was created" in happened
    assert not differences(*results)


@readers
@pytest.mark.parametrize(("kind", "target"), TARGETS)
def test_load_from_hf(run: Run, jobs: Jobs, tmp_path: Path, kind: str, target: str, reader: str) -> None:
    folder = str(jobs.exported(kind, "one", True)[0])
    _, expected = jobs.trained(kind, "one", False, resume=folder, arguments=FROM_HF)
    job = Job(target, str(tmp_path), folder, reader == "ours", **KINDS[kind], arguments=FROM_HF)
    assert not differences(whole(run("train", job)), whole(expected))
    assert differences(whole(expected), whole(jobs.trained(kind, "one", False)[1]))


@ways
@pytest.mark.parametrize(("kind", "source", "target"), PAIRS)
def test_lora(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, writer: str, reader: str
) -> None:
    folder, _ = jobs.trained(kind, source, writer == "ours", lora=True)
    _, expected = jobs.trained(kind, target, False, lora=True)
    begin = str(folder / "checkpoint-2")
    outcomes = run("train", Job(target, str(tmp_path), begin, reader == "ours", lora=True, **KINDS[kind]))
    assert_resumed(outcomes, expected)
    assert sum("lora_" in key and key.endswith("moment1_0") for key in whole(outcomes)) == 8


@readers
@pytest.mark.parametrize(("kind", "source", "target"), PAIRS)
def test_lora_from_pretrained(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, source: str, target: str, reader: str
) -> None:
    folder, expected = jobs.exported(kind, source, True, lora=True)
    job = Job(target, str(tmp_path), ours=reader == "ours", lora=True, **KINDS[kind])
    found = whole(run("from_pretrained", job, str(folder)))
    assert not differences(found, {key: value for key, value in whole(expected).items() if key in found})
    assert sum("lora_" in key for key in found) == 8
    assert reader == "Paddle" or not (folder / GENERATED).exists()


@pytest.mark.parametrize(
    ("kind", "target"),
    [*((kind, target) for kind, target in PLACES if kind == "trained"), ("bfloat16", "sharding2 of version 2")],
)
@readers
def test_resume_after_a_zero_cost_save(
    run: Run, jobs: Jobs, tmp_path: Path, kind: str, target: str, reader: str
) -> None:
    """In bfloat16 such a save keeps master weights only, from which other layouts do not resume."""
    folder, _ = jobs.trained(kind, "sharding2 of version 2", False, zero_cost=True)
    _, expected = jobs.trained(kind, target, False)
    outcomes = run("train", Job(target, str(tmp_path), str(folder / "checkpoint-2"), reader == "ours", **KINDS[kind]))
    assert_resumed(outcomes, expected)


@ways
@pytest.mark.parametrize("target", ["sharding2", "sharding2 of version 2", CUT])
@pytest.mark.parametrize("source", ["sharding2", "sharding2 of version 2", CUT])
def test_moving_averages(
    run: Run, jobs: Jobs, tmp_path: Path, source: str, target: str, writer: str, reader: str
) -> None:
    kind = "bfloat16"  # they are kept of master weights
    folder, _ = jobs.trained(kind, source, writer == "ours", ema=True)
    _, expected = jobs.trained(kind, target, False, ema=True)
    begin = str(folder / "checkpoint-2")
    outcomes = run("train", Job(target, str(tmp_path), begin, reader == "ours", ema=True, **KINDS[kind]))
    assert_resumed(outcomes, expected)
    assert sum(key.startswith("average of ") for key in whole(outcomes)) >= 20


@pytest.mark.parametrize("pretend", [False, True])
@ways
def test_moving_averages_of_a_job_that_goes_over_to_zero_cost_checkpoints(
    run: Run, jobs: Jobs, tmp_path: Path, writer: str, reader: str, pretend: bool
) -> None:
    """They are read from Paddle's data files, which there are none of here, or as by any load."""
    layout, kind = "sharding2 of version 2", "bfloat16"
    folder, _ = jobs.trained(kind, layout, writer == "ours", ema=True)
    averages = {"zcc_save_ema_coef": 0.75}
    job = Job(layout, str(tmp_path), str(folder / "checkpoint-2"), reader == "ours", arguments=averages, **KINDS[kind])
    first, second = run("averages_for_zero_cost", job, pretend)
    if pretend:
        assert len({*first, *second}) >= 20
        assert all(name.endswith(".weight.w_0") for name in (*first, *second))
    elif writer == "ours":
        assert first == second == []
    else:
        files = folder / "checkpoint-2" / "ema_state"
        assert [first, second] == [[str(files / "0_0.distcp")], [str(files / "1_0.distcp")]]
