"""All public names, which the package imports from here when the first of them is used."""

# ruff: noqa: I001  (a line for each name, which "as" gives on, would say no more)
from __future__ import annotations

from .api import (
    load_merged_state_dict as load_merged_state_dict,
    load_state_dict as load_state_dict,
    save_state_dict as save_state_dict,
)
from .drop_in import install as install, uninstall as uninstall
from .errors import (
    CheckpointCorruptedError as CheckpointCorruptedError,
    CheckpointError as CheckpointError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CheckpointReplacedError as CheckpointReplacedError,
    CheckpointTimeoutError as CheckpointTimeoutError,
    CollectiveError as CollectiveError,
    DurabilityUnknownError as DurabilityUnknownError,
    RankFailureError as RankFailureError,
    StateDictMismatchError as StateDictMismatchError,
    UnsupportedValueError as UnsupportedValueError,
)
from .export_calls import export as export, export_state_dict as export_state_dict
from .files.metadata import (
    LocalTensorIndex as LocalTensorIndex,
    LocalTensorMetadata as LocalTensorMetadata,
    Metadata as Metadata,
    StorageInfo as StorageInfo,
)
from .folder_calls import (
    copy_checkpoint as copy_checkpoint,
    delete_checkpoint as delete_checkpoint,
    list_checkpoints as list_checkpoints,
    read_metadata as read_metadata,
    rebuild_metadata as rebuild_metadata,
    verify as verify,
)
from .gathering import gather_state_dict as gather_state_dict, scatter_state_dict as scatter_state_dict
from .manager import CheckpointManager as CheckpointManager
from .one_call import (
    load as load,
    model_state_dict as model_state_dict,
    optimizer_state_dict as optimizer_state_dict,
    rng_state as rng_state,
    save as save,
    set_rng_state as set_rng_state,
)
from .options import LoadOptions as LoadOptions, SaveOptions as SaveOptions
from .recipe_calls import concat as concat, split as split, stack as stack, stored as stored
from .recipes import Recipe as Recipe
from .reports import (
    ExportReport as ExportReport,
    LoadReport as LoadReport,
    SaveReport as SaveReport,
    VerifyReport as VerifyReport,
)
from .saving.async_save import AsyncSave as AsyncSave
from .storage import LocalStorage as LocalStorage, Storage as Storage
from .tree.state_dict import PerRank as PerRank
