"""Distributed checkpoints for PaddlePaddle: save on one layout, load on any other.

The public names are in :mod:`.api`, :mod:`.one_call`, :mod:`.export_calls`, :mod:`.folder_calls`, :mod:`.recipe_calls`,
:mod:`.gathering`, :mod:`.drop_in`, :mod:`.manager`, :mod:`.options`, :mod:`.recipes`, :mod:`.reports`, :mod:`.errors`,
:mod:`.storage`, :mod:`.files.metadata`, :mod:`.saving.async_save` and :mod:`.tree.state_dict`.
Importing the package does not import paddle. What the public names stand for is imported when the first of them is
used, so that the command line need not wait for all of it.
"""

# ruff: noqa: F405  (the names that come with the star are all in __all__)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .public import *  # noqa: F403

__all__ = [
    "AsyncSave",
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CheckpointTimeoutError",
    "CollectiveError",
    "DurabilityUnknownError",
    "ExportReport",
    "LoadOptions",
    "LoadReport",
    "LocalStorage",
    "LocalTensorIndex",
    "LocalTensorMetadata",
    "Metadata",
    "PerRank",
    "RankFailureError",
    "Recipe",
    "SaveOptions",
    "SaveReport",
    "StateDictMismatchError",
    "Storage",
    "StorageInfo",
    "UnsupportedValueError",
    "VerifyReport",
    "__version__",
    "concat",
    "copy_checkpoint",
    "delete_checkpoint",
    "export",
    "export_state_dict",
    "gather_state_dict",
    "install",
    "list_checkpoints",
    "load",
    "load_merged_state_dict",
    "load_state_dict",
    "model_state_dict",
    "optimizer_state_dict",
    "read_metadata",
    "rebuild_metadata",
    "rng_state",
    "save",
    "save_state_dict",
    "scatter_state_dict",
    "set_rng_state",
    "split",
    "stack",
    "stored",
    "uninstall",
    "verify",
]

if not TYPE_CHECKING:  # or else a type checker would believe that there is any name

    def __getattr__(name: str) -> Any:
        """Import all public names, and so the modules they are in, when the first of them is used."""
        if not name.startswith("_"):
            public = importlib.import_module("paddle_dist_ckpt.public")
            globals().update({each: getattr(public, each) for each in __all__ if each not in globals()})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
