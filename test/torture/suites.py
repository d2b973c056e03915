"""Which suites there are, and how much of each is done in twenty minutes on two cores."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

__all__ = ["MEMORY", "MINUTES", "SUITES", "Suite", "named", "prefix"]

MINUTES = 20.0
"""How long a run of everything takes."""


MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
"""Where attempts have their folders: in memory, if there is such a place."""


def prefix(process: int) -> str:
    """What the names of a process's folders begin with, so that they can be removed if it is killed."""
    return f"torture-{process}-"


@dataclass(frozen=True, slots=True)
class Suite:
    """A module of this folder with ``NAME`` and ``attempt(seed, folder)``, which returns how many things ended how.

    Attributes:
        module: Its name.
        goal: How many things are tried in `MINUTES`.
        seconds: The longest that one attempt may take, on a busy machine.
    """

    module: str
    goal: int
    seconds: float = 300.0

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return cast(str, self._imported.NAME)

    @property
    def attempt(self) -> Callable[[int, Path], Counter[str]]:
        """Tries one thing or a few, as the seed has it, in an empty folder."""
        return cast("Callable[[int, Path], Counter[str]]", self._imported.attempt)

    def try_seed(self, seed: int) -> Counter[str]:
        """Make one attempt, in a new folder."""
        folder = Path(tempfile.mkdtemp(prefix=prefix(os.getpid()), dir=MEMORY))
        try:
            return self.attempt(seed, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _imported(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.{self.module}")


SUITES = (
    Suite("endurance", 1, 600.0),
    Suite("crash_states", 5_000),
    Suite("kills", 1_000),
    Suite("stops", 400),
    Suite("io_errors", 1_000),
    Suite("full_disks", 300),
    Suite("corruption", 20_000),
    Suite("mixes", 4_000),
    Suite("interleavings", 10_000),
    Suite("decoders", 960_000),
    Suite("foreign", 40_000),
    Suite("hostile_files", 500),
    Suite("clients", 600),
    Suite("cuts", 60),
)


def named(names: str | None) -> tuple[Suite, ...]:
    """The suites of these modules, with commas between; all if there are none.

    Raises:
        ValueError: there is no such suite.
    """
    if names is None:
        return SUITES
    known = {suite.module: suite for suite in SUITES}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no suite {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)
