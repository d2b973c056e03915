"""The only package that imports paddle: its tensors, its process groups, its store."""

from .groups import Ranks, connect
from .tensors import PaddleAdapter

__all__ = ["PaddleAdapter", "Ranks", "connect"]
