"""Exports, without Paddle where it is not needed."""
