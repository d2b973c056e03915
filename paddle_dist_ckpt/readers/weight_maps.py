"""Indexes as Hugging Face has them, and PaddleNLP: JSON that says in which of several files each tensor is."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from ..errors import CheckpointCorruptedError
from ..storage.base import Storage
from ..tree.values import DECODE_ERRORS
from .budget import Budget
from .checks import check_name, shown
from .safetensors_header import member_count, spend_on_json
from .window import WindowedFile

__all__ = ["OF_INDEX", "check_lost", "lacking_text", "weight_map_of"]

OF_INDEX = ".index.json"
"""What an index's name has behind that of the single file in whose place the several are."""
_NOTES = {"quant_ckpt_resume_times", "ckpt_quant_stage", "optim_shard_num"}  # of PaddleNLP, where it has no index
_logger = logging.getLogger("paddle_dist_ckpt")


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_INDEX_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WEIGHT_MAP_DECODER = msgspec.json.Decoder(dict[str, str])


class _WeightMap(NamedTuple):
    """What an index says.

    Attributes:
        files: Which file each key is in.
        is_taken: Whether these are meant. Else it is the single file that lies beside the index.
    """

    files: dict[str, str]
    is_taken: bool


def weight_map_of(storage: Storage, names: Collection[str], index: str, budget: Budget) -> _WeightMap | None:
    """What an index says; None if it has no more than notes on an optimizer whose parts ranks have saved as they are.

    A single file beside it is meant if files that the index names are missing.

    A warning says what is taken where there are both.

    Raises:
        CheckpointCorruptedError: it is no index, or a file that it names is missing.
    """
    weight_map = _read(storage, index, budget)
    if weight_map is None:
        return None
    single, files, present = index.removesuffix(OF_INDEX), set(weight_map.values()), set(names)
    if single in present and single not in files:
        taken = index if files <= present else single
        _logger.warning(
            "%s holds %s and %s, which names other files; %s is taken", storage.location, single, index, taken
        )
        if taken == single:
            return _WeightMap(weight_map, False)
    for name in files:
        check_name(name, present, index)
    return _WeightMap(weight_map, True)


def lacking_text(file: str, key: str) -> str:
    """That a file has not what an index says is in it."""
    return f"{file} has no {shown(key)}, which an index says is in it"


def check_lost(lost: Mapping[str, str], weight_map: Mapping[str, str]) -> None:
    """Refuse files that have nothing of what an index says is in them: they may be any files.

    Args:
        lost: The keys that are not where the index says, with that file.
        weight_map: What it says.
    """
    right = {file for key, file in weight_map.items() if key not in lost}
    for key, file in lost.items():
        if file not in right:
            raise CheckpointCorruptedError(lacking_text(file, key))


def _read(storage: Storage, index: str, budget: Budget) -> dict[str, str] | None:
    with WindowedFile(storage, index, budget) as file:
        text = file.read_large(0, file.size)
        spend_on_json(file, text)
    try:
        outer = _INDEX_DECODER.decode(text)
        if "weight_map" not in outer and not _NOTES.isdisjoint(outer):
            return None
        weight_map = _WEIGHT_MAP_DECODER.decode(outer["weight_map"])
    except (*DECODE_ERRORS, KeyError) as error:
        raise CheckpointCorruptedError(f"{index}: no index, or a damaged one: {str(error)[:200]}") from error
    within = {name: member_count(record) for name, record in outer.items()}
    if member_count(text) != len(outer) + sum(within.values()) or within["weight_map"] != len(weight_map):
        raise CheckpointCorruptedError(f"{index} has a name twice")
    return weight_map
