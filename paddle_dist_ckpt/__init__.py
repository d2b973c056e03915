"""Distributed checkpoints for PaddlePaddle: save on one layout, load on any other.

The public names are in :mod:`.api`, :mod:`.one_call`, :mod:`.export_calls`, :mod:`.drop_in`, :mod:`.manager`,
:mod:`.options`, :mod:`.reports`, :mod:`.errors`, :mod:`.storage`, :mod:`.files.metadata`, :mod:`.saving.async_save` and
:mod:`.tree.state_dict`.
Importing the package does not import paddle.
"""

from .api import (
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    read_metadata,
    rebuild_metadata,
    rng_state,
    save_state_dict,
    set_rng_state,
    verify,
)
from .drop_in import install, uninstall
from .errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    RankFailureError,
    StateDictMismatchError,
    UnsupportedValueError,
)
from .export_calls import export, export_state_dict
from .files.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata, StorageInfo
from .manager import CheckpointManager
from .one_call import load, save
from .options import LoadOptions, SaveOptions
from .reports import ExportReport, LoadReport, SaveReport, VerifyReport
from .saving.async_save import AsyncSave
from .storage import LocalStorage, Storage
from .tree.state_dict import PerRank
from .version import __version__

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
