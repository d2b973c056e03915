"""The package itself: its names are there, and are imported when the first of them is used."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

import paddle_dist_ckpt
from test.rooms import ROOT


@pytest.mark.parametrize(
    "program",
    [
        "import paddle_dist_ckpt as ckpt; few(); ckpt.load_state_dict; ckpt.errors.CheckpointError",
        "import paddle_dist_ckpt as ckpt; few(); ckpt.errors.CheckpointError",
        "from paddle_dist_ckpt import CheckpointManager, __version__",
        "from paddle_dist_ckpt import *; save_state_dict; Storage",
        "from paddle_dist_ckpt import errors; few()",
        "import paddle_dist_ckpt as ckpt; assert set(ckpt.__all__) <= set(dir(ckpt)); few()",
        "import paddle_dist_ckpt as ckpt; assert not hasattr(ckpt, 'no_such_name'); assert not hasattr(ckpt, '_x')",
    ],
)
def test_names_are_found_however_they_are_asked_for(program: str) -> None:
    few = "import sys\ndef few(): assert 'paddle' not in sys.modules and 'msgspec' not in sys.modules\n"
    if "import errors" in program:
        few = few.replace(" and 'msgspec' not in sys.modules", "")
    subprocess.run([sys.executable, "-c", few + program], cwd=ROOT, check=True, timeout=120)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads are not kept")
def test_a_type_checker_lets_a_variable_say_whether_a_save_is_in_the_background() -> None:
    found = [form.__annotations__["async_save"] for form in typing.get_overloads(paddle_dist_ckpt.save_state_dict)]
    assert found == ["Literal[False]", "Literal[True]", "bool"]


def test_every_public_name_is_there() -> None:
    assert all(getattr(paddle_dist_ckpt, name) is not None for name in paddle_dist_ckpt.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = paddle_dist_ckpt.no_such_name  # type: ignore[attr-defined]
