"""Lets pytest show what the hubs' conformance suite has compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("paddle_dist_ckpt.testing.hub_conformance")
