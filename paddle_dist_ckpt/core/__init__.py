"""What every room uses: boxes, dtypes, memory, the table of shards, and the Protocols of what surrounds the library.

Depends on the standard library, numpy, ml_dtypes, msgspec and tqdm alone.
"""
