"""Recognises files that are whole, but of formats that are not read, so that messages can say what they are."""

from __future__ import annotations

__all__ = ["LOOK", "is_safetensors", "what_it_is"]

LOOK = 64  # bytes of a file's beginning that tell
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


def is_safetensors(start: bytes) -> bool:
    """Whether a file that begins so is one of safetensors."""
    return start[8:9] == b"{" and start[6:8] == b"\0\0"
