"""Checkpoints that released versions of the format and other libraries wrote, kept to show that they can be read."""
