"""The command line as a process of its own: how fast it starts, its exit codes, pipes, signals."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.version import __version__
from test.cli.commands import save_model
from test.jobs import data_files, make_array
from test.pace import slowness
from test.rooms import ROOT
from test.strategies import some

MODULE = [sys.executable, "-m", "paddle_dist_ckpt"]
ARRAYS = {"a": make_array((400, 50)), "b": make_array((7,), "int64")}


def env(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def process(*args: Any, **more: str) -> subprocess.CompletedProcess[str]:
    command = [*MODULE, *map(str, args)]
    return subprocess.run(command, env=env(**more), capture_output=True, text=True, timeout=120)


def test_help_and_version_need_nothing_large() -> None:
    """What takes the time is what is imported; the time itself depends on what else the machine does."""
    program = (
        "import sys\n"
        "from paddle_dist_ckpt.cli.main import app\n"
        "try:\n    app(['inspect', '--help'])\nexcept SystemExit:\n    pass\n"
        "large = {'numpy', 'msgspec', 'rich', 'tqdm', 'xxhash', 'paddle', 'paddle_dist_ckpt.wiring'}\n"
        "print(sorted(large & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=env(), capture_output=True, text=True, timeout=120)
    assert "Examples:" in done.stdout
    assert done.stderr == "[]\n"


def test_it_starts_at_once() -> None:
    def seconds() -> float:
        before = os.times()
        assert process("--version").stdout == f"paddle-dist-ckpt {__version__}\n"
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.3 * slowness()


def test_exit_codes(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS)
    save_model(tmp_path / "b", {**ARRAYS, "b": np.zeros(7, np.int64)})
    for code, args in {
        0: ("diff", tmp_path / "a", tmp_path / "a"),
        1: ("diff", tmp_path / "a", tmp_path / "b"),
        2: ("diff", tmp_path / "a", tmp_path / "c"),
    }.items():
        done = process(*args)
        assert done.returncode == code, done.stderr
        assert (done.stderr != "") == (code == 2)
    assert process("no-such-command").returncode == 2
    assert process("inspect", tmp_path / "a", "--id", "x").returncode == 2


def test_what_a_command_does_without_stdout_it_does(tmp_path: Path) -> None:
    save_model(tmp_path / "a", ARRAYS)
    for command in ("verify", "inspect"):
        shell = ["sh", "-c", '"$0" "$@" >&-', *MODULE, command, str(tmp_path / "a")]
        done = subprocess.run(shell, env=env(), stderr=subprocess.PIPE, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
    data_files(tmp_path / "a")[0].unlink()
    shell = ["sh", "-c", '"$0" "$@" >&-', *MODULE, "verify", str(tmp_path / "a")]
    assert subprocess.run(shell, env=env(), stderr=subprocess.PIPE, text=True, timeout=120).returncode == 1


def test_output_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    """Also where Python's own output is not buffered, as it is set in many containers."""
    save_model(tmp_path / "c", {f"tensor{i}": np.zeros(1, "f4") for i in range(100)})
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [*MODULE, "inspect", "--json", tmp_path / "c"],
            env=env(PYTHONUNBUFFERED="1"),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert "File too large" in done.stderr


def test_as_many_files_are_opened_as_this_user_may_open(tmp_path: Path) -> None:
    """By default that is a soft limit of 1,024, and a checkpoint of 2,048 ranks has as many files."""
    save_model(tmp_path / "a", {f"w{i}": make_array((4,)) for i in range(60)})
    done = process("convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors", "--max-shard-bytes", 1)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 60
    for limit, code in (("-S -n", 0), ("-n", 2)):
        shell = [
            "sh",
            "-c",
            f'ulimit {limit} 40; "$0" "$@"',
            *MODULE,
            "diff",
            str(tmp_path / "b"),
            str(tmp_path / "b"),
        ]
        done = subprocess.run(shell, env=env(), capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert done.stderr.endswith("(see ulimit -n)\n") == (code == 2)


def test_tracebacks_are_for_those_who_ask(tmp_path: Path) -> None:
    evil = tmp_path / "\x1b]0;owned\x07"
    evil.mkdir()
    for args in (("--debug", "inspect", evil), ("inspect", evil, "--debug")):
        done = process(*args)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert "\\x1b]0;owned" in done.stderr
        assert "\x1b" not in done.stderr
    evil.rmdir()
    done = process("inspect", tmp_path)
    assert done.stderr == f"error: {tmp_path} holds no committed checkpoint\n"


def test_piped_output_is_plain_and_not_wrapped(tmp_path: Path) -> None:
    key = "a_very_long_name." * 20 + "w"
    save_model(tmp_path, {key: make_array((3,))})
    done = process("inspect", tmp_path, COLUMNS="40", FORCE_COLOR="1")
    assert "\x1b" not in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "float32" in line)
    assert line.endswith("2 parts")
    assert process("inspect", tmp_path, "--json").stderr == ""


def test_who_reads_may_stop_reading(tmp_path: Path) -> None:
    save_model(tmp_path, {f"layers.{i}.w{i}": make_array((1,)) for i in range(3000)})
    command = [*MODULE, "inspect", str(tmp_path), "--all"]
    with subprocess.Popen(command, env=env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.readline()
        started.stdout.close()
        assert started.stderr.read() == b""
        assert started.wait(60) == 141


@pytest.mark.parametrize(
    "command",
    [
        "-m paddle_dist_ckpt inspect nope 2>/dev/full",
        "-m paddle_dist_ckpt inspect nope 2>&1 | true",
        "-m paddle_dist_ckpt inspect nope >&-",
        "-m paddle_dist_ckpt no-such-command 2>/dev/full",
        "-m paddle_dist_ckpt --help >/dev/full",
        "-u -m paddle_dist_ckpt --help >/dev/full 2>&-",
    ],
)
def test_the_exit_code_does_not_depend_on_whether_anything_can_be_said(tmp_path: Path, command: str) -> None:
    script = f'unset PYTHONUNBUFFERED; "$0" {command}; exit ${{PIPESTATUS[0]}}'
    shell = ["bash", "-c", script, sys.executable]
    done = subprocess.run(shell, env=env(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_broken_pipe_of_a_storage_is_an_error_as_others(tmp_path: Path, output: str) -> None:
    """That of a pipe in which nobody reads the output is not."""
    program = (
        "import errno\n"
        "from paddle_dist_ckpt.storage import LocalStorage\n"
        "def names(storage):\n    raise BrokenPipeError(errno.EPIPE, 'Broken pipe', storage.location)\n"
        "LocalStorage.names = names\n"
        "from paddle_dist_ckpt.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "inspect", str(tmp_path)]
    done = subprocess.run(command, env=env(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: Broken pipe: {tmp_path}\n")
    end, start = os.pipe()
    os.close(end)
    unread = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, output: start}
    assert subprocess.run(command, env=env(), timeout=120, **unread).returncode == 141
    os.close(start)


def test_the_help_is_as_narrow_as_the_terminal() -> None:
    assert all(len(line) <= 60 for line in process("--help", COLUMNS="60").stdout.split("\n"))


def test_nobody_has_to_read_the_help() -> None:
    end, start = os.pipe()
    os.close(end)
    done = subprocess.run([*MODULE, "--help"], env=env(), stdout=start, stderr=subprocess.PIPE, timeout=120)
    os.close(start)
    assert (done.returncode, done.stderr) == (141, b"")


def test_nobody_is_asked_where_stdin_is_closed(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS)
    shell = ["sh", "-c", '"$0" "$@" <&-', *MODULE, "delete", str(tmp_path), "0"]
    done = subprocess.run(shell, env=env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "stdin is no terminal, so nobody can be asked; pass --yes" in done.stderr


def test_five_thousand_tensors_are_shown_quickly(tmp_path: Path) -> None:
    save_model(tmp_path, {f"layers.{i}.{name}": np.zeros(2) for i in range(2500) for name in ("weight", "bias")})
    before = os.times()
    assert len(process("inspect", tmp_path, "--all").stdout.splitlines()) > 5000
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
from paddle_dist_ckpt.storage.local_files import LocalReadable

read_into = LocalReadable.read_into

def slow(self, buffers, offset, once=False):
    if sum(map(len, buffers)) > 100_000:
        print("reading", flush=True)
        time.sleep(1)
    read_into(self, buffers, offset, once)

LocalReadable.read_into = slow
from paddle_dist_ckpt.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 250 MiB, which is a minute of slow reading."""
    folder = tmp_path_factory.mktemp("large")
    save_model(folder, {"w": np.zeros((1000, 1 << 15))})
    return folder


@pytest.mark.parametrize("command", some(["copy", "verify", "diff", "cat"], 2))
def test_interrupted(tmp_path: Path, large: Path, command: str) -> None:
    here = large
    more = {"verify": [here], "copy": [here, tmp_path / "b"], "diff": [here, here], "cat": [here, "model.w", "--stats"]}
    started = subprocess.Popen(
        [sys.executable, "-c", SLOW, command, *map(str, more[command])],
        env=env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        assert started.stdout is not None
        assert started.stdout.readline() == "reading\n"
        started.send_signal(signal.SIGINT)
        before = time.monotonic()
        _, errors = started.communicate(timeout=60)
        assert time.monotonic() - before < 30
        assert (started.returncode, errors) == (130, "interrupted\n")
    assert not (tmp_path / "b").exists() or list((tmp_path / "b").iterdir()) == []
