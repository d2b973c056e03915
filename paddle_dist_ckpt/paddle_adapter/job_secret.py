"""The secret of a job, which every rank reads for itself, and about which all hear if one cannot."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress

from ..control.bootstrap import BootstrapStore
from ..core.text import ranks_text
from ..errors import CheckpointTimeoutError

__all__ = ["SECRET_FILE", "NoSecretAtFirstError", "agreed_secret", "has_secret"]

SECRET_FILE = "PADDLE_DIST_CKPT_SECRET_FILE"
"""Environment variable: a file with a secret of the job's, without which nobody takes part in its saves and loads.

The only one that the library reads. It is no option of a call, for a hub is made once for a group, by whichever call
comes first, and under a trainer the calls are not the user's.
"""
_SHORTEST, _LONGEST = 16, 1 << 16
_POLL_SECONDS = 0.1
_MARK_BYTES = 2  # of a secret's digest: enough to see that secrets differ, and no help to whoever would guess one
_logger = logging.getLogger("paddle_dist_ckpt")
_FINE, _REFUSED, _SILENT, _NONE = b"+", b"-", b"?", b"0"


class NoSecretAtFirstError(ValueError):
    """This rank has a secret, and the group's first one has none; so it takes part only to tell the others of that."""


def has_secret() -> bool:
    """Whether this rank is given one."""
    return bool(os.environ.get(SECRET_FILE))


def agreed_secret(
    store: BootstrapStore, key: str, rank: int, ranks: Sequence[int], timeout: float, attempt: int = 0
) -> bytes:
    """The job's secret, for the control hubs; empty if it has none.

    Each rank tells the first one through the store whether it has it, and two bytes of its digest, by which that sees
    whether it is the same: of 65,536 others one would pass, and be turned away by the hub. Where there is to be one, a
    rank hears from the first one whether all have; where there is none, nobody waits. Ranks number their attempts
    alike; but once the first rank has what it needs it makes no other, and what it said then is the answer to any.

    Raises:
        NoSecretAtFirstError: this rank has one, and the first rank none.
        ValueError: on all ranks that have one: some rank has none, or another one than the first, or cannot read it, or
            it is too short to be one.
        CheckpointTimeoutError: some rank has not said whether it has it.
    """
    name = os.environ.get(SECRET_FILE)
    if not name:
        if rank == ranks[0]:
            store.set(f"{key}/all", b"%d " % attempt + _NONE)
        else:
            store.set(f"{key}/{attempt}/{rank}", f"rank {rank}: {_unset(ranks[0])}".encode())
        return b""
    secret = b""
    try:
        secret = _read(name)
        said = _FINE + hashlib.sha256(secret).digest()[:_MARK_BYTES]
    except ValueError as error:
        said = f"rank {rank}: {error}".encode(errors="backslashreplace")
    if rank != ranks[0]:
        store.set(f"{key}/{attempt}/{rank}", said)
        verdict = _heard(store, f"{key}/all", attempt, timeout + 1)  # the first rank waits as long for the last one
    else:
        verdict = _verdict(store, f"{key}/{attempt}", ranks, said, timeout)
        store.set(f"{key}/all", b"%d " % attempt + verdict)
    verdict = verdict or _SILENT + b"%d" % ranks[0]
    if verdict[:1] == _SILENT:
        silent = [int(text) for text in verdict[1:].split(b",")]
        raise CheckpointTimeoutError(
            f"{ranks_text(silent)} did not say within {timeout:g} s whether the job's control secret is there; is "
            f"${SECRET_FILE} set on all ranks?",
            silent,
        )
    if verdict[:1] == _REFUSED:
        raise ValueError(verdict[1:].decode())
    if verdict[:1] == _NONE:
        raise NoSecretAtFirstError(f"rank {ranks[0]}: {_unset(rank)}")
    return secret


def _unset(rank: int) -> str:
    """What is wrong with a rank that has no secret, where this one has."""
    return f"${SECRET_FILE} is not set, as it is on rank {rank}; set it on all ranks, or on none"


def _heard(store: BootstrapStore, key: str, attempt: int, timeout: float) -> bytes:
    """What the first rank says to an attempt; empty if it says nothing in time."""
    deadline = time.monotonic() + timeout
    with suppress(TimeoutError):
        while True:
            made, _, verdict = store.get(key, max(0.0, deadline - time.monotonic())).partition(b" ")
            if verdict[:1] in (_FINE, _NONE) or (made.isdigit() and int(made) >= attempt):
                return verdict
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    return b""


def _verdict(store: BootstrapStore, key: str, ranks: Sequence[int], own: bytes, timeout: float) -> bytes:
    """What the first rank says to all."""
    deadline = time.monotonic() + timeout
    is_fine, silent = own.startswith(_FINE), list[bytes]()
    problems = [] if is_fine else [own]
    for other in ranks[1:]:
        try:
            said = store.get(f"{key}/{other}", max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            silent.append(b"%d" % other)
        else:
            if not said.startswith(_FINE):
                problems.append(said)
            elif is_fine and said != own:
                problems.append(
                    b"rank %d has another control secret than rank %d; all ranks of the job must have the same one"
                    % (other, ranks[0])
                )
    if problems:
        return _REFUSED + b"; ".join(problems)
    return _SILENT + b",".join(silent) if silent else _FINE


def _read(name: str) -> bytes:
    """The secret in a regular file. Of anything else, such as a pipe, nothing is read, for that may wait for ever."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"${SECRET_FILE}: {name!r} is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                secret = file.read(_LONGEST + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"${SECRET_FILE}: the control secret cannot be read: {error}") from error
    if not _SHORTEST <= len(secret) <= _LONGEST:
        size = f"more than {_LONGEST}" if len(secret) > _LONGEST else len(secret)
        raise ValueError(f"${SECRET_FILE}: {name!r} has {size} bytes; a secret has {_SHORTEST} to {_LONGEST}")
    if not secret.strip():
        raise ValueError(f"${SECRET_FILE}: {name!r} has nothing but white space")
    if mode & (stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
        _logger.warning(
            "$%s: others than the owner may read or write %r, and so take part in the job", SECRET_FILE, name
        )
    return secret
