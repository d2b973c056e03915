"""Kills a training job at random moments, starts it again, and shows that nothing is different in the end.

    python examples/killed.py [--kills 5] [--seed 1]

A job of 4 ranks is run once in peace. Another is killed with SIGKILL, all ranks at once or one of them, at random
moments; it is started again each time, and must end with the same bits in every parameter and every moment. A third
goes on with 2 ranks in another layout after its last kill. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
STEPS = 40
SECONDS_ALLOWED = 300
MOST_SECONDS = 2.5  # from a job's first step to its end, about; kills come in this time

# Ranks that divide the work differently add up the same numbers in another order: see demo.py.
TOLERANCE = 1e-3


class Job:
    """Ranks that run train_and_resume.py over one folder of steps."""

    def __init__(self, scratch: Path, name: str, ranks: int, arguments: list[str]) -> None:
        self.events = scratch / f"{name}.jsonl"
        self._log = (scratch / f"{name}.log").open("ab")
        self._seen = len(self._lines())
        ports = free_ports(ranks + 1)
        self._processes = [
            self._start(rank, ports, [*arguments, "--events", str(self.events)]) for rank in range(ranks)
        ]

    def _start(self, rank: int, ports: list[int], arguments: list[str]) -> subprocess.Popen[bytes]:
        endpoints = [f"127.0.0.1:{port}" for port in ports[:-1]]
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env |= {
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(endpoints)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_MASTER": f"127.0.0.1:{ports[-1]}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(EXAMPLES / "train_and_resume.py"), *arguments]
        return subprocess.Popen(command, env=env, stdout=self._log, stderr=self._log)

    def _lines(self) -> list[str]:
        lines = self.events.read_text(encoding="utf-8").splitlines(keepends=True) if self.events.exists() else []
        return [line for line in lines if line.endswith("\n")]  # else it is still being written

    def reported(self) -> list[dict[str, Any]]:
        """What rank 0 has written since the job was started."""
        return [json.loads(line) for line in self._lines()[self._seen :]]

    def wait_for_step(self) -> None:
        """Wait until the first step is done, or the job has ended."""
        deadline = time.monotonic() + SECONDS_ALLOWED
        while self.alive() and not any(event["event"] == "step" for event in self.reported()):
            if time.monotonic() > deadline:
                raise TimeoutError("the job does not get on")
            time.sleep(0.02)

    def alive(self) -> bool:
        """Whether all ranks run."""
        return all(process.poll() is None for process in self._processes)

    def kill(self, ranks: list[int]) -> None:
        """Kill these ranks, and a moment later the others, as a launcher would."""
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGKILL)
        time.sleep(0.3 if len(ranks) < len(self._processes) else 0)
        for process in self._processes:
            process.kill()
            process.wait()

    def finish(self) -> dict[str, Any]:
        """Wait for the end; returns the last report."""
        for process in self._processes:
            if process.wait(SECONDS_ALLOWED) != 0:
                self.kill([])
                raise RuntimeError(f"a rank failed; see {self._log.name}:\n{_tail(Path(self._log.name))}")
        return self.reported()[-1]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


def run_killed(
    scratch: Path, name: str, kills: int, chance: random.Random, last: tuple[int, list[str]]
) -> dict[str, Any]:
    """Run a job of 4 ranks, kill it so many times, and let it end with other ranks; returns the last report."""
    root = ["--root", str(scratch / name), "--steps", str(STEPS)]
    for number in range(kills):
        job = Job(scratch, name, 4, [*root, *FOUR])
        job.wait_for_step()
        time.sleep(chance.uniform(0, MOST_SECONDS))
        victims = list(range(4)) if chance.random() < 0.5 else [chance.randrange(4)]
        job.kill(victims)
        events = job.reported()
        steps = [event["step"] for event in events if event["event"] in ("started", "step")]
        print(
            f"    kill {number + 1}: rank {', '.join(map(str, victims))} at step {steps[-1]}, from step {steps[0]}",
            flush=True,
        )
    ranks, arguments = last
    job = Job(scratch, name, ranks, [*root, *arguments])
    report = job.finish()
    started = next(event["step"] for event in job.reported() if event["event"] == "started")
    print(f"    and went on from step {started} to the end with {ranks} ranks", flush=True)
    return report


FOUR = ["--mesh", "2", "2", "--layout", "columns"]
TWO = ["--mesh", "1", "2", "--layout", "rows"]


def main() -> int:
    """Run the jobs, compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5, help="how often each job is killed")
    parser.add_argument("--seed", type=int, default=1, help="for the moments")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="paddle-dist-ckpt-killed-") as folder:
        scratch = Path(folder)
        print(f"  {STEPS} steps on 4 ranks in peace", flush=True)
        peace = Job(scratch, "peace", 4, ["--root", str(scratch / "peace"), "--steps", str(STEPS), *FOUR]).finish()
        print(f"  the same, killed {args.kills} times", flush=True)
        same = run_killed(scratch, "same", args.kills, chance, (4, FOUR))
        print(f"  the same, killed {args.kills} times, with 2 ranks in the end", flush=True)
        other = run_killed(scratch, "other", args.kills, chance, (2, TWO))
    equal = same["digests"] == peace["digests"] and same["drawn"] == peace["drawn"]
    verdict = "are equal bit for bit" if equal else "differ"
    print(f"  {'✔' if equal else '✘'} {len(peace['digests'])} tensors and values {verdict}")
    off = abs(other["evaluation"] - peace["evaluation"])
    close = off < TOLERANCE and other["drawn"] == peace["drawn"]
    print(f"  {'✔' if close else '✘'} with 2 ranks in the end, the loss on unseen text is {off:.1e} off")
    return 0 if equal and close else 1


if __name__ == "__main__":
    sys.exit(main())
