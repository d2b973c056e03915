"""What a run has done so far, kept in a file, so that one that was interrupted can go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Done", "Ledger"]


@dataclass(slots=True)
class Done:
    """What was done of one suite.

    Attributes:
        seeds: The seeds that were tried.
        outcomes: How many things ended how.
        seconds: How long that took, all processes together.
    """

    seeds: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """How many things were tried."""
        return sum(self.outcomes.values())


class Ledger:
    """A run's record, a line for each attempt.

    Args:
        path: Where it is kept; None to keep it in memory only.
        run: What the run is: one that was another is not gone on with, nor is one that has ended.
    """

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self._path, self._run = path, run
        self._done: dict[str, Done] = {}
        self.minutes = 0.0
        lines = list(_lines(path)) if path is not None else []
        self.resumed = bool(lines) and lines[0] == run and "ended" not in lines[-1]
        if self.resumed:
            for line in lines[1:]:
                self._count(line)
        if path is not None:
            kept = lines if self.resumed else [run]
            path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))

    def of(self, module: str) -> Done:
        """What was done of a suite."""
        return self._done.setdefault(module, Done())

    def add(self, module: str, seed: int, outcomes: Counter[str], seconds: float, minutes: float) -> None:
        """Take note of an attempt; ``minutes`` is how long the run has taken by then."""
        line = {"suite": module, "seed": seed, "outcomes": outcomes}
        self._write({**line, "seconds": round(seconds, 3), "minutes": round(minutes, 3)})

    def end(self) -> None:
        """All is done: the next run starts anew."""
        self._write({"ended": True})

    def _write(self, line: dict[str, Any]) -> None:
        self._count(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")

    def _count(self, line: dict[str, Any]) -> None:
        if "suite" in line:
            done = self.of(line["suite"])
            done.seeds.add(line["seed"])
            done.outcomes.update(line["outcomes"])
            done.seconds += line["seconds"]
            self.minutes = max(self.minutes, line["minutes"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record, but for one that was cut short."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return
