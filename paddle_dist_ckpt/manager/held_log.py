"""Holds back what is logged under a lock: a handler may do anything, such as ask for what the lock guards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["held_back"]


@contextmanager
def held_back(logger: logging.Logger) -> Iterator[None]:
    """What this thread logs within is logged at its end. To be entered before the lock.

    What a handler raises then is passed over: it would keep the caller from what the block has begun.
    """
    thread, records = threading.get_ident(), list[logging.LogRecord]()

    def hold(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        records.append(record)
        return False

    logger.filters.insert(0, hold)  # before those of the user, who are asked when it is logged
    try:
        yield
    finally:
        logger.removeFilter(hold)
        for record in records:
            with suppress(Exception):
                logger.handle(record)
