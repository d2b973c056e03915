"""The command line: looks inside checkpoints of any format, checks, compares, copies, removes and mends them.

What a command finds out is in a module of plain functions and dataclasses (``inspection``, ``comparison``, ...), of
which ``--json`` is made; the module that is called like the command declares its arguments and prints. Everything but
typer is imported inside the commands, so that ``--help`` comes at once.
"""
