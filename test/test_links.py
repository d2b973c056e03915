"""Links in the documents, as they are in the files: to files that are there, and to places in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LANGUAGES = ("en", "cn")


def _markdown_links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def test_links_lead_to_files_and_to_places_in_them() -> None:
    places = {ROOT / name: set() for name in ("README.md", "README_cn.md", "CONTRIBUTING.md", "CHANGELOG.md")}
    members = re.compile(r"^ *- (?:\*\*\w+(?:\(.*?\))?\*\*(?:, )?)+", re.MULTILINE)
    for language in LANGUAGES:
        for path in (ROOT / f"docs_{language}").rglob("*.rst"):
            text = path.read_text("utf-8")
            places[path] = {label.replace("_", "-") for label in re.findall(r"^\.\. _(\w+):$", text, re.MULTILINE)}
            if path.stem == "glossary":
                words = re.findall(r"^    \* - ([\w\- ,、]+)", text, re.MULTILINE | re.ASCII)
                places[path] = {w.strip().lower().replace(" ", "-") for row in words for w in re.split("[,、]", row)}
            listed = {m for item in members.findall(text) for m in re.findall(r"\*\*(\w+)", item)}
            owners = re.findall(r"^    class (paddle_dist_ckpt\.\w+)", text, re.MULTILINE)
            places[path] |= {f"{owner}.{member}" for owner in owners for member in listed}
    broken = []
    for path in places:
        text = path.read_text("utf-8")
        links = (
            re.findall(r"<([\w./-]+\.rst(?:#[\w.-]+)?)>`__", text) if path.suffix == ".rst" else _markdown_links(text)
        )
        for link in links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve()
            if not target.is_file() or (anchor and anchor not in places[target]):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_a_package_index_is_shown_no_link_that_leads_nowhere() -> None:
    setup: dict[str, Any] = {"__file__": str(ROOT / "setup.py")}
    exec((ROOT / "setup.py").read_text("utf-8").partition("\nsetup(")[0], setup)
    shown = setup["long_description"]()
    assert "from paddle_dist_ckpt import load_state_dict" in shown
    assert _markdown_links(shown) == []
    setup["FILES_URL"] = "https://example.com/files"
    assert "](https://example.com/files/docs_en/tutorial.rst)" in setup["long_description"]()
    assert _markdown_links(setup["long_description"]()) == []
