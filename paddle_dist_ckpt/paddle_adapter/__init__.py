"""The only package that imports paddle: its tensors, its process groups, its store."""

try:
    import paddle  # noqa: F401  (so that whoever has none is told what it is called)
except ModuleNotFoundError as error:
    if error.name != "paddle":
        raise
    raise ModuleNotFoundError(
        "PaddlePaddle is not installed, whose tensors this is about: see its pages on how to install paddlepaddle or "
        "paddlepaddle-gpu. The command line, verify, export and whatever else needs no tensors do without",
        name="paddle",
    ) from None

from .groups import connect
from .tensors import PaddleAdapter

__all__ = ["PaddleAdapter", "connect"]
