"""The rooms of the package and who imports whom, read from the source; and the picture of them in the documentation.

python -m test.rooms     # draws docs_en/images/rooms.svg and docs_cn/images/rooms.svg anew
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["PACKAGE", "PICTURES", "drawn", "imported", "parsed", "part_of", "rooms"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddle_dist_ckpt"
PICTURES = {language: ROOT / f"docs_{language}" / "images" / "rooms.svg" for language in ("en", "cn")}

# Modules at the top are drawn together, by what they are to a user.
_TOGETHER = {
    **dict.fromkeys(
        (
            *("__init__", "public", "api", "one_call", "drop_in", "gathering", "state_exports"),
            *("export_calls", "folder_calls", "recipe_calls"),
        ),
        "api, one_call, drop_in",
    ),
    **dict.fromkeys(
        ("arguments", "errors", "options", "recipes", "reports", "version", "visible"), "errors, options, reports"
    ),
}
_LEFT_OUT = ("testing", "cli", "__main__")  # these may use anything
_SAYS = {
    "en": {
        "api, one_call, drop_in": "what users call",
        "manager": "which steps to save, keep and restore",
        "wiring": "puts a save, load or export together",
        "paddle_adapter": "the only one that imports Paddle",
        "saving": "a save, from description to commit",
        "loading": "a load, from answer to restore",
        "exporting": "what others read",
        "report": "a page that shows a checkpoint",
        "folder": "ids, leases, commit, verify, rebuild",
        "files": "the format: metadata and data files",
        "readers": "checkpoints that others wrote",
        "control": "ranks talking: rounds, deadlines",
        "storage": "names and bytes",
        "planning": "pure: who writes and reads what",
        "tree": "the state_dict: paths, values, names",
        "core": "boxes, dtypes, shard table, memory",
        "errors, options, reports": "what users see",
    },
    "cn": {
        "api, one_call, drop_in": "用户调用的函数",
        "manager": "保存、保留、恢复哪些步",
        "wiring": "组装一次保存、加载或导出",
        "paddle_adapter": "唯一导入 Paddle 的部分",
        "saving": "保存：从描述到提交",
        "loading": "加载：从应答到恢复",
        "exporting": "供其他软件读取的格式",
        "report": "展示检查点的网页",
        "folder": "编号、租约、提交、校验、重建",
        "files": "文件格式：元数据与数据文件",
        "readers": "读取其他格式的检查点",
        "control": "rank 间通信：轮次与期限",
        "storage": "文件名与字节",
        "planning": "纯函数：谁写什么、谁读什么",
        "tree": "state_dict：路径、值、名称",
        "core": "box、dtype、分片表、内存",
        "errors, options, reports": "用户看到的类型",
    },
}
# Where a room does not stand in the middle: at which of five columns, from the left.
_COLUMNS = {
    "control": 0,
    "report": 4,
    "paddle_adapter": 3,
    "loading": 1,
    "saving": 2,
    "exporting": 0,
    "planning": 1,
    "storage": 2,
    "tree": 3,
    "readers": 4,
}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 236, 50, 34, 46, 16


def part_of(path: Path, package: Path) -> str:
    """The part that a module belongs to: the folder or module right below the package."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(node: ast.AST) -> Iterator[ast.stmt | ast.excepthandler | ast.match_case]:
    """All statements in a node, those inside functions too. Much fewer than all nodes."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, None)
        for statement in inner if isinstance(inner, list) else ():
            yield statement
            yield from _statements(statement)


def _computed(path: Path) -> Iterator[tuple[int, str]]:
    """What a module imports by a call, which is rare."""
    by_call = ("import_module", "__import__")
    if not any(name in path.read_text(encoding="utf-8") for name in by_call):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in by_call:
            (name, *_) = [*node.args, None]
            yield node.lineno, name.value if isinstance(name, ast.Constant) else "something.computed"


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module imports, inside functions too."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in _statements(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            # "from . import x" may name a module; a name that is no module does no harm behind its module's name.
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
    yield from _computed(path)


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """For each room of the picture the rooms that its modules import, itself left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = part_of(path, package)
        if room in _LEFT_OUT:
            continue
        uses = found.setdefault(_TOGETHER.get(room, room), set())
        for _, name in imported(path, package):
            parts = name.split(".")
            if parts[0] == package.name and len(parts) > 1 and parts[1] not in (*_LEFT_OUT, "__version__"):
                uses.add(_TOGETHER.get(parts[1], parts[1]))
    return {room: uses & found.keys() - {room} for room, uses in found.items()}


def _rows(uses: Mapping[str, set[str]]) -> dict[str, int]:
    """The row of each room, from the top: right below the lowest of those that use it."""
    users = {room: {other for other in uses if room in uses[other]} for room in uses}
    rows: dict[str, int] = {}

    def row(room: str) -> int:
        if room not in rows:
            rows[room] = 1 + max((row(user) for user in users[room]), default=-1)
        return rows[room]

    for room in uses:
        row(room)
    return rows


def _direct(uses: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports without those that follow from others: if a uses b and b uses c, that a uses c is not drawn."""
    reach: dict[str, set[str]] = {}
    for room in sorted(uses, key=_rows(uses).__getitem__, reverse=True):
        reach[room] = uses[room].union(*(reach[below] for below in uses[room]))
    return sorted(
        (room, below) for room in uses for below in uses[room] if not any(below in reach[b] for b in uses[room])
    )


def _places(uses: Mapping[str, set[str]]) -> dict[str, tuple[float, float]]:
    """The middle of each room's upper edge. What a room uses stands below it."""
    rows = _rows(uses)
    return {
        room: (
            _MARGIN + _WIDTH / 2 + _COLUMNS.get(room, 1.5) * (_WIDTH + _GAP_X),
            _MARGIN + rows[room] * (_HEIGHT + _GAP_Y),
        )
        for room in uses
    }


def drawn(language: str) -> str:
    """The picture as SVG. An arrow goes from a room to one that it imports."""
    uses = rooms()
    says = _SAYS[language]
    places = _places(uses)
    width = max(x for x, _ in places.values()) + _WIDTH / 2 + _MARGIN
    height = max(y for _, y in places.values()) + _HEIGHT + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7a8794"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for above, below in _direct(uses):
        (x1, y1), (x2, y2) = places[above], places[below]
        start, stop = y1 + _HEIGHT, y2 - 1
        bow, middle = stop - _GAP_Y + 1, stop - _GAP_Y / 2  # straight down to the last gap, where it bends
        lines.append(
            f'<path d="M{x1:.0f} {start:.0f}V{bow:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {stop:.0f}"'
            ' fill="none" stroke="#7a8794" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in sorted(places.items()):
        colour = {"saving": "#e3f1e7", "loading": "#e4ecf7"}.get(room, "#f4f5f7")
        lines += [
            f'<rect x="{x - _WIDTH / 2:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{colour}" '
            'stroke="#aab4be"/>',
            f'<text x="{x:.0f}" y="{y + 21:.0f}" font-size="15" font-weight="bold" fill="#1c2733">{escape(room)}'
            "</text>",
            f'<text x="{x:.0f}" y="{y + 39:.0f}" font-size="12" fill="#46535f">{escape(says[room])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for code, picture in PICTURES.items():
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(drawn(code), encoding="utf-8")
        print(picture.relative_to(ROOT))
