"""Which host this is: the same one for as long as the process lives, or an error."""

from __future__ import annotations

import errno
import functools
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt.core import host


def refusing(patch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*args: Any, **more: Any) -> str:
        raise OSError(number, "refused")

    patch.setattr(Path, "read_text", refused)
    patch.setattr(host, "this_host", functools.cache(host.this_host.__wrapped__))


def test_a_rank_with_too_many_open_files_is_not_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that seem to be on several hosts seem to see several folders."""
    usual = host.this_host()
    with monkeypatch.context() as patch:
        refusing(patch, errno.EMFILE)
        with pytest.raises(OSError, match="refused"):
            host.this_host()
        afterwards = host.this_host
    assert afterwards() == usual


def test_a_host_without_a_boot_id_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, errno.ENOENT)
    name, _, boot = host.this_host().rpartition("/")
    assert name
    assert boot == ""
