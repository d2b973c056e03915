"""A path as a user writes it: the only place that says what it means."""

from __future__ import annotations

import os
import re
import sys

__all__ = ["local_path"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|[A-Za-z][A-Za-z0-9+.-]*://")


def local_path(path: str | os.PathLike[str], name: str = "path") -> str:
    """The absolute path that a user means: ``~`` is the home folder, and ``..`` after a link is above what it leads to.

    Args:
        path: The path.
        name: What the argument is called.

    Raises:
        TypeError: it is no path, or one of bytes.
        ValueError: it is empty, has a zero byte in it or what the encoding of the process's file names does not have,
            as UTF-8 a half of a surrogate pair that stands for no byte, or is a URL rather than a path; or it begins
            with ``~`` or ``~user/``, and there is no home folder, or no such user.
        FileNotFoundError: it is relative, and the current folder has been removed.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str or a PathLike of one, not {type(text).__name__}")
    if _URL.match(text):
        raise ValueError(
            f"{name} must name a local folder or file, and {text!r} looks like a URL: pass where that is mounted, or "
            f"a Storage. (For a folder that is called so: {'./' + text!r})"
        )
    if not text or "\0" in text:
        raise ValueError(f"{name} must name a local folder or file, not {text!r}; for other places pass a Storage")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise ValueError(
            f"{name} {text!r} has characters that this process cannot tell the system, to which it speaks {encoding}"
            f"{'' if encoding == 'utf-8' else ': PYTHONUTF8=1 mends that'}"
        ) from error
    expanded = os.path.expanduser(text)
    user, slash, _ = text.partition("/")
    if expanded == text and user == "~":
        raise ValueError(f"{name} is {text!r}, and there is no home folder: HOME is not set, nor is the user known")
    if expanded == text and user.startswith("~") and slash:  # "~name" alone is often a file's or a folder's
        advice = "for a folder that is called so, pass an absolute path"
        raise ValueError(f"{name} is {text!r}, and there is no user {user[1:]!r} here; {advice}")
    try:
        return _absolute(expanded)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "the current folder, to which it is relative, is gone", text) from error


def _absolute(path: str) -> str:
    """An absolute path without ``..``, of what the system finds by this one."""
    names = os.path.abspath(path)
    whole = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    above, up, below = f"{whole}/".rpartition("/../")
    if not up:
        return names
    # IMPORTANT: not by the names alone. Above what a link leads to may be another folder than beside the link, and what
    # is removed would not be what `ls` shows under this path.
    real = os.path.realpath(above + "/..")
    return names if real == os.path.realpath(os.path.abspath(above + "/..")) else os.path.normpath(f"{real}/{below}")
