"""The only package that imports paddle: its tensors, its process groups, its store."""

from .groups import connect
from .tensors import PaddleAdapter

__all__ = ["PaddleAdapter", "connect"]
