"""How much memory there is still for this process (Linux): what the host has, and what the process's cgroups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["free_memory"]

_CGROUPS = "sys/fs/cgroup"
# For both versions: the most that may be used, what is used, and what of that is given back before anything is refused:
# cached pages of files that nobody has looked at lately.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(root: Path = Path("/")) -> int | None:
    """How many bytes this process could get now; None if nothing says so.

    A container may have far less than its host, and a process that takes more is killed.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    known = [_of_host(root), *_of_cgroups(root)]
    return min((one for one in known if one is not None), default=None)


def _of_host(root: Path) -> int | None:
    kibibytes = _entry(root / "proc/meminfo", "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _of_cgroups(root: Path) -> Iterator[int | None]:
    """What is left in the process's groups and in those around them, each of which may have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            yield from _of_group(root / _CGROUPS, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _of_group(root / _CGROUPS / "memory", path, _VERSION_1)


def _of_group(mounted: Path, path: str, names: tuple[str, str, str]) -> Iterator[int | None]:
    """A container often sees its own group where all would be, and then not under the path that it is told."""
    inside = PurePosixPath(path.lstrip("/"))
    for each in (inside, *inside.parents):
        yield _left(mounted / each, *names)


def _left(group: Path, limit: str, usage: str, given_back: str) -> int | None:
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not (most.isdecimal() and used.isdecimal()):  # no such group, or "max"
        return None
    return max(0, int(most) - int(used) + (_entry(group / "memory.stat", given_back) or 0))


def _entry(file: Path, name: str) -> int | None:
    """The number that follows a name at the beginning of a line."""
    for line in _text(file).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""
