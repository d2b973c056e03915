"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight warm ranks, which start when the first test calls ``pool.run``."""
    with RankPool(8) as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and paddlepaddle-gpu"))


def _has_gpu() -> bool:
    import paddle

    return bool(paddle.is_compiled_with_cuda()) and paddle.device.cuda.device_count() > 0
