"""The command line of every benchmark: settings in, a table and files with all samples out."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark import machine
from benchmark.peers import PEERS, PROBES, Peer
from benchmark.ranks import BenchmarkError
from benchmark.rates import measure_rates
from benchmark.report import with_machine
from benchmark.session import NothingToMeasureError, Session, say
from benchmark.states import LAYOUTS

__all__ = ["BENCHMARKS", "RESULTS", "Benchmark", "main"]

_SMOKE_RATE_BYTES = 4 << 20
_HERE = Path(__file__).resolve().parent
RESULTS = _HERE / "results"
"""Where results go, unless told otherwise."""
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark.

    Attributes:
        description: What it does, in a sentence.
        files: How the files are called that it writes, if not as its module.
        rounds: How often it measures, in full and in quick runs; None if that cannot be chosen.
        peers: Who can take part.
        states: Which states, or curves, can be measured; none if that cannot be chosen.
        scratch_gb: How large the checkpoints get; 0 if that is nothing to speak of.
    """

    description: str
    files: str | None = None
    rounds: tuple[int, int] | None = None
    peers: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    scratch_gb: int = 0


_IN_BACKGROUND = ("ours_async", "torch_dcp_async", "torch_dcp_async_cached", "torch_dcp_async_process")
BENCHMARKS = {
    "run": Benchmark(
        "Measure this library against others, two ranks each.",
        files="benchmark",
        rounds=(15, 5),
        peers=("ours", "paddle_builtin", "torch_dcp", *PROBES),
        states=tuple(LAYOUTS),
        scratch_gb=6,
    ),
    "scale": Benchmark("Measure planning at scale."),
    "curves": Benchmark(
        "Measure how time and memory grow.",
        rounds=(3, 1),
        peers=("ours",),
        states=("tensors", "bytes", "ranks", "simulated ranks"),
        scratch_gb=4,
    ),
    "bytes_read": Benchmark("Count the bytes that are read for slices of a tensor."),
    "exchange": Benchmark(
        "Measure a load in which ranks read for each other.", rounds=(15, 7), peers=("ours_exchange",), scratch_gb=1
    ),
    "replicas": Benchmark(
        "Measure comparing copies when they are saved.", rounds=(15, 7), peers=("ours_replicas",), scratch_gb=1
    ),
    "export": Benchmark("Measure exports against a plain copy.", rounds=(9, 3), scratch_gb=3),
    "foreign": Benchmark(
        "Measure loads of checkpoints that are in other formats.",
        rounds=(15, 5),
        peers=("ours_formats",),
        scratch_gb=3,
    ),
    "async_save": Benchmark(
        "Measure saves that go on while two ranks train.", rounds=(20, 5), peers=_IN_BACKGROUND, scratch_gb=2
    ),
    "device": Benchmark(
        "Measure saves from and loads to a device.", rounds=(7, 3), peers=("ours_device",), scratch_gb=2
    ),
}
"""All of them, by their modules."""


def main(
    name: str,
    measure: Callable[[Session], Found],
    report_of: Callable[[Mapping[str, Any]], str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure, write and print.

    Args:
        name: Which of :data:`BENCHMARKS`.
        measure: Measures all, ``goals`` among it.
        report_of: Makes the report of that and of what is added here.
        arguments: Those of the command line, if not this process's own.

    Returns:
        The exit code.
    """
    benchmark = BENCHMARKS[name]
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parser(name, benchmark).parse_args(arguments)
    with ExitStack() as stack:
        if args.out is None:
            args.out = Path(stack.enter_context(tempfile.TemporaryDirectory())) if args.smoke else RESULTS
        args.out.mkdir(parents=True, exist_ok=True)
        home = getattr(args, "scratch", None) or args.out
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-", dir=home)))
        about = machine.describe(scratch)
        about["rates"] = measure_rates(scratch, _SMOKE_RATE_BYTES) if args.smoke else measure_rates(scratch)
        session = _session(benchmark, args, scratch)
        settings: Found = {"quick": args.quick, "smoke": args.smoke}
        if benchmark.rounds is not None:
            cores = sorted(os.sched_getaffinity(0))[: args.cores]
            os.sched_setaffinity(0, cores)  # the ranks inherit it
            settings |= {"cores": len(cores), "rounds": session.rounds, "seed": session.seed}
        if benchmark.states:
            settings["states"] = session.states
        try:
            session.require_space(benchmark.scratch_gb)
            found = measure(session)
        except NothingToMeasureError as reason:
            print(f"Nothing was measured: {reason}.", file=sys.stderr)
            return 0
        except BenchmarkError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        say("")
        command = shlex.join(["python", "-m", f"benchmark.{name}", *arguments])
        load = round(os.getloadavg()[0], 2)
        found = {
            "machine": about,
            "load_after": load,
            "command": command,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "settings": settings,
            **found,
        }
        if args.smoke:
            found["goals"] = [{**goal, "met": None} for goal in found["goals"]]
        report, files = with_machine(report_of(found), found), benchmark.files or name
        (args.out / f"{files}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (args.out / f"{files}.md").write_text(report, encoding="utf-8")
    print(report)
    return 0


def _session(benchmark: Benchmark, args: argparse.Namespace, scratch: Path) -> Session:
    if benchmark.rounds is None:
        return Session(scratch, quick=args.quick, smoke=args.smoke)
    full, quick = benchmark.rounds
    rounds = args.rounds or (1 if args.smoke else quick if args.quick else full)
    chosen = getattr(args, "peers", benchmark.peers)
    pythons = [(peer, _python(peer, args)) for name, peer in PEERS.items() if name in chosen]
    if args.smoke:
        pythons = [(peer, python) for peer, python in pythons if python.exists() and _can_run(peer, scratch)]
    return Session(scratch, pythons, rounds, args.seed, args.quick, args.smoke, getattr(args, "states", ()))


def _python(peer: Peer, args: argparse.Namespace) -> Path:
    return args.torch_python if peer.environment == "torch" else Path(sys.executable)


def _can_run(peer: Peer, scratch: Path) -> bool:
    """Whether a smoke test with a peer can end well: not every kernel has O_DIRECT on every file system."""
    return peer.name != "probe_direct" or machine.filesystem(scratch) != "tmpfs"


def _parser(name: str, benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmark.{name}",
        description=benchmark.description,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer rounds, and without the slowest works")
    add("--smoke", action="store_true", help="see that all works, with tiny states and one round")
    add("--out", type=Path, help="folder for the results; default: benchmark/results, with --smoke none")
    if benchmark.rounds is not None:
        full, quick = benchmark.rounds
        add("--rounds", type=int, help=f"how often what is not slow is measured; default: {full}, with --quick {quick}")
        add("--seed", type=int, default=0, help="of the order within the rounds; default: 0")
        add("--cores", type=int, default=2, help="how many cores all processes may use together; default: 2")
        size = f"existing folder for checkpoints, {benchmark.scratch_gb} GB; default: that of --out"
        add("--scratch", type=Path, help=size)
    if benchmark.states:
        add("--states", nargs="+", choices=benchmark.states, default=list(benchmark.states), help="only these")
    if len(benchmark.peers) > 1:
        add("--peers", nargs="+", choices=benchmark.peers, default=list(benchmark.peers))
        default = _HERE / ".venv" / "bin" / "python"
        add("--torch-python", type=Path, default=default, help="Python of an environment with torch and numpy")
    return parser
