"""The texts of errors and warnings, as the source of the package has them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from test.rooms import PACKAGE

__all__ = ["is_in", "logged_texts", "texts_of_source"]

_FIELD = re.compile(r"%(?:\.\d+)?[sdrgf]")
_LEVELS = {"warning", "error", "exception", "critical"}
_FEWEST_LETTERS = {"logged": 5, "any": 12}  # of a text that says something by itself
Text = tuple[str, ...]
"""What stands between the places that are filled in."""


def is_in(text: Text, line: str, all_of_it: bool = False) -> bool:
    """Whether a line has a text, filled in; or is one, from its beginning to its end."""
    place = 0
    for number, part in enumerate(text):
        found = line.find(part, place)
        if found < 0 or (all_of_it and number == 0 and found > 0):
            return False
        place = found + len(part)
    return not all_of_it or line.endswith(text[-1])


@functools.cache
def logged_texts() -> dict[Text, str]:
    """All that is logged as a warning, or as worse, with the module; but not what is made elsewhere and handed on."""
    found = {text: module for module, tree in _modules() for node in ast.walk(tree) for text in _logged(node)}
    return {text: module for text, module in found.items() if _letters(text) >= _FEWEST_LETTERS["logged"]}


@functools.cache
def texts_of_source() -> frozenset[Text]:
    """All texts in the source, line by line, that say something by themselves."""
    texts = {
        tuple(line.split("\0"))
        for _, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        for line in _text(node).split("\n")
    }
    return frozenset(text for text in texts if _letters(text) >= _FEWEST_LETTERS["any"])


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.parts[0] != "testing":
            yield str(module), ast.parse(path.read_text(encoding="utf-8"))


def _logged(node: ast.AST) -> Iterator[Text]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="_logger"), attr=level), args=[text, *_]):
            if level in _LEVELS:
                yield tuple(_FIELD.sub("\0", _text(text)).split("\0"))
        case ast.Call(func=ast.Name(id="_LimitedWarnings" | "warn_only"), args=[text, *_]):
            yield tuple(_FIELD.sub("\0", _text(text)).split("\0"))


def _text(node: ast.expr) -> str:
    """A text with a zero byte in each place that an f-string fills in; nothing for what is made elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join("\0" if isinstance(part, ast.FormattedValue) else _text(part) for part in parts)
    return ""


def _letters(text: Text) -> int:
    return sum(map(str.isalpha, "".join(text)))
