"""The native format, all of it: names of files, `.metadata`, data files; how these are written and read."""
