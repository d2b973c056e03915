"""Recognises files that are of formats that are not read, or that a download left, so that messages can say it."""

from __future__ import annotations

from ..errors import CheckpointCorruptedError

__all__ = ["LOOK", "check_downloaded", "is_safetensors", "left_by_download", "what_it_is"]

LOOK = 64  # bytes of a file's beginning that tell
_LFS = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")
_ZIP = b"PK\3\4"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # a pickle of the number that torch.save wrote until 1.5


def what_it_is(start: bytes) -> str | None:
    """What a file that begins so is, and what to do about it; None if that is not known."""
    if start.startswith((_ZIP, _OLD_TORCH)):
        kind = "a zip file, as torch.save writes it" if start.startswith(_ZIP) else "a file of torch.save"
        return f"{kind}, which is not read: load it with what wrote it, and save it as safetensors"
    # a tensor of Paddle's: versions, levels and again versions, all 0; the length of its description, and that
    if len(start) > 20 and not any(start[:16]) and any(start[16:20]) and start[20] == 8:
        return (
            "in Paddle's binary format, that of .pdiparams and of paddle.save(use_binary_format=True), which is not "
            "read: load it with Paddle, and save a state_dict with paddle.save"
        )
    return None


def left_by_download(start: bytes) -> str | None:
    """What a file that begins so is, if it is none but what a download has left in its place; else None."""
    if not start:
        return "empty; download or copy it again"
    if start.startswith(_LFS):
        return "only Git LFS's pointer to what it should hold; call git lfs pull, or download the file itself"
    if start.lstrip().lower().startswith(_HTML):
        return "a page of HTML, as servers send in place of a file; download it again"
    return None


def check_downloaded(name: str, start: bytes) -> None:
    """See that a file that cannot be read, and begins so, is not what a download has left in its place.

    Raises:
        CheckpointCorruptedError: it is.
    """
    left = left_by_download(start)
    if left is not None:
        raise CheckpointCorruptedError(f"{name}: it is {left}")


def is_safetensors(start: bytes) -> bool:
    """Whether a file that begins so is one of safetensors."""
    return start[8:9] == b"{" and start[6:8] == b"\0\0"
