"""The layers of the package: which part may import which, read from the source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test.rooms import PACKAGE, PICTURES, drawn, imported, part_of

NAME = PACKAGE.name

_BASE = {"arguments", "errors", "options", "recipes", "visible"}  # core imports nothing else of ours
_TREE = _BASE | {"core"}
_FILES = _TREE | {"tree", "storage", "planning"}
_FOLDER = _FILES | {"files", "readers", "reports"}
_LANES = _FOLDER | {"folder", "control", "version"}  # a save and a load: neither imports the other
_WIRING = _LANES | {"saving", "loading", "exporting", "paddle_adapter"}
_CALLS = _WIRING | {"wiring"}
_ABOVE = _CALLS | {
    *("api", "drop_in", "export_calls", "folder_calls", "gathering", "manager", "one_call", "recipe_calls"),
    "state_exports",
}
# What each part may import beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "visible": set(),
    "errors": {"visible"},
    "arguments": set(),
    "recipes": {"arguments"},
    "recipe_calls": {"arguments", "recipes"},
    "options": {"arguments", "recipes"},
    "reports": set(),
    "version": set(),
    "core": _BASE,
    "tree": _TREE,
    "planning": _TREE,
    "storage": _TREE,
    "control": _TREE | {"version"},
    "paddle_adapter": _TREE | {"tree", "control"},
    "files": _FILES | {"version"},
    "readers": _TREE | {"tree", "storage", "planning"},
    "folder": _FOLDER,
    "saving": _LANES,
    "loading": _LANES,
    "exporting": _LANES,
    "report": _FOLDER | {"folder"},
    "wiring": _WIRING,
    "api": _CALLS,
    "folder_calls": _CALLS,
    "manager": _CALLS,
    "state_exports": _CALLS,
    "export_calls": _CALLS | {"state_exports"},
    "gathering": _CALLS,
    "one_call": _CALLS | {"api"},
    "drop_in": _CALLS | {"api", "export_calls", "folder_calls", "state_exports"},
    "testing": _ABOVE | {"readers"},
    "public": _ABOVE,
    "__init__": {"public", "version"},
    "cli": _ABOVE | {"__init__", "report"},
    "__main__": {"cli"},
}
# Packages from outside that only these parts may import; the standard library and numpy are for all.
OUTSIDE = {
    "msgspec": set(MAY_IMPORT),
    "xxhash": {"control", "files", "folder", "saving"},
    "ml_dtypes": {"core"},
    "tqdm": {"core"},
    "paddle": {"paddle_adapter"},
    "pytest": {"testing"},
    "rich": {"cli"},
    "typer": {"cli"},
}


def breaches(package: Path = PACKAGE) -> list[str]:
    """Every import that the layers forbid."""
    found = []
    for path in sorted(package.rglob("*.py")):
        part = part_of(path, package)
        for line, name in imported(path, package):
            top, *rest = name.split(".")
            if top == package.name:
                target = rest[0] if rest else "__init__"
                if target == "__version__":
                    target = "version"
                allowed = target == part or target in MAY_IMPORT.get(part, set())
            else:
                allowed = top in sys.stdlib_module_names or top == "numpy" or part in OUTSIDE.get(top, set())
            if not allowed:
                found.append(f"{path.relative_to(package.parent)}:{line}: {part} may not import {name}")
    return found


def test_no_part_imports_what_is_above_it() -> None:
    assert breaches() == []


def test_every_part_is_known() -> None:
    assert {part_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")} <= set(MAY_IMPORT)


def test_the_layers_have_no_circle() -> None:
    done: set[str] = set()
    while left := set(MAY_IMPORT) - done:
        ready = {part for part in left if MAY_IMPORT[part] <= done}
        assert ready, f"a circle among {left}"
        done |= ready


@pytest.mark.parametrize("language", PICTURES)
def test_the_picture_in_the_documentation_is_true(language: str) -> None:
    assert PICTURES[language].read_text(encoding="utf-8") == drawn(language), "python -m test.rooms draws it anew"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/box.py", "from ..planning import cover"),
        ("core/box.py", "from ..planning.cover import first_gap"),
        ("core/box.py", "from .. import saving"),
        ("core/box.py", "import paddle_dist_ckpt.saving.save"),
        ("core/box.py", "import paddle_dist_ckpt"),
        ("core/box.py", "from paddle_dist_ckpt import storage"),
        ("core/deep/box.py", "from ...storage.base import Storage"),
        ("core/box.py", "def late():\n    import paddle"),
        ("core/box.py", "from paddle.distributed import get_rank"),
        ("core/box.py", "import rich"),
        ("core/box.py", "import requests"),
        ("core/__init__.py", "from ..files import names"),
        ("planning/a.py", "from ..storage import base"),
        ("planning/a.py", "from ..control import hub"),
        ("storage/a.py", "from ..files import names"),
        ("control/a.py", "from ..saving import save"),
        ("control/a.py", "import importlib\nimportlib.import_module('paddle')"),
        ("files/a.py", "from ..saving import save"),
        ("saving/a.py", "from ..paddle_adapter import tensors"),
        ("saving/a.py", "from ..loading import fit"),
        ("loading/a.py", "from ..saving.describe import describe"),
        ("folder/a.py", "from ..loading import fit"),
        ("saving/a.py", "if True:\n    import paddle.nn as nn"),
        ("saving/a.py", "from ..api import save_state_dict"),
        ("paddle_adapter/a.py", "from ..saving import save"),
        ("paddle_adapter/a.py", "from ..storage import base"),
        ("testing/a.py", "import paddle"),
        ("api.py", "from paddle import Tensor"),
        ("api.py", "from .testing import faults"),
        ("errors.py", "from .core import box"),
        ("unknown.py", "from .core import box"),
    ],
)
def test_the_check_finds_a_breach(module: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / NAME / module
    path.parent.mkdir(parents=True)
    path.write_text(f'"""A module."""\n\n{line}\n', encoding="utf-8")
    (found,) = breaches(tmp_path / NAME)
    assert module in found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (
            "core/a.py",
            "from .box import Box\nfrom . import box\nfrom ..errors import Error\nimport numpy as np, os.path",
        ),
        ("planning/a.py", "from ..core.box import Box\nfrom ..core import box"),
        ("files/a.py", "from ..storage.base import Storage\nimport msgspec"),
        (
            "saving/a.py",
            "from ..files import names\nfrom ..planning.cover import first_gap\nfrom ..control import hub",
        ),
        ("paddle_adapter/a.py", "import paddle\nfrom ..control import hub"),
        ("api.py", "def f():\n    from .paddle_adapter import tensors"),
        ("__init__.py", "from .version import __version__\nfrom .public import save_state_dict"),
    ],
)
def test_the_check_lets_pass_what_is_allowed(module: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / NAME / module
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n", encoding="utf-8")
    assert breaches(tmp_path / NAME) == []
