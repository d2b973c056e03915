"""The page on troubleshooting: what it shows is what is printed, and what is printed is there."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt import (
    CheckpointManager,
    LoadOptions,
    PerRank,
    SaveOptions,
    delete_checkpoint,
    errors,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    save_state_dict,
)
from paddle_dist_ckpt.control import failures
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.folder.checkpoint import Restarts
from paddle_dist_ckpt.manager.agreement import agree
from paddle_dist_ckpt.manager.steps import Steps, step_folder
from paddle_dist_ckpt.storage import Folders, as_storage
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks, shard_array
from test.jobs import all_ok, another_host, load_alone, save_alone, try_load, try_save
from test.test_docs import blocks, pages
from test.whole.texts import is_in, logged_texts, texts_of_source

MODEL = {"weight": np.zeros((4, 2), "f4"), "bias": np.zeros(2, "f4")}
MOMENTS = {"weight.moment1": np.zeros((4, 2), "f4"), "bias.moment1": np.zeros(2, "f4")}
VARIES = re.compile(r"\b[0-9a-f]{16}\b|(?<![\w.])\d[\d,.]*(?![\w.])|on [\w-]*\d\b|node-\w+|host\d")
NOT_OURS = re.compile(r"paddle\.load|Optimizer set error|gloo|what\(\)|list index|InvalidArgument|File \"|e\.update")
NOT_PROVOKED = re.compile(
    r"not in the process group|earlier call was|control hub|earlier save|process was forked|Errno 24|cannot listen|"
    r"the coordinator: rank|denied: '/data/ro|cannot be had|free, and|no progress|"
    r"bytes; \d+ were written|durability|an exchange that was given up|different versions|control messages|"
    r"start new thread"
)
"""Errors that take other circumstances than a test has here: at least their text is in the source."""
OF_THE_SYSTEM = re.compile(r"PermissionError: \[Errno 13\]")
"""Those of which all is the system's."""
NOT_ON_THE_PAGE = {
    "messages about ": "ranks differ, which an error says too",
    "and not listed: ": "follows those that are named",
    "the control hub's thread failed": "a fault of the library, with its traceback",
    "the control hub's thread has not ended within ": "at the end of a process whose job hangs",
}
"""Warnings for which nobody needs the page, by how they begin, and why."""


class Linear:
    def state_dict(self) -> dict[str, Any]:
        return MODEL


def shown(language: str) -> list[str]:
    """The lines of all messages on the page."""
    return [
        line.strip()
        for mark, code in blocks(pages(language)["troubleshooting"])
        if mark == "example of a message"
        for line in code.splitlines()
        if not NOT_OURS.search(line)
    ]


def alike(line: str, root: str = "/data") -> str:
    """A line without what is another thing each time."""
    return VARIES.sub("#", line.replace(root, "/data").strip())


def error(call: Callable[[], Any]) -> str:
    """What a call prints that raises."""
    with pytest.raises(Exception) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def of_ranks(results: list[Any]) -> str:
    """What each rank of a job prints, which is the same on all."""
    (text,) = {f"{type(result).__name__}: {result}" for result in results}
    return text


def provoked(data: Path) -> Iterator[str]:
    """Messages, each as it is printed."""
    save_alone({"model": MODEL, "optimizer": MOMENTS, "step": 1}, data / "c")
    for target, options in (
        (MODEL, LoadOptions()),
        ({"model": MODEL, "optimizer": {}}, LoadOptions(strict="all")),
        ({"model": {"weight": np.zeros((4, 3), "f4")}}, LoadOptions()),
        ({"model": {"weight": np.zeros((4, 2), "f2")}}, LoadOptions()),
        ({"optimizer": {"linear_0.w_0_moment1_0": np.zeros((4, 2), "f4")}}, LoadOptions()),
        ({"optimizer": {"LR_Scheduler": {"last_epoch": 0}}}, LoadOptions()),
    ):
        yield error(lambda target=target, options=options: load_alone(target, data / "c", options=options))
    model = {"model": {name: np.zeros((4, 2), "f4") for name in ("body.weight", "head.weight")}}
    save_alone({**model, "optimizer": {"head.weight.moment1": np.zeros((4, 2), "f4")}}, data / "frozen")
    thawed = {**model, "optimizer": {"body.weight.moment1": np.zeros((4, 2), "f4")}}
    yield error(lambda: load_alone(thawed, data / "frozen"))
    save_state_dict({"lr": paddle.optimizer.lr.StepDecay(0.1, 2)}, data / "c", unique_id=0)
    yield error(lambda: load_state_dict({"lr": paddle.optimizer.lr.ReduceOnPlateau(0.1)}, data / "c"))
    save_alone({"model": MODEL, "optimizer": MOMENTS, "step": 1}, data / "c", 0)
    yield error(lambda: load_alone({}, data / "c", 7))
    yield error(lambda: load_alone(MODEL, data / "nowhere"))
    (data / "empty").mkdir()
    yield error(lambda: load_alone(MODEL, data / "empty"))
    for name in ("torch/.metadata", "trained/checkpoint-10/.metadata", "trained/checkpoint-20/.metadata"):
        (data / name).parent.mkdir(parents=True)
        (data / name).touch()
    yield error(lambda: load_alone(MODEL, data / "torch/.metadata"))
    yield error(lambda: load_alone(MODEL, data / "trained"))
    yield error(lambda: as_storage("s3://bucket/x"))
    save_alone({"model": MODEL, "optimizer": {"bias.beta1_pow_acc": np.ones(1)}}, data / "keys")
    yield error(lambda: load_merged_state_dict(data / "keys", keys=["modle.*"]))
    yield error(lambda: save_alone(Linear(), data / "x"))  # type: ignore[arg-type]
    yield from of_managers(data)
    yield from of_ranks_that_differ(data)
    (data / "afile").touch()
    yield error(lambda: save_alone(MODEL, data / "afile"))
    yield error(lambda: CheckpointManager(data / "afile"))
    (data / "link").symlink_to("/mnt/old")
    yield error(lambda: save_alone(MODEL, data / "link"))
    yield error(lambda: save_alone({"loader": object()}, data / "x"))
    yield from of_damage(data)
    yield from of_values(data)
    yield "\n".join(
        failures.timeout_error("save_state_dict in round 'plan'", [1], 2.0, absent=absent).message
        for absent in ({1}, set())
    ).replace("save_state_dict", "CheckpointTimeoutError: save_state_dict")
    lost = {1: failures.record(failures.LOST)}
    yield (
        "RankFailureError: " + failures.failure_of_ranks("save_state_dict failed in round 'plan'", lost, (0, 1)).message
    )


def of_managers(data: Path) -> Iterator[str]:
    for step in (5, 10):
        save_alone({"n": step}, step_folder(data / "run", step), step)
    yield error(lambda: read_metadata(data / "run"))
    for root in (data / "c", step_folder(data / "run", 10)):
        yield error(lambda root=root: CheckpointManager(root))
    with CheckpointManager(data / "run") as manager:
        yield error(lambda: manager.restore({"n": 0}, step=6))
    steps = Steps(data / "run")
    steps.look(Folders(lambda folder: FaultyStorage(folder, stale)))
    yield error(steps.latest)

    def make(rank: SimulatedRank) -> None:
        with rank.hub.session("CheckpointManager", 60) as session:
            agree(session, {"keep_last": 1 + rank.rank}, lambda: None)

    yield of_ranks(run_ranks(2, make))


def stale(operation: str, name: str) -> None:
    if operation == "read":
        raise OSError(errno.ESTALE, "Stale file handle", name)


def of_ranks_that_differ(data: Path) -> Iterator[str]:
    def save(rank: SimulatedRank, state: Any, path: Path = data / "x", unique_id: int | None = None) -> Any:
        return rank.save(state, path, unique_id, SaveOptions(check_replicas="warn"))

    yield of_ranks(run_ranks(2, lambda rank: save(rank, {"n": 1}, unique_id=rank.rank)))
    yield of_ranks(run_ranks(2, lambda rank: save(rank, {"weight": np.zeros((256 << rank.rank, 300))})))
    yield of_ranks(run_ranks(2, lambda rank: save(rank, {"n": 1}, data / "run" / str(rank.rank)))).replace(
        f"on {socket.gethostname()}:", "on node-a:"
    )
    step = data / "run/step-00000100"
    step.mkdir(parents=True)
    here = FolderIdentity(socket.gethostname(), 1, 1)
    seen = [FaultyStorage(step, lambda operation, name: None, here._replace(inode=number)) for number in (1, 2)]
    yield of_ranks(run_ranks(2, lambda rank: rank.save({"n": 1}, seen[rank.rank])))
    drifted = run_ranks(2, lambda rank: rank.save({"w": np.full((300, 300), rank.rank, "f4")}, data / "x"))
    yield of_ranks(drifted).replace(" If each rank", "\nIf each rank")  # the page has the first sentence
    yield of_ranks(run_ranks(2, lambda rank: save(rank, {"n": 1}) if rank.rank else rank.load({"n": 0}, data / "x")))
    half = shard_array(np.zeros((4, 4)), [Box((0, 0), (2, 4))])
    yield of_ranks(try_save([{"t": half}, {"t": half}], data / "x"))
    yield of_ranks(run_ranks(2, lambda rank: rank.load({"n": 0}, data / "c", None, LoadOptions(strict=rank.rank == 1))))
    local = [data / "nowhere/local", another_host(data / "local", 1)]
    (data / "local").mkdir()
    text = of_ranks(try_load([MODEL, MODEL], local))
    yield text.replace("nowhere/", "").replace("on host1", "on node-b")
    (file,) = (data / "c").glob("*.safetensors")

    def hook(operation: str, name: str) -> None:
        if operation == "open":
            raise PermissionError(errno.EACCES, "Permission denied", str(file))

    yield of_ranks(try_load([{"model": MODEL}] * 2, FaultyStorage(data / "c", hook)))


def of_values(data: Path) -> Iterator[str]:
    save_alone({"w": np.full(3, 1e6, "f4")}, data / "large")
    yield error(lambda: load_alone({"w": np.zeros(3, "f2")}, data / "large", options=LoadOptions(cast=True)))
    save_alone(MODEL, data / "replaced", 0)
    before, restarts = read_metadata(data / "replaced"), Restarts(as_storage(data / "replaced"))
    save_alone(MODEL, data / "replaced", 0)
    yield (
        error(lambda: [restarts.due(before) for _ in range(9)])
        .replace("replaced in", "c in")
        .replace("/replaced", "/c")
    )
    state = {"rng": {"state": PerRank(1)}}
    all_ok(run_ranks(2, lambda rank: rank.save(state, data / "own")))
    yield of_ranks(run_ranks(4, lambda rank: rank.load({"rng": {"state": PerRank(0)}}, data / "own")))
    (data / "paddles").mkdir()
    (data / "paddles/0.metadata").write_bytes(pickle.dumps({}))
    yield error(lambda: save_alone(MODEL, data / "paddles", 0))
    save_alone(MODEL, data / "claimed", 3)
    (data / "claimed/9.0123456789abcdef.claim").write_text("{}")
    yield error(lambda: delete_checkpoint(data / "claimed", 3)).replace("claimed", "c")


def of_damage(data: Path) -> Iterator[str]:
    c = data / "c"
    (file,) = c.glob("*.safetensors")
    content, metadata = file.read_bytes(), (c / "0.metadata").read_bytes()
    everything = {"model": MODEL, "optimizer": MOMENTS}
    claim = c / "10.fedcba9876543210.claim"
    taken = {"save": "0123456789abcdef", "replaces": None, "removes": [], "of_id": 0}
    claim.write_text(json.dumps({"save": "", "replaces": None, "removes": [], "deletes": True, "taken": [taken]}))
    yield error(lambda: delete_checkpoint(c, 0))
    claim.unlink()
    yield error(lambda: load_alone(everything, file))
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    yield re.sub(
        r": [\w.]+: the checksum", ": optimizer.weight.moment2: the checksum", error(lambda: load_alone(everything, c))
    )
    file.write_bytes(content[:-10])
    yield error(lambda: load_alone(everything, c))
    file.unlink()
    yield error(lambda: load_alone(everything, c))
    file.write_bytes(content)
    (c / "0.metadata").write_bytes(metadata.replace(b"moment1", b"moment3"))
    yield error(lambda: load_alone(everything, c))
    (c / "0.metadata").unlink()
    yield error(lambda: load_alone(everything, c))
    shutil.copytree(c, data / "linked")
    (data / "elsewhere").write_bytes(metadata)
    (data / "linked/0.metadata").symlink_to(data / "elsewhere")
    yield error(lambda: load_alone(everything, data / "linked"))


def logged(data: Path, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Warnings."""
    with caplog.at_level(logging.WARNING, "paddle_dist_ckpt"):
        save_alone({"model": MODEL, "optimizer": MOMENTS, "own": PerRank(1)}, data / "c")
        (data / "c/0_0.distcp").touch()
        load_alone({"model": MODEL, "optimizer": {}}, data / "c")
        keys = [f"n{i}" for i in range(7)]
        run_ranks(2, lambda r: r.save({"bn.mean": np.full(3, r.rank), **dict.fromkeys(keys, r.rank)}, data / "c"))
        for step in (5, 10):
            save_alone({"n": step}, step_folder(data / "run", step), step)
        list_checkpoints(data / "run")
    for record in caplog.records:
        yield record.getMessage()


def test_what_the_page_shows_is_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of it is printed once, for the pages in both languages."""
    texts = [*provoked(tmp_path), *logged(tmp_path / "log", caplog)]
    said = {
        alike(line, str(root)) for text in texts for line in text.splitlines() for root in (tmp_path / "log", tmp_path)
    }
    for language in ("en", "cn"):
        missing = [line for line in shown(language) if alike(line) not in said and not is_in_the_source(line)]
        assert "\n".join(missing) == "", language


def is_in_the_source(line: str) -> bool:
    """Whether a line is a warning, or an error that is not provoked here, whose text the source has."""
    if any(is_in(text, line, all_of_it=True) for text in logged_texts()):
        return True
    if NOT_PROVOKED.search(line) is None:
        return False
    return bool(OF_THE_SYSTEM.match(line)) or any(is_in(text, line) for text in texts_of_source())


@pytest.mark.parametrize("language", ["en", "cn"])
def test_what_is_logged_is_on_the_page(language: str) -> None:
    lines = shown(language)
    missing = {text: module for text, module in logged_texts().items() if not any(is_in(text, x, True) for x in lines)}
    excused = {text: module for text, module in missing.items() if text[0] in NOT_ON_THE_PAGE}
    assert missing == excused, "put it on the page in both languages, or into NOT_ON_THE_PAGE with a reason"
    assert {text[0] for text in excused} == NOT_ON_THE_PAGE.keys()


@pytest.mark.parametrize("language", ["en", "cn"])
def test_each_class_of_errors_is_on_the_page(language: str) -> None:
    begun = {line.partition(":")[0] for line in shown(language)}
    assert set(errors.__all__) - begun == set()
