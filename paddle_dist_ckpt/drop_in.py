"""The library in the place of ``paddle.distributed``'s own checkpoint functions, for programs that call these."""

from __future__ import annotations

import dataclasses
import glob
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from .api import load_merged_state_dict
from .control.ranks import Ranks
from .options import LoadOptions, SaveOptions, checked
from .reports import LoadReport, SaveReport
from .saving.async_save import AsyncSave
from .wiring import connected, load_with, paddles, save_with

__all__ = ["install", "uninstall"]

_logger = logging.getLogger("paddle_dist_ckpt")

# Arguments of Paddle that change nothing here: their defaults, and why that is so.
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "safetensors": (False, "data files are safetensors files always"),
    "save_replicas": (False, "every byte is written once"),
    "mw_name_compatibility": (True, "names of optimizer variables are matched always"),
    "worker_groups": (None, "data are exchanged over the process group"),
    "comm_method": ("broadcast", "LoadOptions(exchange=...) says how data are exchanged"),
}


def install(
    unique_id_policy: Literal["paddle", "next"] = "paddle",
    *,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> AbstractContextManager[object]:
    """Put this library's functions in the place of ``paddle.distributed``'s, for programs that call those.

    ``paddle.distributed.save_state_dict``, ``load_state_dict`` and ``load_merged_state_dict`` are replaced, wherever
    one of ``paddle.distributed``'s modules has them. They take every argument that those of Paddle 2.6 to 3.3 take. To
    be called on every rank, before other modules import the functions by name, for these keep what they have.

    It lasts until :func:`uninstall`, or as a context manager until the end of the block. Who installs again puts
    another layer over the first one, with its own arguments; :func:`uninstall` takes off the one that was put on last,
    and a block its own. When the last one is gone, Paddle's functions are where they were. A function that somebody
    else has put over ours meanwhile stays, and our functions that somebody still has do what the former ones do.

    Args:
        unique_id_policy: What a save without a ``unique_id`` does. ``"paddle"`` replaces the newest checkpoint in the
            folder, atomically, as Paddle 3 takes the newest id again: a job that saves into one folder over and over
            needs room for two checkpoints, and fills no disk that it has not filled before. ``"next"`` takes the newest
            id + 1 and keeps all, as Paddle's documentation has it and Paddle 2.6 does.
        save_options: How to save.
        load_options: How to load.

    Returns:
        A context manager, which need not be used as one.

    Raises:
        TypeError, ValueError: an argument is not what it should be. Nothing was replaced.
    """
    if unique_id_policy not in ("paddle", "next"):
        raise ValueError(f"unique_id_policy must be 'paddle' or 'next', not {unique_id_policy!r}")
    save_options = checked("save_options", save_options, SaveOptions) or SaveOptions()
    load_options = checked("load_options", load_options, LoadOptions) or LoadOptions()
    from .paddle_adapter.patches import Replacement

    ours = _DropIn(unique_id_policy == "paddle", save_options, load_options)
    functions: list[Callable[..., Any]] = [ours.save_state_dict, ours.load_state_dict, ours.load_merged_state_dict]
    return Replacement({function.__name__: function for function in functions})


def uninstall() -> None:
    """Undo the last :func:`install` that is in force, so that the functions from before it are back.

    Without one that is in force, it does nothing.
    """
    from .paddle_adapter.patches import newest_replacement

    newest = newest_replacement()
    if newest is not None:
        newest.end()


@dataclass(frozen=True)
class _DropIn:
    """Functions that are called as Paddle's are.

    Attributes:
        replace_newest: Whether a save without a unique_id replaces the newest checkpoint.
        save_options: How to save.
        load_options: How to load.
    """

    replace_newest: bool
    save_options: SaveOptions
    load_options: LoadOptions

    def save_state_dict(
        self,
        state_dict: dict[Any, Any],
        path: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        unique_id: int | None = None,
        async_save: bool = False,
        safetensors: bool = False,
        save_replicas: bool = False,
    ) -> SaveReport | AsyncSave:
        """:func:`paddle_dist_ckpt.save_state_dict`, called as that of paddle.distributed is."""
        _log_without_effect("save_state_dict", safetensors=safetensors, save_replicas=save_replicas)
        options, replace = self.save_options, self.replace_newest
        ranks = _connect(process_group, coordinator_rank, options)
        find = paddles(ranks, state_dict)
        return save_with(ranks, find, path, unique_id, async_save, options, replace_newest=replace)

    def load_state_dict(
        self,
        state_dict: dict[Any, Any],
        path: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        unique_id: int | None = None,
        offload: bool = False,
        mw_name_compatibility: bool = True,
        aoa_config: Any = None,
        safetensors: bool = False,
        worker_groups: Any = None,
        comm_method: str = "broadcast",
    ) -> LoadReport:
        """:func:`paddle_dist_ckpt.load_state_dict`, called as that of paddle.distributed is."""
        _log_without_effect(
            "load_state_dict",
            mw_name_compatibility=mw_name_compatibility,
            safetensors=safetensors,
            worker_groups=worker_groups,
            comm_method=comm_method,
        )
        ranks = _connect(process_group, coordinator_rank, self.load_options)
        options = _with_aoa(ranks, self.load_options, aoa_config)
        find = paddles(ranks, state_dict, options.staging_bytes)
        return load_with(ranks, find, path, unique_id, options, offload)

    def load_merged_state_dict(
        self,
        path: Any,
        prefix: str | None = None,
        unique_id: int | None = None,
        offload: bool = False,
        aoa_config: Any = None,
        safetensors: bool = False,
    ) -> dict[Any, Any]:
        """:func:`paddle_dist_ckpt.load_merged_state_dict`, called as that of paddle.distributed is: with flat keys."""
        _log_without_effect("load_merged_state_dict", safetensors=safetensors)
        options = self.load_options
        if aoa_config is not None:
            options = dataclasses.replace(options, aoa_config=aoa_config)
        keys = f"{glob.escape(prefix)}.*" if prefix else None  # parts of a key count too, not only those of a path
        loaded = load_merged_state_dict(path, None, unique_id, offload, keys=keys, flat=True, options=options)
        return {key.removeprefix(f"{prefix}."): value for key, value in loaded.items()} if prefix else loaded


def _connect(process_group: Any, coordinator_rank: int, options: SaveOptions | LoadOptions) -> Ranks:
    from .paddle_adapter.patches import initialise

    if not options.no_dist:
        initialise(process_group)
    return connected(process_group, coordinator_rank, options)


def _log_without_effect(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        default, reason = _WITHOUT_EFFECT[name]
        if value != default:
            _logger.debug("%s: %s=%r changes nothing here: %s", function, name, value, reason)


def _with_aoa(ranks: Ranks, options: LoadOptions, aoa_config: Any) -> LoadOptions:
    if aoa_config is None:
        return options
    try:
        return dataclasses.replace(options, aoa_config=aoa_config)
    except TypeError:
        with ranks.hub.session("load_state_dict", options.timeout):  # so that the other ranks hear of it
            raise
