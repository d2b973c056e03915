"""The examples in the docstrings of the main public names."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import paddle_dist_ckpt

MAIN = (
    "AsyncSave",
    "CheckpointManager",
    "LoadOptions",
    "PerRank",
    "SaveOptions",
    "load",
    "load_merged_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
)


@pytest.mark.parametrize("name", MAIN)
def test_the_example_of_a_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    monkeypatch.chdir(tmp_path)
    public = getattr(paddle_dist_ckpt, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(public) or "", {}, name, None, 0)
    output: list[str] = []
    assert test.examples
    doctest.DocTestRunner().run(test, out=output.append)
    assert "".join(output) == ""
