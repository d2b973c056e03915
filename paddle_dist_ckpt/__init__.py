"""Distributed checkpoints for PaddlePaddle: save on one layout, load on any other.

The public names are in :mod:`.api`, :mod:`.one_call`, :mod:`.export_calls`, :mod:`.drop_in`, :mod:`.manager`,
:mod:`.options`, :mod:`.reports`, :mod:`.errors`, :mod:`.storage`, :mod:`.files.metadata`, :mod:`.saving.async_save` and
:mod:`.tree.state_dict`.
Importing the package does not import paddle. What the public names stand for is imported when the first of them is
used, so that the command line need not wait for all of it.
"""

# ruff: noqa: F405  (the names that come with the star are all in __all__)
from __future__ import annotations

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
    "CheckpointTimeoutError",
    "ExportReport",
    "LoadOptions",
    "LoadReport",
    "LocalStorage",
    "LocalTensorIndex",
    "LocalTensorMetadata",
    "Metadata",
    "PerRank",
    "RankFailureError",
    "SaveOptions",
    "SaveReport",
    "StateDictMismatchError",
    "Storage",
    "StorageInfo",
    "UnsupportedValueError",
    "VerifyReport",
    "__version__",
    "copy_checkpoint",
    "delete_checkpoint",
    "export",
    "export_state_dict",
    "install",
    "list_checkpoints",
    "load",
    "load_merged_state_dict",
    "load_state_dict",
    "read_metadata",
    "rebuild_metadata",
    "rng_state",
    "save",
    "save_state_dict",
    "set_rng_state",
    "uninstall",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import all public names when one of them is used that is not there yet."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    globals().update({each: getattr(public, each) for each in __all__ if each not in globals()})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
