"""Settings of Sphinx for the documentation in both languages; ``make docs`` builds both into one folder.

The pages are written so that a plain viewer of reStructuredText shows them well. So they link to each other's files,
and a signature is a block of code. Here the links are turned into links to the built pages, and what has a signature is
made known to Sphinx's search and index.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_dist_ckpt.version import __version__  # noqa: E402

_LINK = re.compile(r"^(?!\w+:)(?P<page>[\w./-]*\w)\.rst(?P<anchor>#.*)?$")
_SIGNATURE = re.compile(
    r"^(?P<kind>class |exception )?paddle_dist_ckpt\.(?P<name>[\w.]+)(\(.*\))?( -> .*)?$", re.DOTALL
)
_MEMBER = re.compile(r"^(?P<name>[a-z]\w*)(?P<call>\(.*\))?$", re.DOTALL)
_SECTION = re.compile(r"^(?P<title>\S.*)\n([-:])\2{3,}\n(?P<text>(?:.*\n)*?)(?=^\S.*\n[-:]{4,}$|\Z)", re.MULTILINE)
_LISTED = re.compile(r"<(?P<page>[\w/]+)\.rst>`__")
_CJK = "[\u2e80-\u9fff\uff00-\uffef]"
_logger = logging.getLogger(__name__)

chinese = tags.has("cn")  # type: ignore[name-defined]  # noqa: F821  # Sphinx defines it
language = "zh_CN" if chinese else "en"
locale_dirs = [str(ROOT / "docs" / "locale")]
project = "paddle_dist_ckpt"
version = release = __version__
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"paddle_dist_ckpt {__version__}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = [str(ROOT / "docs" / "static")]
html_css_files = ["site.css"]
templates_path = [str(ROOT / "docs" / "templates")]
html_context = {
    "other_language": "en" if chinese else "cn",
    "other_language_name": "English" if chinese else "中文",
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the site's contents from the first page: what its sections link to, in their order, each page once."""
    if docname != "index":
        return
    seen: set[str] = set()
    for section in _SECTION.finditer(source[0]):
        listed = dict.fromkeys(_LISTED.findall(section["text"])) if section["title"] != project else ()
        found = [page for page in listed if page not in seen]
        seen.update(found)
        if found:
            lines = [
                ".. toctree::",
                "    :hidden:",
                f"    :caption: {section['title']}",
                "",
                *(f"    {p}" for p in found),
            ]
            source[0] += "\n" + "\n".join(lines) + "\n"


def join_lines(app: Sphinx, doctree: nodes.document) -> None:
    """Take out the ends of lines between two Chinese characters, which browsers would show as spaces."""
    for text in list(doctree.findall(nodes.Text)):
        joined = re.sub(f"(?<={_CJK})\n(?={_CJK})|(?<=[，。；：、！？）」])\n|\n(?=[（「])", "", text)
        if joined != text and not isinstance(text.parent, nodes.literal_block):
            text.parent.replace(text, nodes.Text(joined))


def link_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn links to files of pages into links to the built pages; one to no page is a warning."""
    for link in doctree.findall(nodes.reference):
        found = _LINK.match(link.get("refuri", ""))
        if found is None:
            continue
        target = Path(docname).parent / found["page"]
        parts: list[str] = []
        for part in target.parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        page = "/".join(parts)
        if page not in app.env.found_docs:
            _logger.warning("a link to %s.rst, which is no page", page, location=link)
            continue
        link["refuri"] = app.builder.get_relative_uri(docname, page) + (found["anchor"] or "")
        link["internal"] = True


def note_signatures(app: Sphinx, doctree: nodes.document) -> None:
    """Tell Sphinx of each function and class whose signature is a block of code, and of its members that follow.

    A member is what a list has in bold at the beginning of an item: a method, a parameter, an attribute. It can be
    linked to as ``api/LoadOptions.rst#paddle_dist_ckpt.LoadOptions.strict``.
    """
    domain: Any = app.env.get_domain("py")
    owner = kind = ""
    for node in doctree.findall(lambda node: isinstance(node, (nodes.literal_block, nodes.strong))):
        if isinstance(node, nodes.strong):
            member = _MEMBER.match(node.astext())
            in_item = isinstance(node.parent, nodes.paragraph) and isinstance(node.parent.parent, nodes.list_item)
            if kind in ("class", "exception") and member is not None and in_item:
                note(domain, f"{owner}.{member['name']}", "method" if member["call"] else "attribute", node)
            continue
        found = _SIGNATURE.match(node.astext())
        if found is None:
            continue
        owner = f"paddle_dist_ckpt.{found['name']}"
        kind = (found["kind"] or "").strip() or "function"
        node["classes"].append("signature")
        note(domain, owner, kind, node)


def note(domain: Any, name: str, kind: str, node: nodes.Element) -> None:
    """Give a place in a page an object's name for its id, and tell Sphinx of it."""
    known = domain.objects.get(name)
    if known is not None and kind == "attribute":  # a list further down names it again, to explain it
        return
    if known is not None:
        raise ExtensionError(f"{name} is described twice")
    node["ids"].append(name)
    domain.note_object(name, kind, name, location=node)


def note_terms(app: Sphinx, doctree: nodes.document) -> None:
    """Make each word of the glossary a place that can be linked to, by its English form: ``glossary.rst#flat-key``."""
    if app.env.docname != "glossary":
        return
    for row in doctree.findall(nodes.row):
        cell = row[0]
        for term in cell.astext().partition("（")[0].replace("、", ",").split(","):
            slug = nodes.make_id(term)
            if slug and slug not in doctree.ids:
                cell["ids"].append(slug)
                doctree.ids[slug] = cell


def setup(app: Sphinx) -> dict[str, bool]:
    """Add these steps to Sphinx."""
    app.connect("source-read", add_contents)
    if chinese:
        app.connect("doctree-read", join_lines)
    app.connect("doctree-read", note_signatures)
    app.connect("doctree-read", note_terms)
    app.connect("doctree-resolved", link_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
