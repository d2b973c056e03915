"""Puts the tables of a folder of results into the pages on performance, in both languages.

    python -m benchmark.page --machine NAME [--results DIR] [--docs DIR] [--smoke]

The pages have a pair of marks for each machine, ``.. tables of NAME`` and ``.. end of the tables of NAME``; what stands
between them is replaced by the tables of the JSON files that there are, without those of goals, and by the drawn curves
if there are any. With --smoke the tables are printed, and no page is touched.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.command import BENCHMARKS, RESULTS
from benchmark.page_words import chinese
from benchmark.report import with_machine
from benchmark.summary import summary

__all__ = ["LANGUAGES", "main", "put", "tables"]

LANGUAGES = ("en", "cn")
_ROOT = Path(__file__).resolve().parents[1]
_LEFT_OUT = ("Goals", "How it was measured")
_PLACES = re.compile(r" --(out|scratch|torch-python) \S+")  # of one machine only, and nothing that was measured
_CURVES = "curves.png"
_WIDTH = 120


def tables(found: Mapping[str, Mapping[str, Any]], language: str) -> str:
    """All tables of what was found, by the names of the files, as reStructuredText.

    Raises:
        ValueError: a word has no translation yet.
    """
    modules = {benchmark.files or name: name for name, benchmark in BENCHMARKS.items()}
    lines: list[str] = []
    for name, one in found.items():
        module = importlib.import_module(f"benchmark.{modules[name]}")
        report = with_machine(module.as_markdown(one), one)
        blocks = list(_tables_of(report))
        lines += [_measured(one, blocks[0][1], language), ""]
        for caption, _, rows in blocks:
            lines += [*_list_table(caption, rows, language), ""]
    return "\n".join(lines)


def _tables_of(report: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Of each table but those that are left out: what stands above it, on which machine it was measured, its rows."""
    caption = above = ""
    for block in report.split("\n\n"):
        first, _, rest = block.partition("\n")
        if first.startswith("#"):
            caption = first.lstrip("# ")
        if first.startswith("|") and caption not in _LEFT_OUT:
            lines = [first, *rest.splitlines()[1:]]
            yield caption, above, [line.strip().removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
        above = block


def _measured(found: Mapping[str, Any], machine: str, language: str) -> str:
    """By which command, when, and on which machine."""
    command, before, after = _PLACES.sub("", found["command"]), found["machine"]["load_before"], found["load_after"]
    if language == "en":
        text = f"``{command}``, {found['date']} (load average {before} before, {after} after). {machine}."
        return "\n".join(textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
    return f"``{command}``\\ ，{found['date']}（系统平均负载：之前 {before}，之后 {after}）。{chinese(machine)}。"


def _list_table(caption: str, rows: list[list[str]], language: str) -> list[str]:
    def shown(cell: str) -> str:
        own = cell.strip()
        return (own if language == "en" else chinese(own)).replace("`", "``")

    lines = [f".. list-table:: {shown(caption)}", "    :header-rows: 1", ""]
    for row in rows:
        marks = ["    * -", *["      -"] * (len(row) - 1)]
        lines += [f"{mark} {shown(cell)}".rstrip() for mark, cell in zip(marks, row, strict=True)]
    return lines


def put(page: str, machine: str, text: str) -> str:
    """A page with this text between the marks of a machine.

    Raises:
        ValueError: the page does not have them.
    """
    begin, end = f".. tables of {machine}\n", f".. end of the tables of {machine}\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no lines {begin.strip()!r} and {end.strip()!r}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _image(machine: str, language: str) -> str:
    alt = "curves of time and memory" if language == "en" else "时间与内存的曲线"
    return f".. image:: images/curves-{machine}.png\n    :alt: {alt}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace the tables in the pages, or print them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Put the tables of a folder of results into the pages on performance.")
    parser.add_argument("--machine", default="here", help="whose tables they are, as the marks in the pages say")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the JSON files, and curves.png")
    parser.add_argument("--docs", type=Path, default=_ROOT, help="where docs_en and docs_cn are")
    parser.add_argument("--smoke", action="store_true", help="print the tables, and touch no page")
    args = parser.parse_args(arguments)
    found, _ = summary(args.results)
    for language in LANGUAGES:
        text, folder = tables(found, language), args.docs / f"docs_{language}"
        if args.smoke:
            print(text)
            continue
        image = folder / "images" / f"curves-{args.machine}.png"
        if (args.results / _CURVES).exists():
            shutil.copyfile(args.results / _CURVES, image)
        if image.exists():
            text += "\n" + _image(args.machine, language)
        page = folder / "performance.rst"
        page.write_text(put(page.read_text(encoding="utf-8"), args.machine, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
