"""Running the command line in this process, and checkpoints to run it on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from paddle_dist_ckpt.cli.main import app
from test.jobs import save_on, split_all

__all__ = ["answer", "fails", "run", "save_model"]


def run(*args: Any, code: int = 0, typed: str | None = None) -> str:
    """What a command prints on stdout; the exit code must be as given."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=typed)
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def answer(*args: Any, code: int = 0) -> Any:
    """What a command prints with ``--json``."""
    return json.loads(run(*args, "--json", code=code))


def fails(*args: Any, code: int = 2) -> str:
    """What a command that fails prints on stderr; nothing must be on stdout."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def save_model(folder: Path, arrays: Mapping[str, np.ndarray], unique_id: int | None = None, **values: Any) -> None:
    """Save arrays, below ``model``, and values, by two ranks; what has rows is cut."""
    save_on([{"model": model, **values} for model in split_all(arrays)], folder, unique_id)
