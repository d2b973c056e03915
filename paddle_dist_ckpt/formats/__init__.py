"""The native format: file names, data files. (The `.metadata` file's codec is in :mod:`..core.metadata`.)"""
