"""The hub of one rank, and what every hub asks of its callers."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from paddle_dist_ckpt.control import NoTransport, SoloHub, wire
from paddle_dist_ckpt.control.session import check_payload
from paddle_dist_ckpt.core.protocols import Appointments, ControlHub
from paddle_dist_ckpt.errors import UnsupportedValueError
from test.rooms import PACKAGE


def test_solo_calls_straight_through() -> None:
    hub: ControlHub = SoloHub(rank=3)
    with hub.session("save", 1.0) as session:
        assert (session.rank, session.ranks, session.coordinator) == (3, (3,), 3)
        seen: list[Mapping[int, bytes]] = []

        def combine(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
            seen.append(parts)
            return {3: b"reply"}

        assert session.gather_scatter("r", lambda: b"mine", combine) == b"reply"
        assert seen == [{3: b"mine"}]
        assert session.run_collectives(NoTransport(), lambda transport: threading.get_ident()) == threading.get_ident()
    hub.close()


def test_a_rank_alone_has_the_appointments_that_it_wishes_for() -> None:
    appointments: Appointments = SoloHub(rank=3).appointments("steps", 1.0)
    assert appointments.leads
    assert [appointments.reach(step, wish=step == 2) for step in range(5)] == [False, False, True, False, False]
    appointments.close()
    assert not appointments.reach(6, wish=True)
    with pytest.raises(ValueError, match="1025 characters"):
        SoloHub().appointments("t" * 1025, 1.0)


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), UnsupportedValueError("x")])
def test_solo_raises_errors_as_they_are(error: BaseException) -> None:
    def fail() -> bytes:
        raise error

    for local, combine in ((fail, dict), (lambda: b"", lambda parts: {0: fail()})):
        with pytest.raises(type(error)) as caught, SoloHub().session("save", 1.0) as session:
            session.gather_scatter("r", local, combine)
        assert caught.value is error


def test_only_bytes_are_sent() -> None:
    with SoloHub().session("save", 1.0) as session, pytest.raises(TypeError, match="must be bytes, not bytearray"):
        session.gather_scatter("r", lambda: bytearray(1), lambda parts: parts)  # type: ignore[arg-type, return-value]


def test_what_is_too_long_for_a_message_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PAYLOAD", 3)
    assert check_payload(bytes(3), "it") == bytes(3)
    with pytest.raises(ValueError, match="it has 4 bytes; a message may have 3"):
        check_payload(bytes(4), "it")


def test_sessions_are_opened_so_that_they_are_closed_for_sure() -> None:
    """By ``Ranks.session`` everywhere; a save ends its own itself, unless it goes on in the background."""
    parts = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("control", "testing")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in parts}
    assert [name for name, text in texts.items() if "hub.session(" in text] == []
    assert [name for name, text in texts.items() for _ in range(text.count(".make_session("))] == ["wiring.py"]
