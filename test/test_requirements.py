"""What setup.py says that the library needs, and what a source distribution has."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from test.rooms import ROOT


def required() -> list[Requirement]:
    setup: dict[str, Any] = {"__file__": str(ROOT / "setup.py")}
    exec((ROOT / "setup.py").read_text("utf-8").partition("\nsetup(")[0], setup)
    return [Requirement(text) for text in setup["REQUIRES"]]


def test_each_requirement_has_an_oldest_version_and_is_installed() -> None:
    """Without one, what is installed already is kept however old it is, and fails when something new is used."""
    assert len(required()) == 7
    for requirement in required():
        assert [each.operator for each in requirement.specifier] == [">="], requirement
        assert importlib.metadata.version(requirement.name) in requirement.specifier


def test_a_source_distribution_has_what_is_installed_and_no_tests(tmp_path: Path) -> None:
    """Setuptools adds of itself those tests that are not in folders, which cannot run without the others."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    listed = (tmp_path / "paddle_dist_ckpt.egg-info/SOURCES.txt").read_text("utf-8").splitlines()
    files = {file for file in listed if ".egg-info/" not in file}
    package = {str(file.relative_to(ROOT)) for file in (ROOT / "paddle_dist_ckpt").rglob("*") if file.is_file()}
    assert {file for file in files if file.startswith("paddle_dist_ckpt/")} == {
        file for file in package if "__pycache__" not in file
    }
    others = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert {file for file in files if not file.startswith("paddle_dist_ckpt/")} == others
