"""Text that others have written, so that it can be shown: in messages, in logs, on terminals, on a page.

Keys, names of files and values come from checkpoints of anybody. Nothing in them shall be invisible, turn around what
stands beside it, or tell a terminal what to do.
"""

from __future__ import annotations

import logging
import re
import traceback
import unicodedata
from collections.abc import Callable, Iterable

__all__ = [
    "MOST_KEY",
    "MOST_LINE",
    "MOST_MESSAGE",
    "each_visible",
    "escaped",
    "is_made_visible",
    "visible",
    "visible_lines",
]

MOST_KEY = 512
MOST_LINE = 4000
MOST_MESSAGE = 1 << 16  # of a line in which many ranks may have their say
_ABOUT = 40  # characters that say how many are left out; with them it is no longer, or it would be cut again
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format (such as marks of direction), surrogates, separators
# Letters, marks and places without a character that nothing is drawn for: fillers, selectors of variants, joiners.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)


def visible(text: str, most: int | None = MOST_KEY, kept: str = "") -> str:
    r"""Text with an escape as Python writes it, such as ``\x1b``, for every character that cannot be seen or that
    changes what others look like, but for those that are ``kept``; of more than ``most`` characters the middle is left
    out."""
    if most is not None and len(text) > most:
        half = (most - _ABOUT) // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return escaped(text, lambda c: c if c in kept else c.encode("unicode_escape").decode())


def visible_lines(text: str) -> str:
    """A message of several lines, each of them visible. All but the first are indented, so that none of them looks like
    a message of its own."""
    first, *others = each_visible(text.split("\n"), MOST_MESSAGE)
    return "\n".join([first, *(line if line.startswith("  ") else f"    {line}" for line in others)])


def each_visible(lines: Iterable[str], most: int = MOST_LINE) -> list[str]:
    """Lines of a message, none of which becomes several by what is in it."""
    return [visible(line, most) for line in lines]


def escaped(text: str, escape: Callable[[str], str]) -> str:
    """Text in which each character that :func:`visible` escapes is written by a function."""
    if text.isprintable() and (text.isascii() or not _BLANK.search(text)):  # as nearly all
        return text
    table = {ord(c): other for c in set(text) if _is_hidden(c) and (other := escape(c)) != c}
    return text.translate(table) if table else text


def is_made_visible(record: logging.LogRecord) -> bool:
    """A filter of a logger, which lets each record pass, and has nothing in it that could look like another record, nor
    in its traceback."""
    if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = visible_lines("".join(traceback.format_exception(*record.exc_info)).rstrip())
    try:
        text = record.getMessage()
    except Exception:  # its arguments do not fit: logging itself says so where it is written
        return True
    shown = visible_lines(text)
    if shown != text:
        record.msg, record.args = shown, None
    return True


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN or _BLANK.match(character) is not None
