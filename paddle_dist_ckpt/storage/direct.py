"""Writing past the page cache, where the filesystem is a local disk's. Everything that depends on the platform is here.

Buffered writing costs a page fault and a copy for each page of the cache, and makes the fsync wait for all of them at
once; on machines that have just given their free memory back it is several times slower than the disk. Filesystems of
other kinds (memory, network, overlays) are written through the cache, for there it is what makes them fast.
"""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

__all__ = ["ALIGNMENT", "open_direct"]

ALIGNMENT = 4096
_LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)


def open_direct(path: Path) -> int | None:
    """A descriptor that writes an existing file past the cache, or None where that is not possible or not wanted.

    Writes by it must have memory, offset and size at multiples of ``ALIGNMENT``.
    """
    if not hasattr(os, "O_DIRECT") or _filesystem(os.stat(path).st_dev) not in _LOCAL_DISKS:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


@functools.lru_cache(maxsize=64)
def _filesystem(device: int) -> str:
    """The type of the filesystem on a device, empty if it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number] and after:
            return after.split()[0]
    return ""
