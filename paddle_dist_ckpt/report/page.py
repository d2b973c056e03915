"""The page: one HTML file of the facts, and of the style and the script that draw them.

Nothing of the checkpoint stands in the HTML itself. It is JSON in a script element of no script's type, in which
every character of ``<>&`` and beyond ASCII is escaped, and the script sets it as text only. The policy in the page
lets a browser run that script and nothing else, and load nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from importlib import resources
from typing import Any

from .facts import Facts

__all__ = ["page_of"]

_SCRIPTS = ("base.js", "boxes.js", "treemap.js", "charts.js", "tensors.js", "main.js")


def page_of(facts: Facts) -> str:
    """The page that shows these facts."""
    style = _asset("page.css")
    script = f'"use strict";\n(() => {{\n{"".join(map(_asset, _SCRIPTS))}}})();\n'
    parts = {
        "policy": (
            f"default-src 'none'; script-src '{_hash_source(script)}'; style-src '{_hash_source(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": _embedded(facts),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash_source(text: str) -> str:
    """What a Content-Security-Policy calls an element of this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(facts: Facts) -> str:
    """The facts as JSON that can stand in a script element, whatever is in them."""
    text = json.dumps(facts, default=_members, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "&<>"})


def _members(columns: Any) -> dict[str, Any]:
    return {each.name: getattr(columns, each.name) for each in dataclasses.fields(columns)}
