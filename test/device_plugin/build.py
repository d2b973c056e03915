"""Builds the test device's runtime, once for each version of its sources, and says how a process loads it.

Nothing here imports paddle: a device has to be known before Paddle is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["NAME", "UnavailableError", "environment", "library", "reason_to_skip"]

NAME = "test_device"

_SOURCES = Path(__file__).parent / "runtime"
# nodelete: Paddle unloads the library at exit, when streams' threads may still run its code.
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wl,-z,nodelete")
_LIBRARIES = ("-lrt", "-pthread")
_BUILD_SECONDS = 600  # it takes 15 on a quiet machine


class UnavailableError(Exception):
    """The runtime cannot be built on this machine. The message says why."""


@cache
def library() -> Path:
    """Return the built runtime, which is the only file in its folder. Several processes may call it at once.

    Raises:
        UnavailableError: no compiler, no header of Paddle's, or another system than Linux.
        subprocess.CalledProcessError: the sources do not compile.
    """
    compiler, headers = _compiler(), _headers()
    sources = sorted(_SOURCES.iterdir())
    parts = [header.read_bytes() for header in headers.rglob("device_ext.h")]
    parts += [source.read_bytes() for source in sources]
    digest = hashlib.sha256(b"\0".join([*parts, " ".join(_FLAGS).encode()])).hexdigest()[:16]
    built = _cache() / digest / f"lib{NAME}.so"
    if not built.exists():
        # One builds, and the others wait: the processes of a test run come here together.
        with open(built.parent.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(compiler, headers, built)
    return built


def reason_to_skip() -> str | None:
    """Return why there can be no test device here, or None."""
    try:
        library()
    except UnavailableError as error:
        return str(error)
    return None


def environment(
    *,
    devices: int = 1,
    memory: int = 1 << 30,
    speed: float = 0.0,
    network_speed: float = 0.0,
    pageable_waits: bool = False,
    all_to_all: bool = True,
    kernels: bool = True,
) -> dict[str, str]:
    """Return the variables of a process whose Paddle has the device.

    Args:
        devices: How many devices it sees.
        memory: Bytes of memory of each.
        speed: Bytes per second between host and device, each way; 0 for no limit.
        network_speed: Bytes per second that a rank gives to collectives; 0 for no limit.
        pageable_waits: An asynchronous copy to host memory that is not pinned returns only when it is done, as with
            CUDA, rather than at once.
        all_to_all: Whether its collectives have this operation.
        kernels: Whether it has the kernels that move bytes; other kernels it never has.
    """
    return {
        "CUSTOM_DEVICE_ROOT": str(library().parent),
        "TEST_DEVICE_COUNT": str(devices),
        "TEST_DEVICE_NO_ALL_TO_ALL": str(int(not all_to_all)),
        "TEST_DEVICE_NO_KERNELS": str(int(not kernels)),
        "TEST_DEVICE_MEMORY": str(memory),
        "TEST_DEVICE_SPEED": str(speed),
        "TEST_DEVICE_NETWORK_SPEED": str(network_speed),
        "TEST_DEVICE_PAGEABLE_WAITS": str(int(pageable_waits)),
    }


def _compiler() -> str:
    if os.uname().sysname != "Linux":
        raise UnavailableError("the test device needs Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("the test device needs g++, which is not on the PATH")
    return compiler


def _headers() -> Path:
    found = importlib.util.find_spec("paddle")
    if found is None or not found.submodule_search_locations:
        raise UnavailableError("the test device needs Paddle")
    headers = Path(found.submodule_search_locations[0]) / "include"
    if not (headers / "paddle/phi/backends/device_ext.h").exists():
        raise UnavailableError(f"this Paddle has no plugin interface in {headers}")
    return headers


def _cache() -> Path:
    """Return a folder of this user's own: what is in it will be loaded as code."""
    folder = Path(tempfile.gettempdir(), f"paddle-{NAME}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise UnavailableError(f"{folder} could be written by somebody else")
    return folder


def _build(compiler: str, headers: Path, built: Path) -> None:
    """Compile into a folder aside and rename it: whoever sees the library sees it whole."""
    with tempfile.TemporaryDirectory(dir=built.parent.parent, prefix="build-") as temporary:
        folder = Path(temporary, "new")
        folder.mkdir()
        source = str(_SOURCES / "plugin.cc")
        kernels = ("-L", str(headers.parent / "libs"), "-lphi_core")  # Paddle has it open: no path to it is needed
        command = [compiler, *_FLAGS, f"-I{headers}", source, "-o", str(folder / built.name), *_LIBRARIES, *kernels]
        subprocess.run(command, check=True, timeout=_BUILD_SECONDS)
        folder.rename(built.parent)
