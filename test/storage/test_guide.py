"""The Storage that the guide has for an example."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from paddle_dist_ckpt.testing.storage_conformance import StorageTests
from test.test_docs import ALONE


@functools.cache
def _kind() -> Any:
    pytest.importorskip("paddle")
    module: dict[str, Any] = {}
    exec(compile(ALONE["guide_storage-0"], "guide_storage", "exec"), module)
    return module["MemoryStorage"]


class TestTheStorageOfTheGuide(StorageTests):
    """The example of a Storage keeps all promises of one."""

    @pytest.fixture
    def storage(self) -> Any:
        return _kind()()
