"""What setup.py says that the library needs."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def required() -> list[Requirement]:
    setup: dict[str, Any] = {"__file__": str(Path(__file__).parents[1] / "setup.py")}
    exec(Path(setup["__file__"]).read_text("utf-8").partition("\nsetup(")[0], setup)
    return [Requirement(text) for text in setup["REQUIRES"]]


def test_each_requirement_has_an_oldest_version_and_is_installed() -> None:
    """Without one, what is installed already is kept however old it is, and fails when something new is used."""
    assert len(required()) == 7
    for requirement in required():
        assert [each.operator for each in requirement.specifier] == [">="], requirement
        assert importlib.metadata.version(requirement.name) in requirement.specifier
