"""Which host a process runs on."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

__all__ = ["this_host"]


@functools.cache
def this_host() -> str:
    """This boot of this host. The host name alone would not tell cloned machines or containers apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
