"""The names of a checkpoint's files in its folder."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "DEFAULT_SUFFIX",
    "MOST_IDS",
    "ClaimName",
    "claim_name",
    "data_file_name",
    "is_ours",
    "metadata_id",
    "metadata_name",
    "parse_claim",
    "parse_data_file",
    "parse_temporary",
    "step_name",
    "step_of",
    "temporary_name",
]

MOST_IDS = 10**18
_ID = r"(0|[1-9][0-9]{0,17})"
_SAVE = r"([0-9a-f]{16})"
_METADATA = re.compile(rf"{_ID}\.metadata")
_DATA = re.compile(rf"{_ID}_{_ID}\.{_SAVE}\.{_ID}\.(?:safetensors|shards)")
_CLAIM = re.compile(rf"{_ID}\.{_SAVE}\.claim(?:\.tmp)?")
_TEMPORARY = re.compile(rf"{_ID}\.{_SAVE}\.metadata\.tmp")
_STEP = re.compile(r"step-([0-9]{8,18})")


class DataFileName(NamedTuple):
    """The parts of a data file's name."""

    rank: int
    unique_id: int
    save_id: str
    part: int


class ClaimName(NamedTuple):
    """The parts of a claim file's name."""

    unique_id: int
    save_id: str


def metadata_name(unique_id: int) -> str:
    """Name of the file whose presence is the commit."""
    return f"{unique_id}.metadata"


def metadata_id(name: str) -> int | None:
    """The id of a `.metadata` file, None for any other name."""
    match = _METADATA.fullmatch(name)
    return int(match[1]) if match else None


DEFAULT_SUFFIX = ".safetensors"


def data_file_name(rank: int, unique_id: int, save_id: str, part: int, suffix: str = DEFAULT_SUFFIX) -> str:
    """Name of a data file; ``suffix`` is that or ``.shards``."""
    return f"{rank}_{unique_id}.{save_id}.{part}{suffix}"


def parse_data_file(name: str) -> DataFileName | None:
    """The parts of a data file's name, None for any other name."""
    match = _DATA.fullmatch(name)
    return DataFileName(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None


def claim_name(unique_id: int, save_id: str) -> str:
    """Name of the file that says that a save is alive."""
    return f"{unique_id}.{save_id}.claim"


def parse_claim(name: str) -> ClaimName | None:
    """The parts of the name of a claim file, or of one that was being written; None for any other name."""
    match = _CLAIM.fullmatch(name)
    return ClaimName(int(match[1]), match[2]) if match else None


def temporary_name(unique_id: int, save_id: str) -> str:
    """Name that a `.metadata` file has until it is published."""
    return f"{unique_id}.{save_id}.metadata.tmp"


def parse_temporary(name: str) -> ClaimName | None:
    """The parts of such a name; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return ClaimName(int(match[1]), match[2]) if match else None


def step_name(step: int) -> str:
    """Name of the folder of a step, in a manager's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step_name(step) == name else None


def is_ours(name: str) -> bool:
    """Whether a file of this name is a part of a checkpoint of this format, or left over from making one."""
    return any(pattern.fullmatch(name) for pattern in (_METADATA, _DATA, _CLAIM, _TEMPORARY))
