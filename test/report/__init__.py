"""The page of a checkpoint."""
