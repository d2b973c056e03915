"""Memory for the first save in the background, got ready before it is due."""

from __future__ import annotations

import logging
from typing import Any

from ..control.ranks import Ranks
from ..options import SaveOptions
from ..saving.preparing import snapshot_bytes_of
from ..wiring import paddles, prepare_save

__all__ = ["Preparation"]

_logger = logging.getLogger("paddle_dist_ckpt")


class Preparation:
    """Of one rank; no rank waits for another one. For ranks that do not save in the background it does nothing."""

    def __init__(self, ranks: Ranks, options: SaveOptions, in_background: bool) -> None:
        self._ranks, self._options, self._in_background = ranks, options, in_background
        self._nbytes = 0

    def expect(self, state: dict[Any, Any]) -> None:
        """See how much memory a snapshot of a state will take. If that fails, the save will say why."""
        if not self._in_background:
            return
        try:
            ranks, bound = self._ranks, self._options.snapshot_bytes
            self._nbytes = snapshot_bytes_of(paddles(ranks, state), ranks.rank, ranks.count, bound)
        except Exception as error:
            _logger.debug("no memory is made ready for a save: %s: %s", type(error).__name__, error)

    def begin(self) -> None:
        """Have a thread make it ready, if there is anything that is expected."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            prepare_save(self._ranks, nbytes)
