"""A script on several ranks, forked with the environment variables of Paddle's launcher, in a tenth of its time."""

from __future__ import annotations

from pathlib import Path

from test.ranks.forks import SOURCES, fork
from test.ranks.world import launch_environment, reserved_ports

__all__ = ["forked"]

_SECONDS = 100.0


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
