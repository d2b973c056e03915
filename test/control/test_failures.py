"""Errors on their way between ranks, and what a session's failures add up to."""

from __future__ import annotations

import pytest

from paddle_dist_ckpt.control import failures, wire
from paddle_dist_ckpt.control.coordinator import CoordinatorSession, Links
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    DurabilityUnknownError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)


def there_and_back(error: BaseException) -> CheckpointError:
    sent = wire.Fail(0, "r", failures.record_of(error, failures.SHARED_IN_LOCAL))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, wire.Fail)
    return failures.copy_of(received.error)


def test_our_errors_are_rebuilt_with_their_attributes() -> None:
    mismatch = there_and_back(StateDictMismatchError("m", ["a", "b"]))
    assert isinstance(mismatch, StateDictMismatchError)
    assert (str(mismatch), mismatch.problems) == ("m", ("a", "b"))
    timeout = there_and_back(CheckpointTimeoutError("t", [3, 1]))
    assert isinstance(timeout, CheckpointTimeoutError)
    assert (str(timeout), timeout.missing_ranks) == ("t", (1, 3))
    inner = RankFailureError("i", {0: OSError("deep")})
    failure = there_and_back(RankFailureError("f", {2: OSError("no"), 3: inner}))
    assert isinstance(failure, RankFailureError)
    assert {rank: (type(e), str(e)) for rank, e in failure.failures.items()} == {
        2: (CheckpointError, "OSError: no"),
        3: (RankFailureError, "i"),
    }
    assert type(there_and_back(CheckpointCorruptedError("c"))) is CheckpointCorruptedError


class OurOwn(UnsupportedValueError):
    """Unknown to other ranks."""


def test_other_errors_are_named_in_a_checkpoint_error() -> None:
    found = there_and_back(OSError(28, "No space left on device"))
    assert (type(found), str(found)) == (CheckpointError, "OSError: [Errno 28] No space left on device")
    # A name that looks like ours but is not in the registry must not be looked up anywhere else.
    assert type(failures.copy_of(wire.ErrorRecord("annotations", "x"))) is CheckpointError
    derived = there_and_back(OurOwn("x"))
    assert (type(derived), str(derived)) == (UnsupportedValueError, "OurOwn: x")


def test_endless_errors_are_cut_to_what_can_be_sent() -> None:
    long = there_and_back(OSError("x" * (2 * wire.MAX_TEXT)))
    assert str(long).endswith("more characters)")
    many = there_and_back(StateDictMismatchError("m", map(str, range(wire.MAX_PROBLEMS + 5))))
    assert isinstance(many, StateDictMismatchError)
    assert many.problems[-2:] == (str(wire.MAX_PROBLEMS - 2), "... and 6 more")


class Shy(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


HALF = "caf\udce9"  # half of a surrogate pair, as in the name of a file that is not UTF-8


UNFIT = [
    (LookupError(HALF), "LookupError: caf\\udce9"),
    (StateDictMismatchError("x", [HALF, 5]), "x"),  # type: ignore[list-item]
    (CheckpointTimeoutError("x", [-1]), "x"),
    (CheckpointTimeoutError("x", ["a"]), "x"),  # type: ignore[list-item]
    (DurabilityUnknownError("x", HALF, -3), "DurabilityUnknownError: x"),
    (RankFailureError("x", {-1: OSError("y")}), "RankFailureError: x"),
    (Shy(), "Shy: (no text: str() of Shy raised RuntimeError)"),
    (KeyError(Shy()), "str() of KeyError raised"),
]


@pytest.mark.parametrize(("error", "text"), UNFIT, ids=range(len(UNFIT)))
def test_whatever_an_error_holds_is_made_fit_to_be_sent(error: Exception, text: str) -> None:
    assert text in str(there_and_back(error))
    own = failures.record_of(error, failures.SHARED_IN_LOCAL)
    assert failures.raisable(own, 0, error).__cause__ in (error, None)  # and is raised where it came from


def test_a_failure_that_cannot_be_sent_is_told_as_text() -> None:
    sent = list[bytes]()
    session = CoordinatorSession(0, (0, 1), 0, Links(), lambda rank, message, _: sent.append(wire.encode(message)), 0.0)
    for rank in (0, 1):
        session.handle(rank, wire.Open(0, "save", 10.0, "0.1.0"), b"", 0.0)
    session.handle(0, wire.Fail(0, "", wire.ErrorRecord("ValueError", HALF, missing_ranks=(-1,))), b"", 0.0)
    session.tick(1.0)
    verdicts = [wire.decode(message) for message in sent[-2:]]
    assert [verdict.error.message for verdict in verdicts if isinstance(verdict, wire.Verdict)] == [
        "RankFailureError: save failed on rank 0: ValueError: caf\\udce9"
    ] * 2


def test_ranks_that_have_never_connected_are_told_from_silent_ones() -> None:
    heard = failures.timeout_error("save", [1, 2], 3.0).message
    assert heard.startswith("save timed out: ranks 1, 2 not heard of for 3 s; see whether")
    assert "connected" not in heard
    both = failures.timeout_error("save", [1, 2], 3.0, absent={2, 4}).message
    assert "timed out: rank 1 not heard of for 3 s, rank 2 has never connected, not within 3 s; see" in both
    assert "does not reach the coordinator's port" in both


def test_ranks_next_to_each_other_are_named_by_the_first_and_the_last() -> None:
    one = failures.record("broken")
    for ranks, text in (
        (range(512), "on ranks 0-511: broken"),
        ((0, 1, 2, 3), "on ranks 0, 1, 2, 3: broken"),
        ((0, 2, 3, 4, 5, 6, 9), "on ranks 0, 2-6, 9: broken"),
        ((7,), "on rank 7: broken"),
    ):
        found = failures.failure_of_ranks("save failed", dict.fromkeys(ranks, one), tuple(range(600)))
        assert found.message == f"save failed {text}"


def test_what_no_rank_finds_keeps_its_type() -> None:
    one = failures.record_of(CheckpointNotFoundError("nothing there"), failures.SHARED_IN_LOCAL)
    everywhere = failures.failure_of_ranks("load failed", {0: one, 1: one}, (0, 1))
    assert (everywhere.type_name, everywhere.message) == ("CheckpointNotFoundError", "nothing there")
    assert failures.failure_of_ranks("load failed", {1: one}, (0, 1)).type_name == "RankFailureError"
    file = failures.record_of(FileExistsError("it is a file"), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("save failed", {0: file, 1: file}, (0, 1)).type_name == "FileExistsError"
    assert failures.failure_of_ranks("save failed", {1: file}, (0, 1)).type_name == "RankFailureError"
    damage = failures.record_of(CheckpointCorruptedError("a byte"), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("load failed", {0: damage, 1: damage}, (0, 1)).type_name == "RankFailureError"
    inner = failures.record_of(RankFailureError("", {3: CheckpointError("x")}), failures.SHARED_IN_LOCAL)
    assert failures.failure_of_ranks("load failed", {0: inner, 1: inner}, (0, 1)).failures
