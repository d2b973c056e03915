"""All public names, which the package imports from here when the first of them is used."""

# ruff: noqa: F403, I001  (a star where all names of a module are public; "as" gives on those of the others that are)
from __future__ import annotations

from .api import *
from .drop_in import *
from .errors import *
from .export_calls import export as export, export_state_dict as export_state_dict
from .files.metadata import (
    LocalTensorIndex as LocalTensorIndex,
    LocalTensorMetadata as LocalTensorMetadata,
    Metadata as Metadata,
    StorageInfo as StorageInfo,
)
from .gathering import *
from .manager import *
from .one_call import *
from .options import LoadOptions as LoadOptions, SaveOptions as SaveOptions
from .recipes import Recipe as Recipe, concat as concat, split as split, stack as stack, stored as stored
from .reports import (
    ExportReport as ExportReport,
    LoadReport as LoadReport,
    SaveReport as SaveReport,
    VerifyReport as VerifyReport,
)
from .saving.async_save import AsyncSave as AsyncSave
from .storage import LocalStorage as LocalStorage, Storage as Storage
from .tree.state_dict import PerRank as PerRank
