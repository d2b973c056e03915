"""``delete``, ``copy`` and ``prune``."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paddle_dist_ckpt import LocalStorage, SaveOptions, list_checkpoints, verify
from paddle_dist_ckpt.cli.arguments import is_terminal
from paddle_dist_ckpt.cli.main import app
from paddle_dist_ckpt.manager.steps import NOTE, step_folder
from test.cli.commands import answer, fails, run, save_model
from test.jobs import age, data_files, files_in, make_array, save_alone, save_on, split_rows

ARRAYS = {"a": make_array((40, 50))}


def test_delete_with_yes(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS, 1)
    save_model(tmp_path, ARRAYS, 2)
    found = answer("delete", tmp_path, 1, "--yes")
    assert (found["path"], found["unique_id"], found["files"]) == (str(tmp_path), 1, 2)
    assert found["bytes"] == sum(path.stat().st_size for path in data_files(tmp_path))  # of 2, which is as large
    assert list_checkpoints(tmp_path) == [2]
    assert "deleted checkpoint 2" in run("delete", tmp_path, 2, "-y")
    assert files_in(tmp_path) == {}
    assert "error: " in fails("delete", tmp_path, 2, "-y")


def test_delete_does_not_ask_of_a_checkpoint_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / "model.pdparams"
    path.write_bytes(pickle.dumps({"a": ARRAYS["a"]}, 4))
    for more in ((), ("--yes",)):
        assert "of the format pdparams; only this library's own can be managed" in fails("delete", path, 0, *more)


def test_delete_removes_from_the_folder_that_the_system_finds_by_the_path(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        save_model(folder / "checkpoints", ARRAYS, 1)
    (tmp_path / "other" / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other" / "below")
    path = f"{tmp_path}/link/../checkpoints"
    assert answer("verify", path)["path"] == str(tmp_path / "other" / "checkpoints")
    run("delete", path, 1, "--yes")
    assert list_checkpoints(tmp_path / "checkpoints") == [1]
    assert list_checkpoints(tmp_path / "other" / "checkpoints") == []


def test_delete_counts_the_bytes_of_the_files_that_it_has_removed(tmp_path: Path) -> None:
    save_on([{"a": part} for part in split_rows(ARRAYS["a"], 2)], tmp_path)
    here, elsewhere = data_files(tmp_path)
    size = here.stat().st_size
    elsewhere.unlink()  # as in the folder of another host
    found = answer("delete", tmp_path, 0, "--yes")
    assert (found["files"], found["bytes"]) == (1, size)


def test_nothing_is_destroyed_without_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, ARRAYS, 1)
    assert "pass --yes" in fails("delete", tmp_path, 1)
    monkeypatch.setattr("paddle_dist_ckpt.cli.arguments.is_terminal", lambda: True)
    said = run("delete", tmp_path, 1, typed="n\n", code=2)
    assert "Delete" not in said  # but on stderr, so that stdout has the JSON alone
    assert "nothing was done" not in said
    assert list_checkpoints(tmp_path) == [1]
    run("delete", tmp_path, 1, typed="y\n")
    assert list_checkpoints(tmp_path) == []


def test_somebody_can_be_asked_at_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input").touch()
    there, here = os.openpty()
    with open(here) as terminal, open(there), (tmp_path / "input").open() as file:
        for stdin, expected in ((None, False), (file, False), (terminal, True)):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert is_terminal() is expected


def test_what_has_replaced_a_checkpoint_while_its_deletion_was_asked_for_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, ARRAYS, 1)
    monkeypatch.setattr("paddle_dist_ckpt.cli.arguments.is_terminal", lambda: True)

    def confirm(*_: Any, **__: Any) -> bool:
        save_model(tmp_path, ARRAYS, 1)
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    assert "has been replaced or removed meanwhile; nothing was deleted" in fails("delete", tmp_path, 1)
    assert verify(tmp_path, 1).ok


def test_ranks_of_a_job_do_not_destroy_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, ARRAYS, 1)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    for command in (
        *(("delete", tmp_path, 1, "-y"), ("copy", tmp_path, tmp_path / "b"), ("rebuild", tmp_path)),
        ("prune", tmp_path, "--keep-last", 1, "-y"),
    ):
        assert "start it without paddle.distributed.launch" in fails(*command)


def test_copy(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS, 1)
    save_model(tmp_path / "a", ARRAYS, 2)
    found = answer("copy", tmp_path / "a", tmp_path / "b")
    assert (found["path"], found["unique_id"]) == (str(tmp_path / "b"), 2)
    assert "copied checkpoint 1" in run("copy", tmp_path / "a", tmp_path / "b", "--id", 1)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
    assert "has a checkpoint with unique_id 1 already" in fails("copy", tmp_path / "a", tmp_path / "b", "--id", 1)


def steps(root: Path, **losses: float) -> None:
    for name, loss in losses.items():
        step = int(name[1:])
        note: dict[str, Any] = {NOTE: {"step": step, "metrics": {"loss": loss}}}
        save_alone({"a": ARRAYS["a"]}, step_folder(root, step), step, options=SaveOptions(user_metadata=note))


def committed(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if any(path.glob("*.metadata")))


def test_prune_by_the_rules_of_the_manager(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5, s150=0.1, s200=0.7, s250=0.6, s300=0.8)
    rules = ("--keep-last", 1, "--keep-every", 200, "--best", "loss:min")
    planned = answer("prune", tmp_path, *rules, "--dry-run")
    assert (planned["kept"], planned["removed"]) == ([150, 200, 300], [100, 250])
    assert len(committed(tmp_path)) == 5
    assert "pass --yes" in fails("prune", tmp_path, *rules)[-300:]
    three = answer("prune", tmp_path, "--keep-last", 1, "--best", "loss:min:3", "--dry-run")
    assert (three["kept"], three["removed"]) == ([100, 150, 250, 300], [200])
    assert "would remove 2 steps" in run("prune", tmp_path, *rules, "--dry-run")
    assert "removed 2 steps" in run("prune", tmp_path, *rules, "-y")
    assert committed(tmp_path) == ["step-00000150", "step-00000200", "step-00000300"]
    assert sorted(path.name for path in tmp_path.iterdir()) == committed(tmp_path)
    assert verify(step_folder(tmp_path, 150)).ok
    assert "nothing to remove" in run("prune", tmp_path, *rules)  # so nobody need be asked


def test_prune_leaves_links_and_saves_that_go_on(tmp_path: Path) -> None:
    steps(tmp_path / "elsewhere", s100=0.5)
    root = tmp_path / "root"
    steps(root, s200=0.5, s300=0.5)
    step_folder(root, 100).symlink_to(step_folder(tmp_path / "elsewhere", 100))
    for step, old in ((50, True), (400, False)):
        step_folder(root, step).mkdir()
        claim = step_folder(root, step) / f"{step}.0123456789abcdef.claim"
        claim.write_text("{}")
        if old:
            age(claim)
            age(step_folder(root, step))
    found = answer("prune", root, "--keep-last", 1, "-y")
    assert (found["kept"], found["removed"], found["abandoned"]) == ([100, 300], [200], [50])
    names = sorted(path.name for path in root.iterdir())
    assert names == ["step-00000100", "step-00000300", "step-00000400"]


@pytest.mark.parametrize("committed_steps", [[], [100]])
def test_prune_removes_what_dead_saves_have_left_without_or_after_the_last_step(
    tmp_path: Path, committed_steps: list[int]
) -> None:
    steps(tmp_path, **{f"s{step}": 0.5 for step in [*committed_steps, 200, 300]})
    for step in committed_steps:
        for path in step_folder(tmp_path, step).iterdir():
            age(path, 7200)  # the time that counts is not that of its commit
    for step, old in ((200, True), (300, False)):
        folder = step_folder(tmp_path, step)
        (folder / f"{step}.metadata").unlink()
        (data,) = folder.iterdir()
        claim = folder / f"{step}.{data.name.split('.')[1]}.claim"
        claim.write_text("{}")
        for path in (claim, folder) if old else ():
            age(path)
    age(tmp_path)
    before = tmp_path.stat().st_mtime
    for options in (["--dry-run"], ["-y"]):
        found = answer("prune", tmp_path, "--keep-last", 1, *options)
        assert (found["kept"], found["removed"], found["abandoned"]) == (committed_steps, [], [200])
        assert found["tidied"] == []
        assert (tmp_path.stat().st_mtime == before) == (options == ["--dry-run"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in [*committed_steps, 300]]


def test_prune_removes_what_dead_saves_have_left_beside_steps_that_stay(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5)
    folder = step_folder(tmp_path, 100)
    (folder / "0_100.0123456789abcdef.0.safetensors").write_bytes(b"dead")
    claim = folder / "100.0123456789abcdef.claim"
    claim.write_text("{}")
    for path in (claim, folder):
        age(path)
    assert answer("prune", tmp_path, "--keep-last", 1, "--dry-run")["tidied"] == [100]
    assert "0123456789abcdef" in str(list(folder.iterdir()))
    text = run("prune", tmp_path, "--keep-last", 1, "-y")
    assert text == "nothing to remove; kept 100\nremoved what dead saves have left beside 100\n"
    assert "0123456789abcdef" not in str(list(folder.iterdir()))
    assert verify(folder, 100).ok


def test_prune_says_beside_which_steps_something_could_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, s100=0.5)
    folder = step_folder(tmp_path, 100)
    claim = folder / "100.0123456789abcdef.claim"
    claim.write_text("{}")
    for path in (claim, folder):
        age(path)

    def refused(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(claim))

    monkeypatch.setattr(LocalStorage, "publish", refused)
    found = answer("prune", tmp_path, "--keep-last", 1, "-y", code=1)
    assert (found["kept"], found["tidied"], found["refused"], found["untidied"]) == ([100], [], [], [100])


@pytest.mark.parametrize("unique_id", [7, 100])
def test_prune_says_that_nothing_is_removed_beside_a_damaged_checkpoint(tmp_path: Path, unique_id: int) -> None:
    """What it needs is not known, and so not whose the files are of which a dead claim speaks."""
    steps(tmp_path, s100=0.5)
    folder = step_folder(tmp_path, 100)
    (folder / "7.metadata").write_bytes(b"rubbish")
    claim = folder / f"{unique_id}.0123456789abcdef.claim"
    claim.write_text("{}")
    for path in (claim, folder):
        age(path)
    found = answer("prune", tmp_path, "--keep-last", 1, "-y", code=1)
    assert (found["kept"], found["tidied"], found["untidied"]) == ([100], [], [100])
    assert claim.exists()


def test_prune_says_what_the_disk_does_not_confirm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step is not kept, and a crash of the machine may bring it back."""
    sync, failing = LocalStorage.sync, list[int]()

    def fails_once_gone(storage: LocalStorage) -> None:
        folders = [step_folder(tmp_path, step) for step in failing]
        if Path(storage.location) in folders and not list(Path(storage.location).glob("*.metadata")):
            raise OSError(errno.EIO, "Input/output error", storage.location)
        sync(storage)

    monkeypatch.setattr(LocalStorage, "sync", fails_once_gone)
    steps(tmp_path, s100=0.5, s200=0.5, s300=0.5)
    failing.append(100)
    found = answer("prune", tmp_path, "--keep-last", 1, "-y", code=1)
    assert (found["kept"], found["removed"], found["unconfirmed"]) == ([300], [200], [100])
    assert committed(tmp_path) == ["step-00000300"]
    failing.clear()
    steps(tmp_path, s100=0.5)
    failing.append(100)
    result = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1", "-y"])
    assert result.exit_code == 1
    assert result.stdout == "nothing was removed; kept 300\n"
    assert result.stderr.endswith("the data files are left to a later save: 100\n")


def refuse(monkeypatch: pytest.MonkeyPatch, *endings: str) -> None:
    """Have a folder refuse to remove what is called so."""
    delete = LocalStorage.delete

    def refused(storage: LocalStorage, name: str) -> None:
        if name.endswith(endings):
            raise PermissionError(errno.EACCES, "Permission denied", f"{storage.location}/{name}")
        delete(storage, name)

    monkeypatch.setattr(LocalStorage, "delete", refused)


@pytest.mark.parametrize(
    ("ending", "kind", "text"),
    [
        (".metadata", "refused", "could not be removed: 100, 200\n"),
        (
            ".safetensors",
            "unfinished",
            "removed, but data files could not be; they are left to a later save: 100, 200\n",
        ),
    ],
)
def test_prune_says_what_it_could_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, kind: str, text: str
) -> None:
    for root in ("json", "text"):
        steps(tmp_path / root, s100=0.5, s200=0.5, s300=0.5)
    refuse(monkeypatch, ending)
    found = answer("prune", tmp_path / "json", "--keep-last", 1, "-y", code=1)
    assert (found[kind], found["left"], found["bytes"]) == ([100, 200], [], 0)
    assert found["removed"] == ([100, 200] if kind == "unfinished" else [])
    result = CliRunner().invoke(app, ["prune", str(tmp_path / "text"), "--keep-last", "1", "-y"])
    assert result.exit_code == 1
    assert result.stderr.endswith(text)
    assert result.stdout.startswith("nothing was removed; kept " if kind == "refused" else "removed 2 steps, 0 B\n")
    assert "left, for" not in result.stdout
    assert not list(tmp_path.glob("*/*/*.claim")) or kind == "unfinished"


def test_prune_calls_nothing_removed_of_which_files_of_dead_saves_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, s50=0.5, s100=0.5)
    (step_folder(tmp_path, 50) / "50.metadata").unlink()
    for step in (50, 100):
        (step_folder(tmp_path, step) / f"0_{step}.0123456789abcdef.0.safetensors").write_bytes(b"dead")
        claim = step_folder(tmp_path, step) / f"{step}.0123456789abcdef.claim"
        claim.write_text("{}")
        age(claim)
        age(step_folder(tmp_path, step))
    refuse(monkeypatch, ".0123456789abcdef.0.safetensors")
    result = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1", "-y"])
    assert (result.exit_code, result.stdout) == (1, "nothing was removed; kept 100\n")
    stuck = "could not be removed: 50\nwhat dead saves have left could not be removed beside: 100\n"
    assert result.stderr.endswith(stuck)


def test_prune_says_which_remains_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their claim, of a dead save, may not be read."""
    steps(tmp_path, s200=0.5, s300=0.5)
    folder = step_folder(tmp_path, 200)
    (folder / "200.metadata").unlink()
    claim = folder / "200.0123456789abcdef.claim"
    claim.write_text("{}")
    age(claim)
    age(folder)
    read = LocalStorage.read

    def refused(storage: LocalStorage, name: str, limit: int | None = None) -> bytes:
        if name == claim.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(claim))
        return read(storage, name, limit)

    monkeypatch.setattr(LocalStorage, "read", refused)
    found = answer("prune", tmp_path, "--keep-last", 1, "-y", code=1)
    assert (found["kept"], found["abandoned"], found["left"], found["refused"]) == ([300], [], [], [200])


def test_delete_says_what_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in ("json", "text"):
        save_model(tmp_path / root, {"w": make_array((4,))}, 1)
    refuse(monkeypatch, ".safetensors")
    found = answer("delete", tmp_path / "json", 1, "-y", code=1)
    assert (found["unfinished"], found["bytes"]) == (True, 0)
    text = fails("delete", tmp_path / "text", 1, "-y", code=1)
    assert text.endswith(", but data files could not be removed; they are left to a later save\n")


def test_prune_by_a_metric_that_no_step_has_removes_nothing(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5, s200=0.7)
    for option in ("-y", "--dry-run"):
        assert "their metrics: loss" in fails("prune", tmp_path, "--keep-last", 1, "--best", "losss:min", option)
    assert len(committed(tmp_path)) == 2


def test_prune_does_not_call_removed_what_stays_for_something_else_in_the_folder(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5, s200=0.7, s300=0.8)
    for step in (100, 200):
        folder = step_folder(tmp_path, step)
        (folder / f"{step}.metadata").unlink()
        (data,) = folder.iterdir()
        data.write_bytes(bytes(3000))
        (folder / f"{step}.{data.name.split('.')[1]}.claim").write_text("{}")
        if step == 100:
            (folder / "notes.txt").write_text("kept")
        for path in (*folder.iterdir(), folder):
            age(path)
    planned = answer("prune", tmp_path, "--keep-last", 1, "--dry-run")
    assert (planned["abandoned"], planned["bytes"]) == ([100, 200], 6000)
    found = answer("prune", tmp_path, "--keep-last", 1, "-y")
    assert (found["abandoned"], found["left"], found["bytes"]) == ([200], [100], 3000)
    assert (step_folder(tmp_path, 100) / "notes.txt").exists()


@pytest.mark.parametrize("kind", ["metadata", "data", "link", "folder", "device", "file", "html"])
def test_a_report_takes_the_place_of_nothing_but_a_page(tmp_path: Path, kind: str) -> None:
    steps(tmp_path, s100=0.5)
    folder = step_folder(tmp_path, 100)
    (data,) = folder.glob("*.safetensors")
    out = {"metadata": folder / "100.metadata", "data": data}.get(kind, tmp_path / "page.html")
    if kind == "link":
        out.symlink_to(folder / "100.metadata")
    elif kind == "folder":
        out.mkdir()
    elif kind == "device":
        os.mkfifo(out)  # which anybody may make
    elif kind == "file":
        out.write_bytes(data.read_bytes())  # as a checkpoint of another format
    elif kind == "html":
        out.write_text("<!doctype html>\nof somebody else")
    says = {"metadata": "of a checkpoint's", "data": "of a checkpoint's", "file": "there, and no page"}
    says["html"] = says["file"]
    assert says.get(kind, "no regular file") in fails("report", folder, "--out", out)
    assert out.is_symlink() == (kind == "link")
    assert kind != "file" or out.read_bytes() == data.read_bytes()
    assert verify(folder).ok
    assert kind != "html" or out.read_text().endswith("of somebody else")
    (tmp_path / "other.html").touch()  # as by mktemp
    run("report", folder, "--out", tmp_path / "other.html")
    run("report", folder, "--out", tmp_path / "other.html")


@pytest.mark.parametrize("name", ["200.metadata", "0_100.0123456789abcdef.0.safetensors", "1.0123456789abcdef.claim"])
def test_a_report_makes_no_file_that_counts_as_one_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, ARRAYS, 1)
    assert "the name of a file of a checkpoint's" in fails("report", tmp_path, "--out", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_report_that_cannot_be_written_names_the_page(tmp_path: Path) -> None:
    save_model(tmp_path / "ckpt", {"w": make_array((4, 5))})
    page = tmp_path / "none" / "page.html"
    assert fails("report", tmp_path / "ckpt", "-o", page) == f"error: No such file or directory: {page}\n"


def test_a_report_is_not_taken_to_be_asked_for_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "ckpt", {"w": make_array((4, 5))})
    monkeypatch.chdir(tmp_path)
    assert "a file, not to stdout" in fails("report", "ckpt", "-o", "-")
    assert not Path("-").exists()
    assert run("report", "ckpt", "-o", "./-").startswith("-: ")


def test_a_report_does_not_replace_what_appears_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, ARRAYS, 1)
    out, publish = tmp_path / "page.html", LocalStorage.publish

    def publish_late(*arguments: Any) -> bool:
        out.write_text("theirs")
        return publish(*arguments)

    monkeypatch.setattr(LocalStorage, "publish", publish_late)
    assert "appeared meanwhile" in fails("report", tmp_path, "--out", out)
    assert out.read_text() == "theirs"


def test_wrong_use_of_prune(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5)
    for best in ("loss", "loss:least", ":min", "loss:min:0", "loss:min:x", "loss:3", "loss:min:"):
        assert "such as loss:min" in fails("prune", tmp_path, "--keep-last", 1, "--best", best)
    assert "--keep-last" in fails("prune", tmp_path)
    fails("prune", tmp_path, "--keep-last", 0)


def test_prune_says_what_is_no_folder_of_steps(tmp_path: Path) -> None:
    steps(tmp_path / "run", s100=0.5)
    save_model(tmp_path / "c", ARRAYS)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    def said(name: str) -> str:
        return fails("prune", tmp_path / name, "--keep-last", 1)

    assert f"is the folder of one step; pass {tmp_path}/run, that of all" in said("run/step-00000100")
    assert "holds a checkpoint itself, and is no folder of steps" in said("c")
    assert f"there is no folder {tmp_path}/nowhere" in said("nowhere")
    assert "is a file; pass a folder" in said("file")
    assert "it has no folder such as step-00000100" in said("empty")
    save_model(tmp_path / "run", ARRAYS)
    assert "holds a checkpoint itself, beside the steps" in said("run")
    assert committed(tmp_path / "run") == ["step-00000100"]


def test_commands_that_need_a_checkpoint_name_the_steps_of_a_managers_folder(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    steps(root, s100=0.5, s200=0.6)
    hint = f"it is a CheckpointManager's folder with steps 100, 200: pass {step_folder(root, 200)}, the latest"
    for command in (
        *(("inspect", root, "a"), ("cat", root, "a"), ("verify", root), ("report", root, "-o", out)),
        *(("diff", root, step_folder(root, 100)), ("diff", step_folder(root, 100), root), ("copy", root, out)),
        *(("delete", root, 7, "-y"), ("rebuild", root), ("merge", root, out), ("convert", root, out, "--to", "paddle")),
    ):
        assert hint in fails(*command)
        assert not out.exists()
    assert f"pass {step_folder(root, 100)}, step 100" in fails("inspect", root, "--id", 100)
    assert len(answer("inspect", root)["steps"]) == 2


def test_prune_asks_for_what_dead_saves_have_left_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(tmp_path, s100=0.5, s200=0.7)
    for path in remains(tmp_path, 200):
        age(path)
    monkeypatch.setattr("paddle_dist_ckpt.cli.arguments.is_terminal", lambda: True)
    result = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1"], input="n\n")
    assert "keeps    200\nremoves  100\nand what dead saves have left beside 200\n" in result.stderr
    assert committed(tmp_path) == ["step-00000100", "step-00000200"]


def test_prune_leaves_a_step_that_was_saved_anew_while_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, s100=0.5, s200=0.6, s300=0.7)
    monkeypatch.setattr("paddle_dist_ckpt.cli.arguments.is_terminal", lambda: True)

    def confirm(*_: Any, **__: Any) -> bool:
        steps(tmp_path, s100=0.1)
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    text = run("prune", tmp_path, "--keep-last", 1)
    assert text.startswith("removed 1 step, ")
    assert "\n  200\nkept 100, 300\nleft, for they were saved anew" in text
    assert text.endswith(": 100\n")
    assert verify(step_folder(tmp_path, 100), 100).ok


def test_prune_keeps_what_the_rules_keep_when_it_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.cli.arguments.is_terminal", lambda: True)
    steps(tmp_path, s100=0.5, s200=0.4, s300=0.6)

    def prune_meanwhile(act: Callable[[], object]) -> Any:
        monkeypatch.setattr("typer.confirm", lambda *_, **__: act() or True)
        return answer("prune", tmp_path, "--keep-last", 1, "--best", "loss:min")

    done = prune_meanwhile(lambda: shutil.rmtree(step_folder(tmp_path, 300)))
    assert (done["kept"], done["removed"], done["left"]) == ([200], [100], []), "200 is the last one, as 300 is gone"
    steps(tmp_path, s100=0.5, s300=0.6)
    done = prune_meanwhile(lambda: steps(tmp_path, s200=0.9))
    assert (done["kept"], done["removed"], done["left"]) == ([100, 200, 300], [], [100]), "100 is the best one now"
    steps(tmp_path / "run", s100=0.5, s200=0.6)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (tmp_path / "run").rename(tmp_path / "moved"))
    assert "is gone, without steps 100, 200 of before" in fails("prune", tmp_path / "run", "--keep-last", 1)
    assert len(committed(tmp_path / "moved")) == 2


def test_prune_says_what_it_has_left_for_something_else_in_the_folder(tmp_path: Path) -> None:
    steps(tmp_path, s100=0.5, s200=0.7)
    (step_folder(tmp_path, 100) / "100.metadata").unlink()
    (step_folder(tmp_path, 100) / "notes.txt").write_text("kept")
    for path in (*remains(tmp_path, 100), *step_folder(tmp_path, 100).iterdir()):
        age(path)
    text = run("prune", tmp_path, "--keep-last", 1, "-y")
    assert text.startswith("nothing was removed; kept 200\n")
    assert text.endswith("or something else is in the folder: 100\n")


def remains(root: Path, step: int) -> list[Path]:
    """What a dead save has left in a step's folder, and the folder."""
    folder = step_folder(root, step)
    data, claim = folder / f"0_{step}.0123456789abcdef.0.safetensors", folder / f"{step}.0123456789abcdef.claim"
    data.write_bytes(b"dead")
    claim.write_text("{}")
    return [claim, folder]


def test_documents_have_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of inspect, verify and convert have: whoever reads one may be in another folder."""
    save_model(tmp_path / "a", ARRAYS, 1)
    monkeypatch.chdir(tmp_path)
    assert answer("copy", "a", "b")["path"] == str(tmp_path / "b")
    (tmp_path / "b" / "1.metadata").unlink()
    assert answer("rebuild", "b")["path"] == str(tmp_path / "b")
    assert answer("report", "b", "-o", "page.html")["path"] == str(tmp_path / "page.html")
    assert answer("delete", "b", 1, "--yes")["path"] == str(tmp_path / "b")
