"""The names of the package: each class has one of its own, and what a module offers is what others use of it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import paddle_dist_ckpt
from test.rooms import PACKAGE, ROOT, imported, parsed

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
USERS = [
    path
    for folder in ("paddle_dist_ckpt", "test", "benchmark", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if ".venv" not in path.parts
]


def offered(path: Path) -> list[str]:
    """What a module's ``__all__`` has."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def defined(path: Path) -> Iterator[str]:
    """The names at the top of a module, imported ones left out."""
    for node in parsed(path).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def test_no_name_stands_for_two_classes() -> None:
    places = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_modules_offer_what_they_define() -> None:
    for path in MODULES:
        assert set(offered(path)) <= set(defined(path)), path


def test_modules_offer_what_others_use_and_nothing_else() -> None:
    used = defaultdict(set)
    for path in USERS:
        for _, name in imported(path, PACKAGE if PACKAGE in path.parents else ROOT):
            module, _, what = name.rpartition(".")
            used[module].add(what)
        used[""].update(re.findall(r"\w\.(\w+)", path.read_text(encoding="utf-8")))  # module.name
    wrong = {}
    for path in MODULES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = {name for name in used[module] if not name.startswith("_")}
        hidden = names & set(defined(path)) - set(offered(path))
        useless = set(offered(path)) - names - used[""] - set(paddle_dist_ckpt.__all__)
        if hidden or useless:
            wrong[module] = (sorted(hidden), sorted(useless))
    assert wrong == {}
