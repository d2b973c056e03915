"""Tensors that cannot be saved or loaded, and what to do instead."""

from __future__ import annotations

import re
from typing import Any

from ..errors import UnsupportedValueError
from ..tree.paths import plain_key
from .static_program import OFFLOADED, SLICE

__all__ = ["check_name", "check_offloaded", "check_plain", "check_slice", "is_offloaded", "no_memory"]

_OF_OFFLOADED = re.compile(rf"{OFFLOADED}(_[a-z]|$)")  # not of a layer: those of an OffloadBuffer go on with its number


def no_memory(path: str, tensor: Any) -> UnsupportedValueError:
    """The error of a tensor without memory."""
    why = (
        "it was never initialized, or belongs to a layer of which a static-graph program was made (then use the "
        "DistModel)"
    )
    if hasattr(tensor, "fw_storage"):
        why = (
            "group sharding's stage 3 has cut it; call get_all_parameters() of the model that it wraps, on all ranks, "
            "with_freeze_param=True if some are frozen"
        )
    elif hasattr(tensor, "_fusion_buffer"):
        why = (
            "fully_shard() has joined it with others, and nothing says where it is; pass it "
            "enable_tensor_fusion_and_overlap=False"
        )
    return UnsupportedValueError(f"{plain_key(path)}: the tensor has no memory; {why}")


def check_name(name: str, path: str) -> None:
    """Refuse keys that are numbers of the run. So shard_optimizer of Paddle 2.6 names what it distributes."""
    if name.startswith("generated_tensor_") and path.endswith(f"/{name}"):
        raise UnsupportedValueError(
            f"{plain_key(path)}: by this number Paddle 2.6 may call another tensor in another run; save and load the "
            "optimizer itself instead of its state_dict()"
        )


def check_slice(name: str | None, path: str) -> None:
    """Refuse what ranks have under one name, each its own part of something."""
    is_called_so = path.rpartition("/")[2].startswith(SLICE)
    if is_called_so or (name and (name.startswith(SLICE) or _OF_OFFLOADED.match(name))):
        raise UnsupportedValueError(
            f"{plain_key(path)}: this is a rank's slice of parameters that sharding has joined or cut"
            f"{'' if is_called_so else f' ({name})'}; ranks have different ones under one such name, and "
            "nothing says of what. Train without enable_tensor_fusion, group sharding's stage 3, or offload=True in "
            "stage 2, or leave it out"
        )


def check_plain(value: Any, path: str) -> None:
    """Refuse plain tensors that cannot be saved or loaded."""
    if not value.is_dense():
        raise UnsupportedValueError(
            f"{plain_key(path)}: sparse tensors cannot be saved or loaded; use to_dense() first"
        )
    if getattr(value, "is_distributed", False):
        raise UnsupportedValueError(
            f"{plain_key(path)}: a plain tensor that is marked is_distributed is one rank's part of a larger one, and "
            "says not which. Use the layer's sharded_state_dict(), which says it, or a DistTensor"
        )
    check_offloaded(value, path)


def is_offloaded(value: Any) -> bool:
    """Whether group sharding's stage 3, which marks what it cuts and what it leaves, has a weight beside a parameter;
    one of the same name may be a user's own."""
    marked = hasattr(value, "fw_storage") or hasattr(value, "unslice")
    return marked and getattr(value, "master_weight", None) is not None


def check_offloaded(value: Any, path: str) -> None:
    """Refuse parameters that steps set to what is kept beside them, and is in no state."""
    if is_offloaded(value):
        raise UnsupportedValueError(
            f"{plain_key(path)}: group sharding's stage 3 with offload=True steps weights that it keeps beside the "
            "parameters, and no state has these: the next step would undo a load. Train without offload=True; to save "
            "the parameters alone, pass copies of them"
        )
