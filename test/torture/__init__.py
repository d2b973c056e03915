"""What is done to saves and loads to see whether they keep what they promise: ``python -m test.torture.run --help``."""
