"""Writes what users may call, as it is now: ``python -m test.golden.make_public > test/golden/public.json``.

Run it when something was added, so that it is kept from then on. A test compares, and says what was taken away.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import typer

import paddle_dist_ckpt
from paddle_dist_ckpt.cli.main import app

PAGES = [page.read_text("utf-8") for page in (Path(__file__).parents[2] / "docs_en/api").glob("*.rst")]
MADE_BY_THE_LIBRARY = ("AsyncSave", "ExportReport", "LoadReport", "Metadata", "Recipe", "SaveReport", "VerifyReport")
"""Classes of which users get objects and make none."""
OPERATORS = ("__add__", "__enter__", "__exit__", "__getitem__")


def parameters(function: Any) -> dict[str, list[str]] | None:
    """The parameters of what can be called, in their order: how each may be passed, and its default."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no callable, or one of C
        return None
    return {each.name: [each.kind.name, default(each.default)] for each in found}


def default(value: Any) -> str:
    """A default as it is compared."""
    return "required" if value is inspect.Parameter.empty else repr(value)


def page_of(name: str) -> str:
    """The page of the documentation that declares a class."""
    (page,) = (text for text in PAGES if re.search(rf"(class|exception) paddle_dist_ckpt\.{name}\b", text))
    return page


def members(kind: type) -> dict[str, Any]:
    """What objects of a class have of which its page speaks: the parameters of methods, and nothing of attributes."""
    page = page_of(kind.__name__)
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    names = {name for name in {*dir(kind), *fields} if not name.startswith("_") or name in OPERATORS}
    if issubclass(kind, Exception):
        names -= set(dir(Exception))  # which are others in each version of Python
    named = (name for name in sorted(names) if name in OPERATORS or re.search(rf"\b{name}\b", page))
    return {name: parameters(getattr(kind, name, None)) for name in named}


def public() -> dict[str, Any]:
    """The names of the package and the commands."""
    names: dict[str, Any] = {}
    for name in paddle_dist_ckpt.__all__:
        what = getattr(paddle_dist_ckpt, name)
        makes = name not in MADE_BY_THE_LIBRARY and not (inspect.isclass(what) and issubclass(what, Exception))
        names[name] = {"parameters": parameters(what) if makes else None}
        if inspect.isclass(what):
            bases = sorted(base.__name__ for base in what.__mro__[1:-1])
            names[name] |= {"bases": bases, "members": members(what)}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        "names": names,
        "commands": {
            name: {
                each.name: {
                    "texts": sorted([*each.opts, *each.secondary_opts]),
                    "required": each.required,
                    "default": default(each.default),
                }
                for each in command.params
            }
            for name, command in commands.items()
        },
    }


if __name__ == "__main__":
    parts = (
        f'"{part}": {{\n' + ",\n".join(f'"{name}": {json.dumps(what)}' for name, what in found.items()) + "\n}"
        for part, found in public().items()
    )
    print("{" + ",\n".join(parts) + "}")
