"""Names and bytes: where a checkpoint's files live."""

from .base import ReadableFile, Storage, WritableFile
from .bounding import Folders, bounded, bounded_folders
from .local import LocalStorage, as_source, as_storage
from .paths import local_path

__all__ = [
    "Folders",
    "LocalStorage",
    "ReadableFile",
    "Storage",
    "WritableFile",
    "as_source",
    "as_storage",
    "bounded",
    "bounded_folders",
    "local_path",
]
