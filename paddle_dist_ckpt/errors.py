"""The exception tree.

    CheckpointError
    ├── CheckpointNotFoundError     no such folder, id or key pattern
    ├── CheckpointCorruptedError    bytes are not what was written
    ├── StateDictMismatchError      the checkpoint does not fit the targets; ``problems`` lists every one
    ├── UnsupportedValueError       a value or layout that cannot be stored
    ├── RankFailureError            another rank (or several) failed; ``failures`` maps rank to its exception
    └── CheckpointTimeoutError      ranks stayed silent past the deadline; ``missing_ranks`` names them

Errors about what all ranks share (the first four, when the coordinator finds them or when every rank's answers are
merged) are raised with the same type on every rank. An error of one rank alone is raised as
:class:`RankFailureError` on all of them; a process that works alone raises the error itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "RankFailureError",
    "StateDictMismatchError",
    "UnsupportedValueError",
]


class CheckpointError(Exception):
    """Root of everything that this library raises on its own account."""


class CheckpointNotFoundError(CheckpointError):
    """The folder holds no such checkpoint, or nothing in it matches what was asked for."""


class CheckpointCorruptedError(CheckpointError):
    """Stored bytes are missing, truncated, altered, or not in the format they claim to be."""


class StateDictMismatchError(CheckpointError):
    """The checkpoint does not fit the targets. No target was touched.

    Attributes:
        problems: One line for every key that does not fit, with what was expected and what was found.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class UnsupportedValueError(CheckpointError):
    """A value in the state_dict cannot be stored. Raised before a byte is written."""


class RankFailureError(CheckpointError):
    """One or more ranks failed, so the whole operation did, on every rank.

    Attributes:
        failures: Maps each failed rank to its exception. On the rank that failed it is the original exception;
            on the others a copy: of the same type if that is one of this library's, else a CheckpointError whose
            message begins with the type's name.
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, BaseException] = dict(failures or {})


class CheckpointTimeoutError(CheckpointError):
    """Some ranks stayed silent for longer than ``options.timeout``.

    Attributes:
        missing_ranks: The silent ranks, ascending.
    """

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks: tuple[int, ...] = tuple(sorted(missing_ranks))
