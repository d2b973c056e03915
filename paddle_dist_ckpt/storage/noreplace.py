"""A rename that replaces nothing, which Python does not have. What depends on the platform is here."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["rename_noreplace"]

_HERE, _NOREPLACE = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a file unless the new name is taken, in one step.

    Raises:
        FileExistsError: it is taken.
        OSError: it was not renamed; ``EINVAL`` or ``ENOSYS`` where this system, or the filesystem, has no such rename.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    if _renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), ctypes.c_uint(_NOREPLACE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))
