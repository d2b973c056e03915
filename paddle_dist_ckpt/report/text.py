"""Text of a checkpoint as a person can read it: no longer than is of use, nothing in it invisible."""

from __future__ import annotations

import unicodedata

import numpy as np

__all__ = ["MOST_KEY", "MOST_VALUE", "value_text", "visible"]

MOST_KEY = 512
MOST_VALUE = 2000
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format (such as marks of direction), surrogates, separators


def visible(text: str, most: int = MOST_KEY) -> str:
    r"""Text with an escape, such as ``\u202e``, for every character that cannot be seen or that changes what others
    look like; of more than ``most`` characters the middle is left out."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped_character(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _escaped_character(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def value_text(value: object) -> str:
    """A value as Python would write it, shortened."""
    try:
        with np.printoptions(threshold=100):
            text = repr(value.item() if isinstance(value, np.generic) else value)
    except ValueError:  # an int of thousands of digits
        text = "(a number too long to write out)"
    except RecursionError:
        text = "(nested too deep to write out)"
    return visible(text, MOST_VALUE)
