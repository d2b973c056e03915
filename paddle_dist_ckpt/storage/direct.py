"""Input and output past the page cache, where the filesystem is a local disk's. What depends on the platform is here.

Buffered writing costs a page fault and a copy for each page of the cache, and makes the fsync wait for all of them at
once; on machines that have just given their free memory back it is several times slower than the disk. Filesystems of
other kinds (memory, network, overlays) are written through the cache, for there it is what makes them fast. Reading
what the cache does not hold is faster past it too, by about a tenth.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import queue
import sys
from contextlib import suppress
from pathlib import Path

from ..core.memory import Bytes1D, fresh_pages

__all__ = ["ALIGNMENT", "is_cached", "open_direct", "read_direct"]

ALIGNMENT = 4096
_PIECE = 2 << 20
_MOST_ASKED, _SAMPLES, _SAMPLE_BYTES = 4 << 20, 16, 64 << 10  # a larger range is asked for by samples
_CACHESTAT = 451  # the system call's number, on every architecture
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)


def open_direct(descriptor: int, access: int) -> int | None:
    """A second descriptor for an open file, past the cache, or None where that is not possible or not wanted.

    It is for that very file, whatever its name means by now. Memory, offset and size of what is done with it must be at
    multiples of ``ALIGNMENT``. ``access`` is ``os.O_RDONLY`` or ``os.O_WRONLY``.
    """
    if not hasattr(os, "O_DIRECT") or _filesystem(os.fstat(descriptor).st_dev) not in _LOCAL_DISKS:
        return None
    with suppress(OSError):  # no /proc, too many open files, a sandbox: the descriptor that there is will do
        return os.open(f"/proc/self/fd/{descriptor}", access | os.O_DIRECT | os.O_CLOEXEC)
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


def is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds most of a range, as far as the kernel (Linux, from 6.5) can tell; else True.

    It is asked for samples of a large range, since it goes through all pages.
    """
    step, size = (nbytes, nbytes) if nbytes <= _MOST_ASKED else (-(-nbytes // _SAMPLES), _SAMPLE_BYTES)
    span, found, held, asked = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)(), 0, 0
    for start in range(offset, offset + nbytes, max(1, step)):
        span[:] = [start, min(size, offset + nbytes - start)]
        if _libc is None or _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(found), 0) != 0:
            return True
        held, asked = held + found[0] * mmap.PAGESIZE, asked + span[1]
    return held * 2 >= asked


def read_direct(descriptor: int, view: memoryview, offset: int, buffers: queue.SimpleQueue[Bytes1D]) -> int:
    """Fill a view, or the beginning of it, past the cache, by an aligned buffer; returns how many bytes that were.

    Returns 0 where the file ends, or where this device does not do it.

    Args:
        descriptor: One that :func:`open_direct` gave.
        view: What to fill; need not be aligned.
        offset: Where in the file to start, anywhere.
        buffers: Where buffers are kept that nobody uses right now; threads may share it.
    """
    view = view[:_PIECE]
    low = offset - offset % ALIGNMENT
    high = -(-(offset + len(view)) // ALIGNMENT) * ALIGNMENT
    try:
        buffer = buffers.get_nowait()
    except queue.Empty:
        buffer = fresh_pages(_PIECE + 2 * ALIGNMENT)
    try:
        got = os.preadv(descriptor, [buffer[: high - low].data], low)
        count = max(0, min(got - (offset - low), len(view)))
        view[:count] = buffer[offset - low : offset - low + count].data
        return count
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return 0
    finally:
        buffers.put(buffer)
