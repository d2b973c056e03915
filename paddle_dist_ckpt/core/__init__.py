"""Vocabulary of the library: boxes, dtypes, paths, values, metadata, and the Protocols of what surrounds it.

Depends on the standard library, numpy and msgspec alone.
"""
