"""Lets PaddleNLP 3.0.0b4 be imported beside Paddle 3.3.1: import this module before it.

It is older than Paddle 3.3.1, in which the modules of checkpoints have moved: they are given their old names. And to
import PaddleNLP imports all of it, with what its servers, tokenizers and exports need. What of that is not installed
is an empty module here, since training uses none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_UNUSED = ("blobfile", "colorama", "fastapi", "jieba", "onnx", "paddle2onnx", "paddlefsl", "seqeval", "uvicorn")
_OLD, _NEW = "paddle.distributed.checkpoint", "paddle.distributed.flex_checkpoint.dcp"


class _Unused(ModuleType):
    """Has whatever is asked of it, as an empty class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _UnusedModules:
    """Finds the modules of `_UNUSED`, after all others have found nothing."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Unused(spec.name)

    def exec_module(self, _: ModuleType) -> None:
        pass


sys.meta_path.append(_UnusedModules())
for _suffix in ("", ".load_state_dict", ".metadata", ".save_state_dict", ".utils"):
    sys.modules[_OLD + _suffix] = import_module(_NEW + _suffix)
_hub = import_module("aistudio_sdk.hub")
if not hasattr(_hub, "download"):  # which newer versions call otherwise
    _hub.download = None
