"""The claim file that a save, or a removal, has itself: published, kept fresh, found gone, removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from ..core.latch import Latch
from ..core.log import warn_only
from ..errors import CheckpointError, CheckpointTimeoutError
from ..storage.base import Storage
from .claims import FRESH_EVERY, TEMPORARY

__all__ = ["OwnClaim", "lost_claim"]

_logger = logging.getLogger("paddle_dist_ckpt")


def lost_claim(storage: Storage, name: str) -> CheckpointError:
    """The error of a save whose claim, of this name, is gone."""
    claim = f"{storage.location}/{name}"
    try:
        storage.identity()
    except FileNotFoundError:
        return CheckpointError(f"the claim {claim} is gone, and the folder with it: somebody has removed it meanwhile")
    except OSError:
        pass  # what is known is that the claim is gone
    return CheckpointError(
        f"the claim {claim} is gone: another save or export took this one, which was silent, for dead"
    )


class OwnClaim:
    """A claim file of this process.

    Attributes:
        storage: The folder that it is in.
        name: Its name.
        is_published: Whether it was there at some time.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self.is_published = False
        self._stopped = Latch()
        self._keeper: threading.Thread | None = None
        self._other: str | None = None  # the claim that is kept fresh as well since this one is gone

    def publish(self, data: bytes) -> None:
        """Have it say this.

        Raises:
            CheckpointError: it is gone.
            OSError: it says what it has said before, or is not there yet.
        """
        # IMPORTANT: a claim that somebody has removed, who took this one for dead, does not come back. Who removes it
        # removes its temporary name as well, until neither is there.
        confirm = self.check_held if self.is_published else None
        try:
            self.storage.publish(self.name, data, self.name + TEMPORARY, replace=True, confirm=confirm)
        except FileNotFoundError:
            if self.is_published:
                self.check_held()
                # It is about to go: who takes this one for dead has removed the temporary name first.
                raise lost_claim(self.storage, self.name + TEMPORARY) from None
            raise
        self.is_published = True
        # IMPORTANT: some filesystems take the time of what is written from their server, and that of a touch from this
        # host. All claims are dated by touches, or one that is refreshed looks older than one that is new.
        with suppress(OSError):  # it is dated by its writing then
            self.storage.touch(self.name)

    def check_held(self) -> None:
        """See that it is there.

        Raises:
            CheckpointError: it is gone: somebody took this save, or removal, for dead.
        """
        self.now()

    def is_held(self) -> bool:
        """Whether it is there."""
        try:
            self.check_held()
        except CheckpointTimeoutError:
            raise
        except CheckpointError:
            return False
        return True

    def now(self) -> float:
        """The time by the folder's own clock, when it was touched last.

        Raises:
            CheckpointError: see :meth:`check_held`.
        """
        try:
            return self.storage.modified(self.name)
        except FileNotFoundError:
            raise lost_claim(self.storage, self.name) from None

    def touch(self) -> None:
        """Have it count for a while from now on.

        Raises:
            CheckpointError: see :meth:`check_held`.
        """
        try:
            self.storage.touch(self.name)
        except FileNotFoundError:
            raise lost_claim(self.storage, self.name) from None
        except OSError as error:
            _logger.warning("the claim %s could not be refreshed: %s", self.name, error)

    def keep_fresh(self, when_lost: Callable[[], str | None]) -> None:
        """Touch it now and then, on a thread of its own; see :meth:`refresh`.

        Raises:
            CheckpointError: no such thread can be started.
        """

        def keep() -> None:
            while not self._stopped.wait(FRESH_EVERY):
                self.refresh(when_lost)

        keeper = threading.Thread(target=keep, name="paddle_dist_ckpt claim", daemon=True)
        try:
            keeper.start()
        except RuntimeError as error:
            raise CheckpointError(f"the claim {self.name} cannot be kept fresh: {error}") from error
        self._keeper = keeper

    def refresh(self, when_lost: Callable[[], str | None]) -> None:
        """Touch it, so that it counts for a while.

        Args:
            when_lost: Called when it seems to be gone; returns the name of a claim that is kept fresh in its place, if
                there is one.
        """
        try:
            self.storage.touch(self.name)
        except Exception as error:  # of memory that is used up, for one, which must not end the thread
            if self._other is None:
                warn_only("the claim %s could not be refreshed: %s", self.name, error)
            if isinstance(error, FileNotFoundError):
                with suppress(OSError, CheckpointError):
                    if self._other is None:
                        self._other = when_lost()
                    else:
                        self.storage.touch(self._other)

    @property
    def is_stopped(self) -> bool:
        """Whether it is kept fresh no more."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Keep it fresh no more."""
        self._stopped.set()

    def remove(self) -> None:
        """Remove it, and the one that is in its place if it is gone."""
        self._stopped.set()
        if self._keeper is not None:
            self._keeper.join()  # no touch is under way any more
        self.storage.delete(self.name + TEMPORARY)  # it may have been impossible to remove
        self.storage.delete(self.name)
        if self._other is not None:
            self.storage.delete(self._other)
