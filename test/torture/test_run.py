"""The runner: what comes next, how it goes on, what it says of a broken promise, and what ends a hanging attempt."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from . import endurance, run, suites
from .ledger import Ledger
from .suites import Suite, named
from .table import table


def suite(monkeypatch: pytest.MonkeyPatch, name: str, attempt: Callable[[int, Path], Counter[str]]) -> None:
    """Add a suite to those that there are."""
    module = ModuleType(f"{__package__}.{name}")
    module.__dict__.update(NAME=f"suite {name}", attempt=attempt)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    others = tuple(known for known in suites.SUITES if known.goal == 77)
    monkeypatch.setattr(suites, "SUITES", (*others, Suite(name, 77, 2.0)))


def noted(notes: Path) -> Callable[[int, Path], Counter[str]]:
    """An attempt that only notes which one it is."""

    def attempt(seed: int, folder: Path) -> Counter[str]:
        assert not list(folder.iterdir())
        (folder / "something").touch()
        with notes.open("a") as file:
            file.write(f"{seed}\n")
        return Counter({"well": 2, "badly": seed % 2})

    return attempt


def seeds(notes: Path) -> list[int]:
    return sorted(map(int, notes.read_text().split())) if notes.exists() else []


def test_a_run_ends_when_all_is_tried_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite(monkeypatch, "easy", noted(tmp_path / "notes"))
    assert run.main(["--suites", "easy", "--seed", "100", "--table", "rst"]) == 0
    assert seeds(tmp_path / "notes")[:3] == [100, 101, 102]
    printed = capsys.readouterr().out
    assert "* - suite easy" in printed
    assert "well" in printed


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite(monkeypatch, "easy", noted(tmp_path / "notes"))
    command = ["--suites", "easy", "--attempts", "6", "--workers", "2", "--state", str(tmp_path / "state")]
    assert run.main(command) == 0
    lines = (tmp_path / "state").read_text().splitlines()
    (tmp_path / "state").write_text("\n".join([*lines[:4], lines[4][:9]]))  # three of six, and a torn line
    left = {line.partition('"seed": ')[2].partition(",")[0] for line in lines[4:-1]}
    (tmp_path / "notes").unlink()
    assert run.main(command) == 0
    assert {*map(str, seeds(tmp_path / "notes"))} == left
    assert len(left) == 3

    (tmp_path / "notes").unlink()
    assert run.main(command) == 0
    assert seeds(tmp_path / "notes") == [0, 1, 2, 3, 4, 5], "one that has ended starts anew"
    (tmp_path / "notes").unlink()
    assert run.main([*command, "--seed", "9"]) == 0
    assert seeds(tmp_path / "notes") == [9, 10, 11, 12, 13, 14], "and so does another one"


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_broken_promise_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keep_going: bool
) -> None:
    attempt = noted(tmp_path / "notes")

    def breaking(seed: int, folder: Path) -> Counter[str]:
        assert seed % 4 != 1, "seed of that kind"
        return attempt(seed, folder)

    suite(monkeypatch, "bad", breaking)
    command = ["--suites", "bad", "--attempts", "4", "--workers", "1"]
    assert run.main([*command, "--keep-going"] if keep_going else command) == 1
    printed = capsys.readouterr().out
    assert "suite bad, seed 1" in printed
    assert "seed of that kind" in printed
    assert "-m test.torture.run --suites bad --seed 1 --attempts 1" in printed
    assert seeds(tmp_path / "notes") == ([0, 2, 3] if keep_going else [0])


def test_an_attempt_that_hangs_or_dies_is_a_broken_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hanging(seed: int, folder: Path) -> Counter[str]:
        if seed == 0:
            sys.modules["os"]._exit(3)
        time.sleep(600 if seed == 1 else 0)
        return Counter(["well"])

    suite(monkeypatch, "late", hanging)
    assert run.main(["--suites", "late", "--attempts", "3", "--workers", "1", "--keep-going"]) == 1
    printed = capsys.readouterr().out
    assert "seed 0:\nthe process has ended with 3" in printed
    assert "seed 1:\nit takes more than 2 s" in printed
    assert "well 1" in printed


def test_the_suite_that_is_behind_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        suite(monkeypatch, name, noted(tmp_path / name))
    assert run.main(["--suites", "one,two", "--minutes", "2", "--workers", "1"]) == 0
    assert seeds(tmp_path / "one") == seeds(tmp_path / "two") == [0, 1, 2, 3], "2, 3, 2, 3 of 7.7"


def test_unknown_suites_are_refused() -> None:
    with pytest.raises(ValueError, match="no suite nothing; there are endurance, "):
        named("kills,nothing")


def test_every_suite_has_a_name_of_its_own() -> None:
    names = [known.name for known in suites.SUITES]
    assert len(set(names)) == len(names) >= 8


def test_a_table_for_each_form() -> None:
    ledger, (kills,) = Ledger(None, {}), named("kills")
    ledger.add("kills", 1, Counter({"old": 1500, "new": 3}), 62.4, 1.0)
    assert table([kills], ledger, "text").splitlines()[1] == "kills     1,503       62  old 1,500; new 3"
    assert "| kills | 1,503 | 62 | old 1,500; new 3 |" in table([kills], ledger, "markdown")
    assert "    * - kills\n      - 1,503\n      - 62\n      - old 1,500; new 3" in table([kills], ledger, "rst")
    ledger.add("kills", 1, Counter({f"saved under the strangest of all conditions {i}": 1 for i in range(9)}), 1.0, 1.0)
    lines = table([kills], ledger, "rst").splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[-1].startswith("        saved under")
    assert lines[-1].endswith(" 8 1")


@pytest.mark.parametrize(("field", "most"), [("memory", 2 << 20), ("descriptors", 0), ("threads", 0)])
def test_growth_is_seen(field: str, most: int) -> None:
    flat = [endurance.Sample(50 << 20, 9, 4)] * 30
    endurance._check_flat(0, flat)
    rising = [sample._replace(**{field: getattr(sample, field) + i * (1 + most // 8)}) for i, sample in enumerate(flat)]
    with pytest.raises(AssertionError, match=field):
        endurance._check_flat(0, rising)
