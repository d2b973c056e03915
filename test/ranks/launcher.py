"""A script on several ranks: as Paddle's launcher starts it for a user, or forked, in a tenth of the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test.ranks.forks import SOURCES, fork
from test.ranks.world import launch_environment, reserved_ports

__all__ = ["forked", "launched"]

_REPOSITORY = Path(__file__).parents[2]
_SECONDS = 100.0


def launched(folder: Path, script: str, ranks: int = 2) -> None:
    """Run a script in a folder, on ranks of this host; fail if it does, with the ends of the ranks' logs."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "--host", "127.0.0.1"]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*command, "--log_dir", "logs", "script.py"],
        env={**env, "PYTHONPATH": str(_REPOSITORY)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("logs/workerlog.*")))
    assert done.returncode == 0, done.stdout[-1000:] + logs


def forked(
    folder: Path, script: str, *arguments: object, ranks: int = 2, timeout: float = _SECONDS
) -> list[tuple[int, str]]:
    """Run a script on ranks with a launcher's environment variables; the exit code and the output of each."""
    program = folder / "script.py"
    program.write_text(script, encoding="utf-8")
    words = [str(program), *map(str, arguments)]
    reserved = reserved_ports(ranks + 1)
    ports = [each.getsockname()[1] for each in reserved]
    logs = [folder / f"script-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            processes.append(fork(rank % SOURCES, [], output.fileno(), words, launch_environment(rank, ports)))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
        for port in reserved:
            port.close()
    return [(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]
