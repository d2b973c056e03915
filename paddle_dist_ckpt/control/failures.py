"""Errors on their way between ranks: exception -> record -> exception, and what a session's failures add up to.

The rule that every rank applies: an error about what all ranks share is raised with its own type everywhere, as is what
all of them say in the same words of a path that is wrong; an error of some ranks only is raised as RankFailureError
that names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from .. import errors
from ..core.text import encodable, ranks_text
from . import wire
from .wire import MAX_PROBLEMS, MAX_TEXT, ErrorRecord

__all__ = [
    "LOST",
    "SHARED_IN_COMBINE",
    "SHARED_IN_LOCAL",
    "copy_of",
    "described",
    "failure_of_ranks",
    "is_of_collectives",
    "late",
    "raisable",
    "record",
    "record_of",
    "sendable",
    "timeout_error",
]

_OURS: Mapping[str, type[errors.CheckpointError]] = {name: getattr(errors, name) for name in errors.__all__}
_BUILTIN: Mapping[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "FileExistsError": FileExistsError,
}
_AROUND = 1024  # bytes at most that other messages have besides an error
LOST = "connection lost"
"""What is said of a rank whose connection is lost."""
_OF_A_PATH = frozenset({"CheckpointNotFoundError", "FileExistsError"})
"""The errors about what all ranks share if all of them raise the same, word by word: the path leads nowhere, or to a
file."""
SHARED_IN_LOCAL = frozenset({"UnsupportedValueError", "StateDictMismatchError", "ValueError", "TypeError"})
"""The errors of one rank's own work that are about what all ranks share."""
SHARED_IN_COMBINE = frozenset(
    {
        "CheckpointNotFoundError",
        "CheckpointCorruptedError",
        "CheckpointReplacedError",
        "DurabilityUnknownError",
        "RankFailureError",
        "StateDictMismatchError",
        "UnsupportedValueError",
        "ValueError",
    }
)
"""Those that ``combine`` raises on the coordinator."""


def record(message: str) -> ErrorRecord:
    """Record a plain CheckpointError."""
    return ErrorRecord("CheckpointError", _clip(message))


def record_of(error: BaseException, shared: frozenset[str], depth: int = 0) -> ErrorRecord:
    """Record an error, which concerns all ranks alike if its class is one of ``shared``.

    Its name is that of our nearest class that it derives from, else its own. A builtin counts only as itself: a
    UnicodeDecodeError is a ValueError too, but not one about an argument. Whatever the error holds, the record can be
    sent.
    """
    kind = type(error)
    name = next((base.__name__ for base in kind.__mro__ if base in _OURS.values()), kind.__name__)
    # A failure within a failure says enough; deeper ones would be their ranks' copies of each other.
    inner = error.failures.items() if isinstance(error, errors.RankFailureError) and depth == 0 else ()
    committed = error if isinstance(error, errors.DurabilityUnknownError) else errors.DurabilityUnknownError("")
    missing = error.missing_ranks if isinstance(error, errors.CheckpointTimeoutError) else ()
    made = ErrorRecord(
        name,
        _clip(error if name == kind.__name__ else f"{kind.__name__}: {_clip(error)}"),
        shared=name in shared,
        problems=_clip_all(error.problems) if isinstance(error, errors.StateDictMismatchError) else (),
        missing_ranks=tuple(rank for rank in missing if type(rank) is int and rank >= 0),
        failures=tuple((rank, record_of(failure, frozenset(), depth + 1)) for rank, failure in inner),
        path=_clip(committed.path),
        unique_id=committed.unique_id,
    )
    return sendable(made)


def sendable(error: ErrorRecord) -> ErrorRecord:
    """Return the record if other ranks will take it, else one with no more than its text."""
    try:
        frame = wire.encode(wire.Fail(0, "", error))
        wire.decode(frame)
    except Exception:  # of several kinds, for what is not as its class says
        return record(described(error))
    if len(frame) + _AROUND > wire.MAX_PAYLOAD:
        return ErrorRecord(error.type_name, error.message, error.shared)
    return error


def _clip(value: object) -> str:
    """The text of a value, as far as it can be sent."""
    try:
        text = encodable(str(value))
    except Exception as error:  # a class may do what it likes
        text = f"(no text: str() of {type(value).__name__} raised {type(error).__name__})"
    if len(text) <= MAX_TEXT:
        return text
    return text[: MAX_TEXT - 100] + f"... ({len(text) - MAX_TEXT + 100} more characters)"


def _clip_all(lines: tuple[str, ...]) -> tuple[str, ...]:
    kept = tuple(_clip(line) for line in lines[:MAX_PROBLEMS])
    if len(lines) <= MAX_PROBLEMS:
        return kept
    return (*kept[:-1], f"... and {len(lines) - MAX_PROBLEMS + 1} more")


def copy_of(error: ErrorRecord) -> errors.CheckpointError:
    """Rebuild an exception: ours by name, any other as ``CheckpointError("TypeName: message")``."""
    kind = _OURS.get(error.type_name)
    if kind is None:
        return errors.CheckpointError(described(error))
    if issubclass(kind, errors.StateDictMismatchError):
        return kind(error.message, error.problems)
    if issubclass(kind, errors.CheckpointTimeoutError):
        return kind(error.message, error.missing_ranks)
    if issubclass(kind, errors.DurabilityUnknownError):
        return kind(error.message, error.path, error.unique_id)
    if issubclass(kind, errors.RankFailureError):
        return kind(error.message, {rank: copy_of(failure) for rank, failure in error.failures})
    return kind(error.message)


def late(error: ErrorRecord, rank: int) -> ErrorRecord:
    """What ``rank`` is told that opened a session only after it had failed with ``error``."""
    text = f"{error.message} (rank {rank} arrived late: by then the other ranks had given it up)"
    return msgspec.structs.replace(error, message=_clip(text))


def raisable(error: ErrorRecord, rank: int, own: BaseException | None) -> Exception:
    """Make the exception that ``rank`` raises for a session's failure.

    Args:
        error: The session's verdict.
        rank: This rank.
        own: What this rank itself raised, if it did. It becomes the cause, and this rank's entry of ``failures``.
    """
    builtin = _BUILTIN.get(error.type_name)
    made = builtin(error.message) if builtin is not None else copy_of(error)
    if own is not None:
        if error.shared and isinstance(own, type(made)) and _clip(own) == error.message:
            return own
        if isinstance(made, errors.RankFailureError) and rank in made.failures:
            made.failures[rank] = own
        made.__cause__ = own
    return made


def described(error: ErrorRecord) -> str:
    """``TypeName: message``; of a plain CheckpointError the message alone, and without a message the name alone."""
    if error.type_name == "CheckpointError":
        return error.message
    return f"{error.type_name}: {error.message}" if error.message else error.type_name


def timeout_error(
    doing: str,
    missing: Iterable[int],
    timeout: float,
    unproven: Set[int] = frozenset(),
    absent: Set[int] = frozenset(),
) -> ErrorRecord:
    """Record that ``missing`` ranks were silent for too long while the others were ``doing``.

    Of those that are ``unproven`` too, somebody said to be them who did not know the hub's key. Those that are
    ``absent`` too have never connected.
    """
    missing = tuple(sorted(missing))
    silent, strange = [r for r in missing if r not in absent], [r for r in missing if r in absent]
    said = []
    advice = (
        "see whether they are alive and make the same calls in the same order (one under `if rank == 0:` takes "
        "no_dist=True), or raise options.timeout"
    )
    if silent:
        said.append(f"{ranks_text(silent)} not heard of for {timeout:g} s")
    if strange:
        have = "has" if len(strange) == 1 else "have"
        said.append(f"{ranks_text(strange)} {have} never connected, not within {timeout:g} s")
        advice += "; who has never connected has not come to a first call, or does not reach the coordinator's port"
    text = f"{doing} timed out: {', '.join(said)}; {advice}"
    if refused := unproven & set(missing):
        text += f" (who said to be {ranks_text(refused)} had another control secret; all ranks must have the same one)"
    return ErrorRecord("CheckpointTimeoutError", text, missing_ranks=missing)


def failure_of_ranks(doing: str, failures: Mapping[int, ErrorRecord], ranks: tuple[int, ...]) -> ErrorRecord:
    """What a session's failures add up to.

    Args:
        doing: Such as ``save failed in round 'write'``; begins the message.
        failures: The failed ranks' errors; at least one.
        ranks: All ranks of the session.
    """
    kinds = {error.type_name for error in failures.values()}
    # Damage is each rank's own, even if all find the same.
    alike = set(failures) == set(ranks) and len({error.message for error in failures.values()}) == 1
    shared = all(error.shared for error in failures.values()) or (alike and kinds <= _OF_A_PATH)
    if len(kinds) > 1 or not (shared or kinds == {"CheckpointTimeoutError"}):
        text = f"{doing} {_by_text({rank: described(error) for rank, error in failures.items()})}"
        if any(error.message == LOST for error in failures.values()):
            text += "; a process has ended, or a host or the network is gone: the log of that rank says more"
        name = "CollectiveError" if kinds == {"CollectiveError"} else "RankFailureError"
        return ErrorRecord(name, _clip(text), failures=tuple(sorted(failures.items())))
    texts = {rank: error.message for rank, error in failures.items()}
    everyone = shared and set(failures) == set(ranks) and len(set(texts.values())) == 1
    text = next(iter(texts.values())) if everyone else _by_text(texts)
    problems = dict.fromkeys(problem for _, error in sorted(failures.items()) for problem in error.problems)
    missing = {rank for error in failures.values() for rank in error.missing_ranks}
    return ErrorRecord(kinds.pop(), _clip(text), shared, _clip_all(tuple(problems)), tuple(sorted(missing)))


def is_of_collectives(error: ErrorRecord) -> bool:
    """Whether collectives have failed, on any rank."""
    return "CollectiveError" in {error.type_name, *(failure.type_name for _, failure in error.failures)}


def _by_text(texts: Mapping[int, str]) -> str:
    """``on rank 1: this; on ranks 2, 3: that``."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_by_text.setdefault(texts[rank], []).append(rank)
    return "; ".join(f"on {ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items())
