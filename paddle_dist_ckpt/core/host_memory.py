"""How much memory there is still for this process (Linux): what the host has, and what the process's cgroups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["free_memory"]

_CGROUPS = "sys/fs/cgroup"
# For both versions: the most that may be used, or that may be before a process is held up for each page that it takes;
# what is used; and what of that is given back before anything is refused: cached pages of files, also of those that are
# read again and again, such as a data set. The host counts them as well.
_VERSION_2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def free_memory(root: Path = Path("/")) -> int | None:
    """How many bytes this process could get now; None if nothing says so.

    A container may have far less than its host, and a process that takes more is killed.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    known = [_of_host(root), *_of_cgroups(root)]
    return min((one for one in known if one is not None), default=None)


def _of_host(root: Path) -> int | None:
    name = "MemAvailable:"
    kibibytes = _entries(root / "proc/meminfo", name)
    return kibibytes[name] * 1024 if kibibytes else None


def _of_cgroups(root: Path) -> Iterator[int | None]:
    """What is left in the process's groups and in those around them, each of which may have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            yield from _of_group(root, _CGROUPS, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _of_group(root, f"{_CGROUPS}/memory", path, _VERSION_1)


def _of_group(
    root: Path, mounted: str, path: str, names: tuple[tuple[str, ...], str, tuple[str, ...]]
) -> Iterator[int | None]:
    inside = _inside(root, mounted, PurePosixPath(path))
    for each in (inside, *inside.parents):
        yield _left(root / mounted / each, *names)


def _inside(root: Path, mounted: str, path: PurePosixPath) -> PurePosixPath:
    """Where a group of some path is below what is mounted: a container often sees its own group where all would be."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        _, _, _, group, place, *_ = [*line.split(), *5 * [""]]
        if place == f"/{mounted}" and path.is_relative_to(group):
            return path.relative_to(group)
    return path.relative_to("/") if path.is_absolute() else path


def _left(group: Path, limits: tuple[str, ...], usage: str, given_back: tuple[str, ...]) -> int | None:
    texts = [_text(group / limit).strip() for limit in limits]
    most = min((int(text) for text in texts if text.isdecimal()), default=None)  # none: no such group, or "max"
    used = _text(group / usage).strip()
    if most is None or not used.isdecimal():
        return None
    return max(0, most - int(used) + sum(_entries(group / "memory.stat", *given_back).values()))


def _entries(file: Path, *names: str) -> dict[str, int]:
    """The numbers that follow these names at the beginning of a line."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[0] in names and words[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return os.fsdecode(file.read_bytes())  # groups may have any name
    except (OSError, ValueError):
        return ""
