"""Words in what a load says, above all of mismatches: those from which something else follows, such as advice.

Each has a name here, so that whoever rewords one changes nothing but the text.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "A_TENSOR",
    "DICTS",
    "FOUND_BY_SOME",
    "LEFT",
    "LEFT_BY_AOA",
    "LEFT_EMPTY",
    "MEANT",
    "MISSING",
    "NEEDED",
    "NOT_STORED",
    "NOT_TAKEN",
    "NO_ENTRY",
    "OF_ALL_RANKS",
    "OF_TENSORS",
    "OVERLAPS_ITSELF",
    "SET",
    "TRANSPOSE",
    "some_of",
    "value_text",
]

A_TENSOR, OF_TENSORS, MISSING = "a tensor of shape", "a container of tensors", "missing"
"""What is stored at a path."""
OF_ALL_RANKS = "what every rank has saved of its own"
"""The same of a PerRank."""
LEFT, SET = "left as it is", "set to its parameter"
"""What became of a tensor of which nothing is loaded; the second of a master weight."""
LEFT_BY_AOA = f"{LEFT}, as aoa_config says"
"""Why a tensor is skipped that the caller wants to be."""
LEFT_EMPTY = f"{LEFT}, for the checkpoint has an empty state for it"
"""Why an object is left that takes no empty state."""
NOT_STORED = f"{LEFT}, for the checkpoint does not have it"
"""Why a tensor or value is skipped that may be missing."""
NOT_TAKEN = "adds it to its state_dict(), and its set_state_dict() does not take it"
"""Why what is stored is skipped."""
FOUND_BY_SOME = f"{LEFT}, for other ranks do not find it in the checkpoint, by what their state_dicts have"
"""Why a rank's part of a tensor is left."""
MEANT = "meant?"
"""Behind a key that a user may have meant."""
DICTS = ("dict", "empty", "nothing")
"""What :class:`.messages.WantedPaths` calls dicts that stand for values."""
NEEDED = "without which it takes no state"
"""Why an object is left as it is, or a load refused, that has entries of which one is not stored."""
NO_ENTRY = "no such entry in its object"
"""What a state_dict has where an object has nothing yet."""
OVERLAPS_ITSELF = "elements of the target share memory with each other"
"""Why a tensor cannot be filled, whatever is stored."""
TRANSPOSE = ", its transpose"
"""How a mismatch of shapes ends where each is the other one backwards."""


def some_of(texts: Iterable[str], most: int = 5, between: str = "; ") -> str:
    """The first few of several texts as one."""
    texts = list(texts)
    return between.join(texts[:most]) + f"{between}..." * (len(texts) > most)


def value_text(is_dict: bool) -> str:
    """What a stored value is, if a value of the other kind is wanted."""
    return "a dict" if is_dict else "a value that is no dict"
