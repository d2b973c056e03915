"""Which host a process runs on."""

from __future__ import annotations

import errno
import functools
import socket
from pathlib import Path

__all__ = ["this_host"]

_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@functools.cache
def this_host() -> str:
    """This boot of this host. The host name alone would not tell cloned machines or containers apart.

    Raises:
        OSError: it cannot be told now, as when too many files are open.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        if error.errno in _FOR_NOW:  # without it this host would be another one, for as long as the process lives
            raise
        boot = ""
    return f"{socket.gethostname()}/{boot}"
