"""How the ranks find the coordinator: it publishes its address and a secret in a store that all of them share."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from typing import Annotated, Protocol
from urllib.parse import urlsplit

import msgspec

from ..core.text import encodable
from ..errors import CheckpointError, CheckpointTimeoutError, RankFailureError
from .keys import TOKEN_BYTES

__all__ = [
    "BootstrapStore",
    "Rendezvous",
    "StoreLostError",
    "StoreSilentError",
    "address_of",
    "fetch",
    "local_address",
    "not_set_up",
    "publish",
    "refuse",
    "unreachable",
]


_POLL_SECONDS = 0.1


class BootstrapStore(Protocol):
    """A key-value store that all ranks reach. Used once per hub, so it may be slow."""

    def set(self, key: str, value: bytes) -> None:
        """Set the value of ``key``.

        Raises:
            OSError: the store cannot be reached.
        """
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of ``key``, waiting for it to be set.

        Raises:
            TimeoutError: it was not set within ``timeout`` seconds.
            OSError: the store cannot be reached.
        """
        ...


class StoreLostError(ConnectionError):
    """The store cannot be reached, as the rank is gone that keeps it, which need not be one of the hub's.

    Attributes:
        keeper: That rank.
    """

    def __init__(self, keeper: int, text: str) -> None:
        super().__init__(text)
        self.keeper = keeper


class StoreSilentError(StoreLostError, TimeoutError):
    """It does not answer, as where that rank is frozen."""


class Rendezvous(msgspec.Struct, array_like=True, frozen=True):
    """Where the coordinator is.

    Attributes:
        protocol: Version of the messages; the same on every rank.
        endpoint: ``tcp://host:port``, the host as a number.
        token: What the hub's key is made of; see :mod:`.keys`.
    """

    protocol: int
    endpoint: Annotated[str, msgspec.Meta(max_length=1024)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Refusal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why there is no such place.

    Attributes:
        attempt: Which of the coordinator's attempts to make its hub has failed.
        reason: Why, with the coordinator's rank.
        is_value: Whether something is wrong with what the ranks were given, and not with the coordinator.
    """

    attempt: int
    reason: str
    is_value: bool = False


def local_address() -> str:
    """This host's address as others see it: that of the interface behind the default route, else loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it picks the interface. (TEST-NET-1 of RFC 5737.)
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def address_of(rendezvous: Rendezvous) -> tuple[str, int]:
    """The coordinator's host and port.

    Raises:
        ValueError: the endpoint is none. The host is a number, for a name could take long to be looked up.
    """
    parts = urlsplit(rendezvous.endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{rendezvous.endpoint!r} is not an endpoint")
    return str(ipaddress.ip_address(parts.hostname)), parts.port


def publish(store: BootstrapStore, key: str, rendezvous: Rendezvous, coordinator: int) -> None:
    """Tell the other ranks where the coordinator is.

    Raises:
        RankFailureError: the store cannot be reached.
    """
    try:
        store.set(key, msgspec.msgpack.encode(rendezvous))
    except OSError as error:
        raise unreachable(coordinator, "could not leave the address of its control hub", error) from error


def refuse(store: BootstrapStore, key: str, attempt: int, error: Exception) -> None:
    """Tell the other ranks that an attempt to make the hub has failed, if the store can be reached."""
    with contextlib.suppress(OSError, CheckpointError):
        refusal = Refusal(attempt, encodable(str(error)), isinstance(error, ValueError))
        store.set(key, msgspec.msgpack.encode(refusal))


def unreachable(coordinator: int, what: str, error: OSError) -> RankFailureError:
    """The error of a rank that cannot reach the store, which says what has become of the coordinator, or of the rank
    that kept the store, if it is known to be another one."""
    lost, text = coordinator, f"rank {coordinator}, the coordinator, {what}: the store that all ranks share is gone"
    if isinstance(error, StoreLostError) and error.keeper != coordinator:
        lost = error.keeper
        text = f"rank {lost}, which keeps the store that all ranks share, was lost before there was a control hub"
    return RankFailureError(f"{text} ({error})", {lost: CheckpointError(str(error))})


def not_set_up(coordinator: int, timeout: float) -> CheckpointTimeoutError:
    """The error of a rank that has waited for the coordinator's address in vain."""
    text = (
        f"rank {coordinator}, the coordinator, did not set up its control hub within {timeout:g} s; "
        f"see whether it is alive and makes the same calls in the same order"
    )
    return CheckpointTimeoutError(text, [coordinator])


def fetch(store: BootstrapStore, key: str, timeout: float, coordinator: int, attempt: int) -> Rendezvous:
    """Learn where the coordinator is, whatever version it runs. This rank knows that an attempt before this one failed.

    Raises:
        CheckpointTimeoutError: the coordinator did not publish it within ``timeout`` seconds.
        RankFailureError: it could not make its hub; or the store cannot be reached any more.
        ValueError: it did not, as something is wrong with what the ranks were given.
        CheckpointError: what it published is not understood here.
    """
    until = time.monotonic() + timeout
    try:
        while True:
            value = store.get(key, max(0.0, until - time.monotonic()))
            try:
                refusal = msgspec.msgpack.decode(value, type=Refusal)
            except (ValueError, msgspec.DecodeError):  # before msgspec 0.21 its own is none
                break
            if refusal.attempt >= attempt and refusal.is_value:
                raise ValueError(refusal.reason)
            if refusal.attempt >= attempt:
                raise RankFailureError(refusal.reason, {coordinator: CheckpointError(refusal.reason)})
            if time.monotonic() > until:
                raise TimeoutError(key)
            time.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise not_set_up(coordinator, timeout) from error
    except OSError as error:
        raise unreachable(coordinator, "was lost before its control hub was known", error) from error
    try:
        found = msgspec.msgpack.decode(value, type=Rendezvous)
        address_of(found)
    except (ValueError, msgspec.DecodeError) as error:
        raise CheckpointError(f"the store's entry {key!r} is not a control hub's address: {error}") from error
    return found
