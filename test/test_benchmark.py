"""The benchmarks: each command runs, on tiny states, and prints its table. What it measures is not looked at."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmark import page
from benchmark.curves import slope
from benchmark.page_words import chinese
from test import strategies
from test.device_plugin import build

ROOT = Path(__file__).resolve().parents[1]
TABLES = {  # the first lines of each, in the order in which they take longest
    "run": "|  | paddle_dist_ckpt | Paddle's own | probe, cached |",
    "device": "|  | copies as slow as the disk: ",
    "async_save": "|  | paddle_dist_ckpt |",
    "foreign": "|  | time | : own format (95 %) | on the cores |",
    "exchange": "|  | load | unchecked load |",
    "replicas": "|  | save | times one that compares nothing (95 %) |",
    "scale": "| ranks | tensors | shards |",
    "curves": "| tensors | first save | save again | load |",
    "export": "|  | cached | times the copy |",
    "bytes_read": "| what is loaded | needed | read from files |",
}
# Those whose states or ranks are much like another's run with --long only.
TRIED = [
    name
    for name in TABLES
    if strategies.long_run
    or name not in ("async_save", "bytes_read", "curves", "device", "export", "foreign", "replicas")
]
_AT_ONCE = 2
_SECONDS = 600  # on a busy machine
_WITH_TORCH = ("run", "async_save")
_CHARTS_PYTHON = ROOT / "benchmark" / ".venv" / "bin" / "python"

Done = subprocess.CompletedProcess[str]


_INTERNALS = {"scale.py", "on_paddle.py"}  # what measures planning has to call it, and what leaves checks out


def run(command: str, *options: str, python: str = sys.executable) -> Done:
    """Run a benchmark's command to its end."""
    words = [python, "-m", f"benchmark.{command}", "--smoke", *options]
    environment = {**os.environ, "GLOG_minloglevel": "2"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS)


def tells_where_it_ran(report: str) -> None:
    """See that the machine and what it can do stand above each table."""
    blocks = report.split("\n\n")
    above = [blocks[i - 1] for i, block in enumerate(blocks) if block.startswith("| ")]
    assert above
    assert all(re.search(r"^\S.*cores, .* GiB of memory; GB/s of one thread: .*memcpy [\d.]+", line) for line in above)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for all results."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def done(results: Path) -> Iterator[dict[str, Future[Done]]]:
    """The commands, some at once: most of their time is that of starting ranks."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        without_torch = ("--torch-python", str(results / "none"))  # whether it is there or not
        yield {
            name: pool.submit(run, name, "--out", str(results), *(without_torch if name in _WITH_TORCH else ()))
            for name in TRIED
        }


@pytest.mark.parametrize("command", TRIED)
def test_a_benchmark_runs_and_prints_its_table(command: str, done: dict[str, Future[Done]], results: Path) -> None:
    if command == "device" and build.reason_to_skip():
        pytest.skip(str(build.reason_to_skip()))
    ended = done[command].result()
    assert ended.returncode == 0, ended.stderr
    assert TABLES[command] in ended.stdout
    tells_where_it_ran(ended.stdout)
    files = "benchmark" if command == "run" else command
    assert (results / f"{files}.md").read_text("utf-8") == ended.stdout.removesuffix("\n")
    found = json.loads((results / f"{files}.json").read_text("utf-8"))
    assert found["goals"]
    assert all(goal["met"] is None for goal in found["goals"])


def test_the_summary_has_all_goals(done: dict[str, Future[Done]], results: Path) -> None:
    for command in done.values():
        command.result()
    ended = run("summary", "--results", str(results))
    assert ended.returncode == 0, ended.stderr
    assert "| work | goal | found |" in ended.stdout
    tells_where_it_ran(ended.stdout)
    goals = [goal for path in results.glob("*.json") for goal in json.loads(path.read_text("utf-8"))["goals"]]
    assert all(f"| {goal['work']} | {goal['goal']} |" in ended.stdout for goal in goals)
    assert not (results / "goals.md").exists()


def test_charts_are_drawn(done: dict[str, Future[Done]], results: Path) -> None:
    if not _CHARTS_PYTHON.exists():
        pytest.skip("matplotlib is in the environment that make bench makes")
    for command in done.values():
        command.result()
    ended = run("charts", "--results", str(results), python=str(_CHARTS_PYTHON))
    assert ended.returncode == 0, ended.stderr
    drawn = {Path(line).name for line in ended.stdout.split()}
    assert drawn == {
        "ratios-A.png",
        "ratios-B.png",
        "times-A.png",
        "times-B.png",
        "memory.png",
        "scale.png",
    } | ({"curves.png"} if "curves" in TRIED else set())
    assert not list(results.glob("*.png"))


def test_the_tables_of_all_benchmarks_can_be_put_in_pages(done: dict[str, Future[Done]], results: Path) -> None:
    for command in done.values():
        command.result()
    ended = run("page", "--results", str(results))
    assert ended.returncode == 0, ended.stderr
    for title in ("Planning at scale", "大规模的规划"):
        assert f".. list-table:: {title}\n    :header-rows: 1\n" in ended.stdout


def test_tables_of_results_stand_between_the_marks_of_their_machine(tmp_path: Path) -> None:
    rows = [{"case": "1/8 of the columns on one rank", "needed": 1e6, "read": 2e6, "received": 0}]
    found = {
        "machine": {"cpu": "CPU", "cores": 4, "memory_gib": 8, "rates": {"memcpy": 12.34}, "load_before": 0.5}
        | dict.fromkeys(("filesystem", "kernel", "python"), "any"),
        "settings": {"smoke": False, "cores": 2},
        "load_after": 1.5,
        "command": "python -m benchmark.bytes_read --out /somewhere --quick",
        "date": "2030-01-02",
        "shape": [8, 8],
        "bytes_read": rows,
        "goals": [{"work": "a", "goal": "b", "found": "c", "met": True}],
    }
    (tmp_path / "bytes_read.json").write_text(json.dumps(found), "utf-8")
    (tmp_path / "curves.png").write_bytes(b"drawn")
    for language in page.LANGUAGES:
        folder = tmp_path / f"docs_{language}"
        (folder / "images").mkdir(parents=True)
        (folder / "performance.rst").write_text(
            "before\n\n.. tables of one\n\nold\n\n.. end of the tables of one\n\nafter\n", "utf-8"
        )
    for _ in range(2):  # the second time changes nothing, and keeps the picture
        page.main(["--machine", "one", "--results", str(tmp_path), "--docs", str(tmp_path)])
        (tmp_path / "curves.png").unlink(missing_ok=True)
    assert (
        (tmp_path / "docs_en" / "performance.rst").read_text("utf-8")
        == """before

.. tables of one

``python -m benchmark.bytes_read --quick``, 2030-01-02 (load average 0.5 before, 1.5 after). CPU, 2 of 4 cores, 8 GiB of
memory; GB/s of one thread: memcpy 12.3.

.. list-table:: Bytes read for slices
    :header-rows: 1

    * - what is loaded
      - needed
      - read from files
      - sent between ranks
    * - 1/8 of the columns on one rank
      - 1.0 MB
      - 2.0 MB
      - 0.0 MB

.. image:: images/curves-one.png
    :alt: curves of time and memory

.. end of the tables of one

after
"""
    )
    translated = (tmp_path / "docs_cn" / "performance.rst").read_text("utf-8")
    assert "（系统平均负载：之前 0.5，之后 1.5）。CPU，4 核中的 2 核，8 GiB 内存；" in translated
    assert "    * - 一个 rank 上八分之一的列\n      - 1.0 MB\n" in translated
    assert (tmp_path / "docs_cn" / "images" / "curves-one.png").read_bytes() == b"drawn"


def test_a_page_without_marks_and_a_word_without_translation_are_errors() -> None:
    with pytest.raises(ValueError, match="'.. tables of one'"):
        page.put("nothing\n", "one", "text")
    with pytest.raises(ValueError, match="no Chinese for 'a new column'"):
        chinese("a new column")


def test_one_curve_can_be_measured_alone(tmp_path: Path) -> None:
    ended = run("curves", "--states", "simulated ranks", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "curves.json").read_text("utf-8"))
    assert [curve["name"] for curve in found["curves"]] == ["simulated ranks"]
    assert found["command"].startswith("python -m benchmark.curves --smoke --states 'simulated ranks' --out ")


def test_a_smoke_test_leaves_nothing_behind() -> None:
    kept = ROOT / "benchmark" / "results"
    before = sorted((path, path.stat().st_mtime_ns) for path in kept.rglob("*"))
    assert run("bytes_read").returncode == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in kept.rglob("*")) == before


def test_a_slope_is_that_of_the_largest_sizes() -> None:
    points = [(1.0, 5.0), (10.0, 5.0), (100.0, 50.0), (1000.0, 500.0)]
    assert slope(points, "save") == pytest.approx(1)
    assert slope([(n, seconds * seconds) for n, seconds in points], "save") == pytest.approx(2)
    assert slope([(n, 1e-4 * n) for n, _ in points[:2]], "save") is None  # too short to tell
    assert slope([(n, 1e6) for n, _ in points], "save: memory") is None
    assert slope([], "save") is None


def test_benchmarks_use_public_names_only() -> None:
    imported = {
        (path.name, node.module)
        for path in (ROOT / "benchmark").glob("**/*.py")
        if path.name not in _INTERNALS and ".venv" not in path.parts
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paddle_dist_ckpt.")
    }
    assert {module for _, module in imported} <= {"paddle_dist_ckpt.testing"}, imported
