"""What a verification finds, on one rank or on several that share the files."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..exporting.plan import divide_files
from ..folder.verify import check_file, uncovered, verified_bytes
from ..storage.base import Storage
from .ranks import gathered, is_first, same_checkpoint

__all__ = ["VerifyFacts", "verify_together"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was written: in which file, if it is about one, and what, with the tensor's key."""

    file: str | None
    text: str


@dataclass(frozen=True, slots=True)
class VerifyFacts:
    """What a verification has found.

    Attributes:
        path: The folder.
        unique_id: The checkpoint's number.
        format: Its format; ``"native"`` for this library's own.
        ok: Whether there is no problem.
        verified_bytes: Bytes of tensors that were compared with checksums: all of this library's own.
        files: How many data files were checked.
        total_bytes: Their size.
        problems: Every problem.
    """

    path: str
    unique_id: int
    format: str
    ok: bool
    verified_bytes: int
    files: int
    total_bytes: int
    problems: list[Problem]


def verify_together(
    session: ControlSession, storage: Storage, unique_id: int | None, progress: bool | None
) -> list[VerifyFacts]:
    """Verify a checkpoint; each rank checks some of its files, about equally many bytes.

    Returns:
        On the coordinator what was found by all; nothing elsewhere.

    Raises:
        CheckpointError: there is no such checkpoint, or its `.metadata` cannot be read.
    """
    metadata = same_checkpoint(session, storage, unique_id)
    sizes = [info.size for info in metadata.files]
    mine = divide_files(sizes, len(session.ranks))[session.ranks.index(session.rank)]

    def check() -> list[Problem]:
        problems = []
        with Progress("verify", sum(sizes[file] for file in mine), progress, is_first(session)) as bar:
            for file in mine:
                session.check()
                found = check_file(storage, metadata, file, bar)
                problems += [Problem(metadata.files[file].name, text) for text in found]
        return problems

    parts = gathered(session, "check", check, list[Problem])
    if not parts:
        return []
    problems = [Problem(None, text) for text in uncovered(metadata)] + [problem for part in parts for problem in part]
    return [
        VerifyFacts(
            path=storage.location,
            unique_id=metadata.unique_id,
            format=metadata.format,
            ok=not problems,
            verified_bytes=verified_bytes(metadata),
            files=len(sizes),
            total_bytes=sum(sizes),
            problems=problems,
        )
    ]
