"""The handle of a save that goes on in the background, and the thread that it goes on in."""

from __future__ import annotations

import logging
import math
import numbers
import os
import threading
import time
from collections.abc import Callable

from ..core.latch import Latch
from ..core.naming import naming
from ..core.threads import at_exit, lower_priority
from ..errors import CheckpointError, DurabilityUnknownError
from ..reports import SaveReport

__all__ = ["EARLIER", "AsyncSave"]

_logger = logging.getLogger("paddle_dist_ckpt")

EARLIER = "an earlier save in the background"
_LOOK_SECONDS = 5.0  # after which who waits looks whether it has missed the end


class AsyncSave:
    """A background save: its data has been copied, and is being written and committed.

    A failure is logged at once, and raised by the group's next save if nobody has asked for the result by then. The
    process does not exit before the save has ended, unless it is killed; then nothing is committed.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import list_checkpoints, save_state_dict
        >>> weight = paddle.ones([1000])
        >>> saving = save_state_dict({"weight": weight}, "checkpoint", async_save=True)
        >>> weight = weight.zero_()  # training goes on
        >>> saving.result().unique_id  # waits for the commit, or raises what went wrong
        0
        >>> list_checkpoints("checkpoint")
        [0]
    """

    def __init__(self, path: str, finish: Callable[[], SaveReport]) -> None:
        self._path = path
        self._pid = os.getpid()
        # No Future: an interrupt of who waits for one, or makes one, may leave its lock taken, and the save would wait.
        self._unclaimed = [finish]
        self._outcome: SaveReport | BaseException = CheckpointError("it was interrupted before it began")
        self._ended = Latch()
        self._observed = False
        self._worker: int | None = None  # the thread that does it
        # Not a daemon: the interpreter waits for it before it ends. It must start no threads of its own, which is not
        # possible any more by then.
        self._thread = threading.Thread(target=self._run, name="paddle_dist_ckpt save", daemon=False)

    def start(self) -> None:
        """Start the thread; where that is not possible, as when the interpreter ends, do the work now. Called once.

        So the call returns on all ranks alike: the others' saves go on in the background, and wait for this one.
        """
        try:
            if not at_exit():
                self._thread.start()
                return
        except RuntimeError as error:
            _logger.warning("the save to %s is made before its call returns: %s", self._path, error)
        try:
            self._work()
        finally:
            self._ended.set()  # once more, as that may have been interrupted

    def forestall(self) -> bool:
        """When :meth:`start` has failed, see to it that nothing is done; returns False if it has begun, and goes on."""
        return self._claimed() is not None

    def _claimed(self) -> Callable[[], SaveReport] | None:
        """What is to be done, for the first who asks."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return None

    def _run(self) -> None:
        lower_priority()
        self._work()

    def _work(self) -> None:
        finish = self._claimed()
        if finish is None:
            return
        self._worker = threading.get_ident()
        try:
            with naming(self._path):
                self._outcome = finish()
        except BaseException as error:
            self._outcome = error
            _logger.error("the background save to %s failed: %s", self._path, error)
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                self._observed = True
                raise  # an interrupt, of whoever has called
        finally:
            del finish  # and with it what keeps buffers alive
            self._ended.set()  # last: who waits for the end may look at the log next, or end the process

    @property
    def _failure(self) -> BaseException | None:
        """Why it has failed, if it has ended so."""
        return None if isinstance(self._outcome, SaveReport) else self._outcome

    def __repr__(self) -> str:
        state = "goes on"
        if self._ended.is_set():
            error = self._failure
            state = "is committed" if error is None else f"failed: {type(error).__name__}"
        return f"<{type(self).__name__}: the save to {self._path} {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        self._check_process()
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, for at most ``timeout`` seconds; returns whether it has. Raises no failure of it."""
        self._check_process()
        if not isinstance(timeout, numbers.Real | None):
            raise TypeError(f"timeout must be None or a number of seconds, not {timeout!r}")
        if self._worker == threading.get_ident() and not self._ended.is_set():
            raise CheckpointError(f"the save to {self._path} would wait for itself: a handler of the log asks for it")
        end = math.inf if timeout is None else time.monotonic() + float(timeout)
        while not self._ended.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until it is committed.

        Args:
            timeout: The most seconds to wait; None for as long as it takes.

        Returns:
            What was saved.

        Raises:
            TimeoutError: it has not ended in time. It goes on.
            CheckpointError, OSError: it failed; the same as :func:`paddle_dist_ckpt.save_state_dict` raises.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the save to {self._path} has not ended within {timeout} s; it goes on")
        self._observed = True
        if not isinstance(self._outcome, SaveReport):
            raise self._outcome
        return self._outcome

    @property
    def raised(self) -> bool:
        """Whether it has failed, and somebody has been told so by an exception."""
        return self._observed and self._ended.is_set() and self._failure is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended without a commit."""
        return self._ended.is_set() and not isinstance(self._failure, DurabilityUnknownError | None)

    def raise_unobserved(self) -> None:
        """Wait until it has ended; raise its failure, once, if nobody has seen it.

        Raises:
            CheckpointError: it failed, and nobody asked for its result; or it goes on in the process that this one was
                forked from.
        """
        if not self._ended.is_set():
            self.wait()
        error = self._failure
        if error is not None and not self._observed:
            self._observed = True
            raise CheckpointError(
                f"{EARLIER}, to {self._path}, failed, and its result() was not asked for: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError("this save goes on in the process that this one was forked from")
