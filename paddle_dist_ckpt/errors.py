"""The exception tree.

    CheckpointError
    ├── CheckpointNotFoundError     no such folder, id or key pattern
    ├── CheckpointCorruptedError    bytes are not what was written
    ├── StateDictMismatchError      the checkpoint does not fit the targets; ``problems`` lists every one
    ├── UnsupportedValueError       a value or layout that cannot be stored
    ├── DurabilityUnknownError      it is done, but a crash of the machine might undo that
    ├── CheckpointReplacedError     other saves replaced the checkpoint while it was being read
    ├── RankFailureError            another rank (or several) failed; ``failures`` maps rank to its exception
    │   └── CollectiveError         ... in moving data from rank to rank
    └── CheckpointTimeoutError      ranks were silent, or their disks hung, for too long; see ``missing_ranks``

Errors about what all ranks share (the first six, when the coordinator finds them or when every rank's answers are
merged) are raised with the same type on every rank. An error of one rank alone is raised as
:class:`RankFailureError` on all of them; a process that works alone raises the error itself. What Paddle raises in a
save, of a device, has neither an error number nor a path, and becomes a :class:`CheckpointError` that names the folder.
All errors of this library that a save or a load raises name the folder that was passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .visible import MOST_MESSAGE, each_visible

__all__ = [
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CheckpointTimeoutError",
    "CollectiveError",
    "DurabilityUnknownError",
    "RankFailureError",
    "StateDictMismatchError",
    "UnsupportedValueError",
]


class CheckpointError(Exception):
    """The base class of all errors defined by this library."""

    def __str__(self) -> str:
        """The message, which may name keys and files of a checkpoint of anybody; see :mod:`.visible`."""
        return "\n".join(each_visible(super().__str__().split("\n"), MOST_MESSAGE))


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
    """Something in the state_dict cannot be stored, or the ranks' parts do not fit together. Nothing is committed.

    Raised before a byte is written, but for copies of distributed tensors that differ with ``check_replicas="error"``:
    these are compared while files are written.
    """


class DurabilityUnknownError(CheckpointError):
    """A save is committed, or an export has its name, or a checkpoint is deleted, and readers see that, but the storage
    has not confirmed that a crash cannot undo it.

    Whatever it would have replaced or removed is still there: of what is deleted, the data files. Raised on every rank.

    Attributes:
        path: The coordinator's folder; what was exported; or the folder that was deleted from.
        unique_id: The checkpoint's number; 0 for what was exported in another format.
    """

    def __init__(self, message: str, path: str = "", unique_id: int = 0) -> None:
        super().__init__(message)
        self.path, self.unique_id = path, unique_id


class CheckpointReplacedError(CheckpointError):
    """Other saves replaced the checkpoint under the same id while it was being read: of a load, again and again.

    Nothing is damaged: reading it again may succeed.
    """


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


class CollectiveError(RankFailureError):
    """Data could not be transferred between ranks: a collective failed, hung, or delivered the wrong bytes.

    The group's communicator is no longer used. On a device, ``offload=True`` loads through a group on the host instead.
    """


class CheckpointTimeoutError(CheckpointError):
    """Some ranks stayed silent for longer than ``options.timeout``, or their files for ``options.progress_timeout``.

    Attributes:
        missing_ranks: The silent ranks, or those whose file operations hang, in ascending order.
    """

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks: tuple[int, ...] = tuple(sorted(missing_ranks))
