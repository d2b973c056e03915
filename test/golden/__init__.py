"""Checkpoints that released versions of the format wrote, kept to show that later versions still read them."""
