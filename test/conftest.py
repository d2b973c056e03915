"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from test import strategies
from test.ranks.pool import RankPool

_SHARED = {  # what test files import that takes seconds to make: ranks of gigabytes, and the parsed source of all files
    "from test.device_plugin.ranks import DevicePool": "devices",
    "from test.ranks.pool import RankPool": "pool",
    "from test.ranks.launcher import forked": "pool",  # whose worker has what ranks are forked from
    "from test.rooms import PACKAGE": "rooms",
}
_running: dict[str, RankPool] = {}  # those of them that tests have used, by the name of the fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--long``."""
    parser.addoption("--long", action="store_true", help="draw more at random, kill more, and run tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the tests how much to draw, before they are imported; and end a run of which a worker of pytest-xdist dies.

    A worker in its place would be given the test that killed the last one, or nothing, and be waited for for ever.
    """
    strategies.long_run = config.getoption("long")
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight warm ranks, which start when the first test calls ``pool.run``."""
    with RankPool(8) as ranks:
        yield ranks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests on one of pytest-xdist's workers that share what takes seconds to make, or a fixture of their file."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            path = config.rootpath / file
            return _shared_by(path) or (file if _stands_together(path) else nodeid)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """Forget the test, too, or what is left is counted among all that has been done, after each test."""
            nodeid = self.registered_collections[node][item_index]
            units, scope = self.assigned_work[node], self._split_scope(nodeid)
            del units[scope][nodeid]
            if not units[scope]:
                del units[scope]
            self._reschedule(node)

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End warm ranks when the tests that share them are over: each thread of gloo's wakes a hundred times a second."""
    name = _shared_by(item.path)
    if name is None:
        return
    used = getattr(item, "funcargs", {}).get(name)
    if used is not None:
        _running[name] = used
    if name in _running and (nextitem is None or _shared_by(nextitem.path) != name):
        _running.pop(name).close()


@cache
def _shared_by(file: Path) -> str | None:
    """What tests of a file share with those of other files, if they do; of warm ranks it is the fixture's name."""
    text = _text_of(file)
    return next((name for line, name in _SHARED.items() if line in text), None)


@cache
def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without one, and those marked ``long`` without ``--long``.

    Those that share something come first, one after the other, for one worker has to run all of them; then those marked
    ``slow``, so that no worker is busy with one when the others have nothing left to do; then files whose tests share a
    fixture. The others are mixed: those that wait more than they compute stand side by side in their files, and
    processors would have nothing to do.
    """
    items.sort(key=_turn)
    if not config.getoption("long"):
        _skip(items, "long", "runs with --long only")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _skip(items, "gpu", "needs a GPU and paddlepaddle-gpu")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected: there is little of it, and it is looked for all the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what has been imported and collected out of the garbage collector's sight, or it looks at it for minutes.

    And in each fork what there is then: if that is garbage of Paddle's with threads, its end waits for these threads,
    which have not come along, for ever.
    """
    os.register_at_fork(after_in_child=gc.freeze)
    gc.collect()
    gc.freeze()


def _turn(item: pytest.Item) -> tuple[int, int]:
    """When a test begins, among all others."""
    turns = ("pool", "devices", "rooms")  # the longest first
    shared = _shared_by(item.path)
    if shared is not None:
        return turns.index(shared), 0
    if item.get_closest_marker("slow"):
        return len(turns), 0
    if _stands_together(item.path):
        return len(turns) + 1, 0
    return len(turns) + 2, zlib.crc32(item.nodeid.encode())


def _stands_together(file: Path) -> bool:
    """Whether tests of a file share a fixture, which would be made again after each test of another file."""
    return 'scope="module"' in _text_of(file)


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import paddle

    return bool(paddle.is_compiled_with_cuda()) and paddle.device.cuda.device_count() > 0
