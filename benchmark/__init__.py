"""Measures this library against others: ``make bench``, or ``python -m benchmark.run --help``."""
