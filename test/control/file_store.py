"""A store in a folder, by which hubs of processes that share nothing else find each other."""

from __future__ import annotations

from pathlib import Path

from test.waiting import until

__all__ = ["FileStore"]


class FileStore:
    """A BootstrapStore in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        temporary = self._folder / f"{key}.tmp"
        temporary.write_bytes(value)
        temporary.rename(self._folder / key)

    def get(self, key: str, timeout: float) -> bytes:
        until((self._folder / key).exists, timeout, key)
        return (self._folder / key).read_bytes()
