"""Trains on 4 ranks, comes back on 2 ranks in another layout, and shows that nothing was lost.

    python examples/demo.py

Runs on a CPU in well under a minute and exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
STEPS = 40
SAVE_AFTER = 20
TABLE_EVERY = 4
PARTS = 4
SECONDS_ALLOWED = 600
SHOWN = 5

# float32 has about 7 digits, and ranks that divide the work differently add up the same numbers in another order.
# Over 20 steps such last-digit differences grow, but stay far below this; a lost moment or step count does not.
TOLERANCE = 1e-4

_COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}


@dataclass(slots=True)
class Run:
    """What one run of train_lm.py reported."""

    seconds: float = 0.0
    layout: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    evaluation: float = 0.0
    transfer_seconds: float = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one line of the file of events."""
        kind = event["event"]
        if kind == "layout":
            self.layout = dict(event)
        elif kind == "step":
            self.losses[event["step"]] = event["loss"]
        elif kind == "state":
            self.digests, self.evaluation = event["digests"], event["evaluation"]
        elif kind in ("saved", "loaded"):
            self.transfer_seconds = event["seconds"]


class Screen:
    """What the user sees: headed steps, marks, and colours on a terminal."""

    def __init__(self) -> None:
        self.failures = 0
        self._terminal = sys.stdout.isatty()
        self._started = 0

    def head(self, text: str) -> None:
        """Begin the next step of the demo."""
        self._started += 1
        print(f"\n{self.paint(f'[{self._started}/{PARTS}]', 'cyan')} {self.paint(text, 'bold')}", flush=True)

    def say(self, text: str) -> None:
        """Print a line of a step."""
        print(f"      {text}", flush=True)

    def check(self, passed: bool, text: str) -> None:
        """Print a mark and a line, and count what failed."""
        self.failures += not passed
        print(f"    {self.paint('✔', 'green') if passed else self.paint('✘', 'red')} {text}", flush=True)

    def progress(self, text: str) -> None:
        """Show ``text`` in place of the progress before, on a terminal; nothing clears it."""
        if self._terminal:
            print(f"\r\033[2K      {self.paint(text, 'dim')}" if text else "\r\033[2K", end="", flush=True)

    def paint(self, text: str, colour: str) -> str:
        """Colour ``text`` if that can be seen."""
        return f"\033[{_COLOURS[colour]}m{text}\033[0m" if self._terminal else text


def main() -> int:
    """Run the demo and return the exit code."""
    screen = Screen()
    started = time.monotonic()
    print(screen.paint("paddle_dist_ckpt", "bold") + ": save on one layout of ranks, load on another")
    with tempfile.TemporaryDirectory(prefix="paddle-dist-ckpt-demo-") as scratch:
        four = train_and_save(screen, Path(scratch))
        two = come_back(screen, Path(scratch), four)
        compare_losses(screen, four, two)
        merge(screen, Path(scratch), four)
    seconds = f"({time.monotonic() - started:.0f} s)"
    if screen.failures:
        print(f"\n{screen.paint(f'✘ {screen.failures} of the checks failed', 'red')} {seconds}")
        return 1
    print(f"\n{screen.paint('✔ everything that was saved came back, bit for bit', 'green')} {seconds}")
    return 0


def train_and_save(screen: Screen, scratch: Path) -> Run:
    """Part 1: train on 4 ranks and save on the way."""
    screen.head(f"Train a language model on 4 ranks (dp 2 × mp 2) to step {STEPS}, save after step {SAVE_AFTER}")
    run = launch(screen, scratch, 4, ["--mesh", "2", "2", "--layout", "columns", "--save-after", str(SAVE_AFTER)])
    files = sorted(path.name for path in (scratch / "checkpoint").iterdir())
    size = sum(path.stat().st_size for path in (scratch / "checkpoint").iterdir())
    trained = sorted(run.losses) == list(range(1, STEPS + 1))
    screen.check(trained, f"loss {run.losses[1]:.2f} at first, {run.losses[STEPS]:.2f} at last, in {run.seconds:.0f} s")
    screen.check(bool(files), f"saved {size / 1e6:.1f} MB in {run.transfer_seconds:.2f} s as {len(files)} files:")
    for name in files:
        screen.say(f"  {name}")
    return run


def come_back(screen: Screen, scratch: Path, four: Run) -> Run:
    """Part 2: load on 2 ranks in another layout, compare the state, and train on."""
    screen.head("Come back on 2 ranks (dp 1 × mp 2), with weights cut along the other dimension")
    run = launch(screen, scratch, 2, ["--mesh", "1", "2", "--layout", "rows", "--resume"])
    screen.say(f"{run.layout['name']} {run.layout['shape']}, on each rank:")
    for ranks, each in ((4, four), (2, run)):
        screen.say(f"  {ranks} ranks  {each.layout['local_shape']!s:<10} {', '.join(each.layout['placements'])}")
    compare_state(screen, four.digests, run.digests, f"loaded in {run.transfer_seconds:.2f} s")
    return run


def compare_state(screen: Screen, saved: Mapping[str, str], loaded: Mapping[str, str], what: str) -> None:
    """Compare the hashes of all tensors and the values of all else."""
    differing = sorted(key for key in saved.keys() | loaded.keys() if saved.get(key) != loaded.get(key))
    parameters = sum(key.startswith("model.") for key in saved)
    moments = sum(key.startswith("optimizer.") and not key.startswith("optimizer.LR_Scheduler") for key in saved)
    values = len(saved) - parameters - moments
    equal = f"{parameters} parameters and {moments} optimizer tensors bit-equal, {values} plain values equal"
    screen.check(
        bool(saved) and not differing, f"{what}: {equal if not differing else f'{len(differing)} entries differ'}"
    )
    for key in differing[:SHOWN]:
        screen.say(f"  {key}: {_short(saved.get(key))} saved, {_short(loaded.get(key))} loaded")


def compare_losses(screen: Screen, four: Run, two: Run) -> None:
    """Part 3: both runs trained the steps after the save; their losses should agree."""
    screen.head(f"Compare how training went on after step {SAVE_AFTER}")
    steps = range(SAVE_AFTER + 1, STEPS + 1)
    if not all(step in four.losses and step in two.losses for step in steps):
        screen.check(False, "a run lacks the losses of some steps")
        return
    screen.say(screen.paint(" step   loss on 4 ranks   loss on 2 ranks   difference", "dim"))
    for step in (SAVE_AFTER + 1, *range(SAVE_AFTER + TABLE_EVERY, STEPS + 1, TABLE_EVERY)):
        a, b = four.losses[step], two.losses[step]
        screen.say(f"{step:>5}{a:>18.6f}{b:>18.6f}{b - a:>+13.1e}")
    largest = max(abs(two.losses[step] / four.losses[step] - 1) for step in steps)
    screen.check(
        largest <= TOLERANCE,
        f"largest relative difference of {len(steps)} steps: {largest:.1e} (allowed: {TOLERANCE:.0e}, "
        "as other layouts add floats in another order)",
    )


def merge(screen: Screen, scratch: Path, four: Run) -> None:
    """Part 4: load the whole model in this one process."""
    screen.head("Load it merged, in one process without ranks")
    warnings.filterwarnings("ignore", message="No ccache found")
    logging.getLogger("paddle_dist_ckpt").setLevel(logging.WARNING)
    import paddle
    from language_model import LanguageModel, evaluation_batch, language_loss
    from train_lm import digests

    from paddle_dist_ckpt import load_merged_state_dict

    paddle.set_device("cpu")
    seconds = time.perf_counter()
    merged = load_merged_state_dict(scratch / "checkpoint")
    seconds = time.perf_counter() - seconds
    compare_state(screen, four.digests, digests(merged), f"loaded in {seconds:.2f} s")
    model = LanguageModel()
    model.set_state_dict(merged["model"])
    with paddle.no_grad():
        inputs, targets = (paddle.to_tensor(each) for each in evaluation_batch())
        loss = float(language_loss(model(inputs), targets))
    screen.check(
        abs(loss / four.evaluation - 1) <= TOLERANCE,
        f"loss on unseen text: {loss:.6f} here, {four.evaluation:.6f} on the 4 ranks that saved it",
    )


def launch(screen: Screen, scratch: Path, ranks: int, arguments: Iterable[str]) -> Run:
    """Run train_lm.py on ``ranks`` processes and return what it reported. Ends the demo if it fails."""
    logs, events = scratch / f"logs-{ranks}", scratch / f"events-{ranks}.jsonl"
    logs.mkdir()
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks)]
    command += ["--host", "127.0.0.1", "--log_dir", str(logs), str(EXAMPLES / "train_lm.py"), *arguments]
    command += ["--steps", str(STEPS), "--checkpoint", str(scratch / "checkpoint"), "--events", str(events)]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    with (
        (logs / "launcher.log").open("wb") as output,
        subprocess.Popen(command, env=env, stdout=output, stderr=output) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() - started < SECONDS_ALLOWED:
                time.sleep(0.2)
                screen.progress(_progress(read_run(events), time.monotonic() - started))
        finally:
            process.terminate()  # a launcher that was not told would leave its ranks behind
    screen.progress("")
    if process.returncode:
        _end_with_logs(screen, logs)
    run = read_run(events)
    run.seconds = time.monotonic() - started
    return run


def read_run(events: Path) -> Run:
    """Return what has been reported so far."""
    run = Run()
    if events.exists():
        for line in events.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else it is still being written
                run.take(json.loads(line))
    return run


def _progress(run: Run, seconds: float) -> str:
    if not run.losses:
        return f"starting {seconds:.0f} s"
    step = max(run.losses)
    return f"step {step}/{STEPS}, loss {run.losses[step]:.3f}"


def _short(value: str | None) -> str:
    return "nothing" if value is None else value[:12]


def _end_with_logs(screen: Screen, logs: Path) -> None:
    screen.check(False, "training failed; the ends of its logs:")
    for log in sorted(logs.glob("workerlog.*")):
        print(f"--- {log.name}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
