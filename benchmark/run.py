"""Measures saves and loads of several libraries on two ranks.

    python -m benchmark.run [--quick]

Prints a table, and writes it and all samples to benchmark/results/. Takes about 12 minutes, with --quick about 3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark import machine, pagecache
from benchmark.processes import BenchmarkError, Ranks, started
from benchmark.report import Results, as_json, as_markdown
from benchmark.schedule import JOBS, PEERS, PROBES, Job, Peer, Plan
from benchmark.states import LAYOUTS

HERE = Path(__file__).resolve().parent
_MEMORY_ROUNDS = 3
_SCRATCH_BYTES, _LARGE_BYTES = 6 * 10**9, 12 * 10**9  # with room for what is deleted but not yet gone


class Run:
    """One run of the benchmark.

    Args:
        plan: What is measured.
        peers: The peers' processes, by name.
        scratch: Folder for checkpoints.
        results: Where the samples go.
    """

    def __init__(self, plan: Plan, peers: dict[str, Ranks], scratch: Path, results: Results) -> None:
        self._plan, self._peers, self._scratch, self._results = plan, peers, scratch, results
        self._unchecked: set[tuple[str, str]] = set()
        self._saves = 0

    def measure(self, state: str) -> None:
        """Everything about one state."""
        for peer in self._plan.peers:
            say(f"state {state}: {peer.title} gets ready")
            self._peers[peer.name].do("build", state=state, layouts=LAYOUTS[state])
            self._peers[peer.name].do("save", path=str(self._checkpoint(peer)), memory=False)
        self._unchecked = {(peer.name, layout) for peer in self._plan.peers for layout in LAYOUTS[state]}
        for peer, job in self._plan.warm_up(state):
            say(f"state {state}: warm-up: {peer.title}: {job.works[0]}")
            self._do(peer, job)
        for i, jobs in enumerate(self._plan.in_rounds(state)):
            for peer, job in jobs:
                say(f"state {state}: round {i + 1} of {self._plan.rounds}: {peer.title}: {job.works[0]}")
                for work, answers in self._do(peer, job):
                    self._record(i, (state, work, peer.name), answers)
        if state == "A":
            self._measure_memory()
        for peer in self._plan.peers:
            self._peers[peer.name].do("drop")
            shutil.rmtree(self._checkpoint(peer))

    def _do(self, peer: Peer, job: Job) -> list[tuple[str, list[dict[str, Any]]]]:
        """Have a peer do a job; each rank's measurement, by work."""
        if job.renew:
            self._peers[peer.name].do("build", state=job.state, layouts=[job.layout or "same"])
        return [(work, self._call(peer, job)) for work in job.works]

    def _record(self, i: int, key: tuple[str, str, str], answers: list[dict[str, Any]]) -> None:
        """Keep the slower rank's measurement."""
        self._results.seconds.setdefault(key, {})[i] = max(answer["seconds"] for answer in answers)
        if all(answer["plan"] is not None for answer in answers):
            self._results.planning.setdefault(key, []).append(max(answer["plan"] for answer in answers))

    def _call(self, peer: Peer, job: Job, memory: bool = False) -> list[dict[str, Any]]:
        """Save to a new folder, or load from the page cache; each rank's measurement."""
        ranks = self._peers[peer.name]
        time.sleep(job.idle)
        if job.layout is None:
            self._saves += 1
            path = self._scratch / f"save-{self._saves}"
            answers = ranks.do("save", path=str(path), memory=memory)
            shutil.rmtree(path)
            os.sync()  # nobody pays for what another one left in the page cache
            return answers
        unchecked = (peer.name, job.layout) in self._unchecked
        if unchecked:
            ranks.do("zero", layout=job.layout)
        (pagecache.drop if job.cold else pagecache.read_in)(self._checkpoint(peer))
        answers = ranks.do("load", path=str(self._checkpoint(peer)), layout=job.layout, memory=memory)
        if unchecked:
            ranks.do("check", layout=job.layout)
            self._unchecked.remove((peer.name, job.layout))
        return answers

    def _measure_memory(self) -> None:
        for peer in self._plan.peers:
            if peer.name in PROBES:
                continue
            for job in (job for job in JOBS if job.state == "A" and not job.idle):
                say(f"memory: {peer.title}: {job.works[0]}")
                for _ in range(_MEMORY_ROUNDS):
                    answers = self._call(peer, job, memory=True)
                    worse = max(answers, key=lambda answer: answer["peak"])
                    self._results.memory.setdefault(("A", job.works[0], peer.name), []).append(worse)

    def check_memory_probe(self) -> None:
        """See whether memory is measured rightly, before anything else takes long."""
        self._peers["ours"].do("check_memory_probe")

    def measure_large(self) -> None:
        """The memory that this library needs for a state of 4 GB."""
        ranks = self._peers["ours"]
        ranks.do("build", state="C", layouts=["same"])
        path = self._scratch / "large"
        for work in ("save", "load, same layout"):
            for _ in range(2):  # the first time connects the ranks
                if work == "save":
                    shutil.rmtree(path, ignore_errors=True)
                    answers = ranks.do("save", path=str(path), memory=True)
                else:
                    answers = ranks.do("load", path=str(path), layout="same", memory=True)
            worse = max(answers, key=lambda answer: answer["peak"])
            self._results.memory.setdefault(("C", work, "ours"), []).append(worse)
        ranks.do("drop")
        shutil.rmtree(path)

    def _checkpoint(self, peer: Peer) -> Path:
        """The checkpoint that a peer loads from."""
        return self._scratch / f"{peer.name}-checkpoint"


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise BenchmarkError(f"{folder} has {free / 1e9:.1f} GB free, and {nbytes / 1e9:.0f} GB are needed")


def say(text: str) -> None:
    """Show what is going on, if somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[2K{text}", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> Results:
    """Run the benchmark.

    Raises:
        BenchmarkError: a peer failed.
    """
    peers = [peer for peer in PEERS if peer.name in args.peers]
    plan = Plan.of(peers, args.quick, args.seed, args.rounds)
    environments = {"paddle": Path(sys.executable), "torch": args.torch_python}
    pythons = {peer.name: environments[peer.environment] for peer in peers}
    for peer in peers:
        if not pythons[peer.name].exists():
            raise BenchmarkError(f"{peer.title}: there is no {pythons[peer.name]}; make bench makes it")
    args.out.mkdir(parents=True, exist_ok=True)
    large = "A" in args.states and not args.quick and "ours" in args.peers
    _check_space(args.scratch or args.out, _LARGE_BYTES if large else _SCRATCH_BYTES)
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # the ranks inherit it
    settings = {
        "cores": len(cores),
        "quick": args.quick,
        "rounds": plan.rounds,
        "seed": args.seed,
        "states": args.states,
    }
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=args.scratch or args.out) as folder:
        scratch = Path(folder)
        results = Results(machine.describe(scratch), {}, settings, peers)
        say("starting the ranks")
        with started(pythons, scratch) as all_ranks:
            results.versions = {k: v for ranks in all_ranks for k, v in ranks.do("versions")[0].items()}
            this_run = Run(plan, {ranks.peer: ranks for ranks in all_ranks}, scratch, results)
            if "ours" in args.peers:
                this_run.check_memory_probe()
            for state in args.states:
                this_run.measure(state)
            if large:
                say("memory for a state of 4 GB")
                this_run.measure_large()
    say("")
    return results


def main() -> int:
    """Run the benchmark and write its results; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure this library against others, two ranks each.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and without the slowest works")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--scratch", type=Path, help="existing folder for checkpoints, 12 GB; default: that of --out")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    parser.add_argument("--rounds", type=int, help="how often what is not slow is measured; default: 15, or 5")
    parser.add_argument("--cores", type=int, default=2, help="how many cores all processes may use together")
    parser.add_argument("--states", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--torch-python",
        type=Path,
        default=HERE / ".venv" / "bin" / "python",
        help="Python of an environment with torch and numpy",
    )
    args = parser.parse_args()
    try:
        results = run(args)
    except BenchmarkError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    report = as_markdown(results)
    (args.out / "benchmark.json").write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    (args.out / "benchmark.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
