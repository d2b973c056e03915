"""What every control hub must do, as tests that whoever writes one can run over it.

Derive a class whose name begins with ``Test``, and give it a fixture that makes a group of hubs, new for every test::

    class TestMyHub(HubConformance):
        @pytest.fixture
        def group(self):
            group = MyGroup()  # see HubGroup
            yield group
            group.close()

pytest shows what was compared if it is told to before the import, in conftest.py:
``pytest.register_assert_rewrite("paddle_dist_ckpt.testing.hub_conformance")``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .appointments import AppointmentTests
from .cases import HubGroup
from .concurrency import ConcurrencyTests
from .losses import LossTests
from .rounds import RoundTests

__all__ = ["HubConformance", "HubGroup"]


class HubConformance(RoundTests, LossTests, ConcurrencyTests, AppointmentTests):
    """Tests of a :class:`paddle_dist_ckpt.core.protocols.ControlHub`."""

    @pytest.fixture
    def group(self) -> Iterator[HubGroup]:
        """A new group of hubs; to be overridden."""
        raise NotImplementedError("derive from HubConformance, and make a fixture 'group'")
