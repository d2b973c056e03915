"""Training steps: when to save, where, which steps to keep, which one to start from."""

from .manager import CheckpointManager

__all__ = ["CheckpointManager"]
