"""What a verification finds, on one rank or on several that share the files."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..core.text import encodable
from ..exporting.plan import divide_files
from ..files.holes import HoleBudget
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts
from ..folder.verify import check_file, check_values, uncovered, verified_bytes
from ..storage.base import Storage
from .ranks import gathered, is_first, same_checkpoint, told

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
    restarts = Restarts(storage)
    while True:
        metadata = same_checkpoint(session, storage, unique_id)
        check = functools.partial(_check_share, session, storage, metadata, progress)
        parts = gathered(session, "check", check, list[Problem])
        problems = list(itertools.chain(*parts))
        if is_first(session):
            problems = [Problem(None, text) for text in uncovered(metadata)] + problems
        if not told(session, "again", functools.partial(_is_to_repeat, problems, restarts, metadata), bool):
            break
    if not parts:
        return []
    problems = list({problem.text: problem for problem in reversed(problems)}.values())[::-1]
    return [
        VerifyFacts(
            path=storage.location,
            unique_id=metadata.unique_id,
            format=metadata.format,
            ok=not problems,
            verified_bytes=verified_bytes(metadata),
            files=len(metadata.files),
            total_bytes=sum(info.size for info in metadata.files),
            problems=problems,
        )
    ]


def _check_share(session: ControlSession, storage: Storage, metadata: Metadata, progress: bool | None) -> list[Problem]:
    """Check the files and the values that are this rank's."""
    sizes, rank = [info.size for info in metadata.files], session.ranks.index(session.rank)
    mine = divide_files(sizes, len(session.ranks))[rank]
    problems, budget = list[Problem](), HoleBudget()
    with Progress("verify", sum(sizes[i] for i in mine), progress, is_first(session)) as bar:
        for file in mine:
            session.check()
            found = check_file(storage, metadata, file, bar, budget)
            problems += [Problem(metadata.files[file].name, encodable(text)) for text in found]
    found = check_values(storage, metadata, slice(rank, None, len(session.ranks)))
    return problems + [Problem(None, encodable(text)) for text in found]


def _is_to_repeat(problems: Sequence[Problem], restarts: Restarts, metadata: Metadata) -> bool:
    """Whether the checkpoint was replaced while something was found that is wrong with it."""
    return bool(problems) and restarts.due(metadata)
