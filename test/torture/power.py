"""What may be on a disk after a loss of power: of what was written, of which some was made durable.

A file's content is durable when the file was synced after it was written, a name when its folder was. What is not
durable may be there or not: of a write any of its sectors, the others being zeros or what was in these sectors of the
disk before; of names either all up to some moment, as filesystems with a journal keep them (where any sync takes all
names before it along), or any of them, which is all that POSIX promises. What a rename does is done or not, as one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Effect", "Image", "Names", "Resize", "Sync", "Write", "after_power_loss", "image_of", "materialise"]

_SECTOR = 512
ROOT = 0
"""The number of the folder in which everything is."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes were written to a file."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file was given another size."""

    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Names:
    """Names in a folder were taken away and given, at once.

    Attributes:
        folder: The folder.
        removed: The name that means nothing any more.
        added: The name that means something else now, and what.
        makes: Whether a folder is made by it.
    """

    folder: int
    removed: str | None = None
    added: tuple[str, int] | None = None
    makes: bool = False


@dataclass(frozen=True, slots=True)
class Sync:
    """A file or a folder was synced."""

    inode: int


Effect = Write | Resize | Names | Sync
Image = dict[str, "bytes | Image"]
"""What is in a folder: files by their content, folders."""


@dataclass(slots=True)
class _Disk:
    """Files and folders by their numbers: what is durable of each, and what was done to it since."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    written: dict[int, list[Write | Resize]] = field(default_factory=dict)
    named: list[tuple[int, Names]] = field(default_factory=list)
    last_sync: int = -1

    def do(self, place: int, effect: Effect) -> None:
        """Take note of what was done at a place of the log."""
        if isinstance(effect, Names):
            if effect.makes and effect.added is not None:
                self.folders[effect.added[1]] = {}
            self.named.append((place, effect))
        elif isinstance(effect, Sync):
            self._sync(effect.inode)
            self.last_sync = place
        else:
            self.written.setdefault(effect.inode, []).append(effect)

    def _sync(self, inode: int) -> None:
        if inode in self.folders:
            for _, names in self.named:
                if names.folder == inode:
                    _apply(self.folders[inode], names)
            self.named = [(place, names) for place, names in self.named if names.folder != inode]
        else:
            content = bytearray(self.files.get(inode, b""))
            for write in self.written.pop(inode, []):
                _write(content, write)
            self.files[inode] = bytes(content)

    def image(self, folder: int = ROOT) -> Image:
        """What can be reached by its name."""
        found: Image = {}
        for name, inode in self.folders[folder].items():
            found[name] = self.image(inode) if inode in self.folders else self.files.get(inode, b"")
        return found


def _apply(folder: dict[str, int], names: Names) -> None:
    if names.removed is not None:
        folder.pop(names.removed, None)
    if names.added is not None:
        folder[names.added[0]] = names.added[1]


def _write(content: bytearray, write: Write | Resize) -> None:
    end = write.size if isinstance(write, Resize) else write.offset + len(write.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if isinstance(write, Resize):
        del content[end:]
    else:
        content[write.offset : end] = write.data


def _disk_after(log: Sequence[Effect], count: int) -> _Disk:
    disk = _Disk()
    for place, effect in enumerate(log[:count]):
        disk.do(place, effect)
    return disk


def image_of(log: Sequence[Effect], count: int) -> Image:
    """What programs saw after so many effects."""
    disk = _disk_after(log, count)
    for inode in [*disk.written, *disk.folders]:
        disk._sync(inode)
    return disk.image()


def after_power_loss(log: Sequence[Effect], count: int, journal: bool, rng: random.Random) -> Image:
    """What may be there when the power was lost after so many effects.

    Args:
        log: What was done.
        count: How much of it.
        journal: Whether names become durable in the order in which they were given.
        rng: Draws what is not certain.
    """
    disk = _disk_after(log, count)
    moment = rng.randint(disk.last_sync, count) if rng.random() < 0.8 else rng.choice((disk.last_sync, count))
    share = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    for place, names in disk.named:
        if place <= moment if journal else rng.random() < share:
            _apply(disk.folders[names.folder], names)
    share = rng.choice((0.0, 0.5, 0.5, 1.0))
    for inode, writes in disk.written.items():
        content = bytearray(disk.files.get(inode, b""))
        for write in writes:
            _write_some(content, write, share, rng)
        disk.files[inode] = bytes(content)
    return disk.image()


def _write_some(content: bytearray, write: Write | Resize, share: float, rng: random.Random) -> None:
    """A write of which only a part, or nothing, has come to the disk."""
    how = rng.random()
    if how < share or isinstance(write, Resize):
        if how < share:
            _write(content, write)
        return
    if how < share + (1 - share) / 3:
        return
    sectors = range(0, len(write.data), _SECTOR)
    kept = rng.choice((0.1, 0.5, 0.9))
    lost = rng.choice((None, bytes(_SECTOR), rng.randbytes(_SECTOR)))  # not even the file's length; zeros; old data
    upto = rng.randrange(len(sectors) + 1) if rng.random() < 0.5 else None
    for number, start in enumerate(sectors):
        stays = number < upto if upto is not None else rng.random() < kept
        data = write.data[start : start + _SECTOR]
        if not stays and lost is None:
            continue
        _write(content, Write(write.inode, write.offset + start, data if stays else (lost or b"")[: len(data)]))


def materialise(image: Image, folder: Path) -> None:
    """Make the files of an image in a folder."""
    for name, content in image.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            materialise(content, folder / name)
        else:
            (folder / name).write_bytes(content)
