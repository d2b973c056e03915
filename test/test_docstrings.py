"""The examples in the docstrings of all public functions, and of the main classes."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import paddle_dist_ckpt

CLASSES = ("AsyncSave", "CheckpointManager", "LoadOptions", "PerRank", "SaveOptions")
FUNCTIONS = [name for name in paddle_dist_ckpt.__all__ if inspect.isfunction(getattr(paddle_dist_ckpt, name))]


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_the_example_of_a_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    monkeypatch.chdir(tmp_path)
    public = getattr(paddle_dist_ckpt, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(public) or "", {}, name, None, 0)
    output: list[str] = []
    assert test.examples
    doctest.DocTestRunner().run(test, out=output.append)
    assert "".join(output) == ""
