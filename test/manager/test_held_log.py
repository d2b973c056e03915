"""What is logged under a lock is logged behind it, as it would have been before."""

from __future__ import annotations

import logging
import threading

from paddle_dist_ckpt.manager.held_log import held_back


def test_records_come_once_at_the_end_and_filters_see_them_once() -> None:
    logger = logging.Logger("held")
    seen: list[str] = []
    asked: list[str] = []

    def once(record: logging.LogRecord) -> bool:
        asked.append(record.getMessage())
        return asked.count(asked[-1]) == 1

    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.addFilter(once)
    with held_back(logger):
        logger.warning("held")
        other = threading.Thread(target=logger.warning, args=("of another thread",))
        other.start()
        other.join()
        assert seen == ["of another thread"]
    assert seen == ["of another thread", "held"]
    assert asked == seen
    assert logger.filters == [once]


def test_a_handler_that_raises_keeps_nobody_from_going_on() -> None:
    logger, seen = logging.Logger("held"), list[str]()

    def emit(record: logging.LogRecord) -> None:
        seen.append(record.getMessage())
        raise RuntimeError("the log is not shipped")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    with held_back(logger):
        logger.warning("one")
        logger.warning("two")
    assert seen == ["one", "two"]
