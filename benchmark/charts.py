"""Draws what was measured: PNG files from benchmark.json, scale.json and curves.json.

    benchmark/.venv/bin/python -m benchmark.charts [--results DIR] [--smoke]

Needs matplotlib, and so runs in the peers' environment. A file that is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmark.command import BENCHMARKS, RESULTS
from benchmark.peers import peers_named
from benchmark.report import by_work, paired_ratio
from benchmark.schedule import JOBS

__all__ = ["draw"]

_OURS = "ours"
_TITLES = {peer.name: peer.title for peer in peers_named(*BENCHMARKS["run"].peers)}
_COLOURS = dict(zip(_TITLES, ("#0b6e4f", "#3c6fb4", "#d1603d", "#c9c9c9", "#a3a3a3", "#7d7d7d"), strict=True))
_STATES = {"A": "State A: 0.68 GB in 30 tensors", "B": "State B: 5 MB in 20,000 tensors"}
_BAR = 0.8  # of the distance from one bar to the next
_ROOM = 0.9  # bars' distance between two groups
_WRAP = 26  # letters a line
_INCH_A_BAR = 0.23
_LEAST_MIB = 1.0  # what is below it is noise
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150}

_CURVES: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("coordinator's plan of a first save", "seconds", lambda row: row["seconds"]),
    ("a loading rank is given its part", "seconds", lambda row: row["load"]["give_seconds"]),
    ("that rank's plan", "seconds", lambda row: row["load"]["plan_seconds"]),
    ("memory of the coordinator's plan", "MB", lambda row: row["peak_bytes"] / 1e6),
    ("messages into the coordinator", "MB", lambda row: row["bytes_in"] / 1e6),
    ("messages out of it", "MB", lambda row: row["bytes_out"] / 1e6),
    (".metadata", "MB", lambda row: row["load"]["metadata_bytes"] / 1e6),
)

Samples = Mapping[tuple[str, str, str], Any]
Bar = tuple[str, float, float, float, str]
"""Whose it is, its length, the ends of the interval (equal if there is none), and what is written behind it."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw all charts for which there are results into a folder; returns the files that were written."""
    written = []
    with mpl.rc_context(_STYLE):
        if (results / "benchmark.json").exists():
            found = json.loads((results / "benchmark.json").read_text(encoding="utf-8"))
            seconds = by_work(found["seconds"])
            for state in dict.fromkeys(state for state, _, _ in seconds):
                written.append(_save(_ratios(seconds, state), out / f"ratios-{state}.png"))
                written.append(_save(_times(seconds, state), out / f"times-{state}.png"))
            if found["memory"]:
                written.append(_save(_memory(by_work(found["memory"])), out / "memory.png"))
        if (results / "scale.json").exists():
            found = json.loads((results / "scale.json").read_text(encoding="utf-8"))
            written.append(_save(_scale(found["curves"]), out / "scale.png"))
        if (results / "curves.json").exists():
            found = json.loads((results / "curves.json").read_text(encoding="utf-8"))
            written.append(_save(_growth(found["curves"]), out / "curves.png"))
    return written


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    return path


# -- bars


def _ratios(seconds: Samples, state: str) -> Figure:
    """How many times as long as this library the others take, with intervals."""
    groups = {}
    for work in _works(seconds, state):
        ours = seconds.get((state, work, _OURS), {})
        groups[work] = [
            (peer, *ratio, f"{_short(ratio[0])}x")
            for peer in _TITLES
            if peer != _OURS and (ratio := paired_ratio(seconds.get((state, work, peer), {}), ours)) is not None
        ]
    figure, axes = _bars(groups, start=1.0)
    axes.axvline(1, color=_COLOURS[_OURS], linewidth=2)
    axes.set_title(f"{_STATES[state]}\ntime of others : time of {_TITLES[_OURS]} (median, 95 %); right of 1: slower")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    return figure


def _times(seconds: Samples, state: str) -> Figure:
    """Everybody's median time."""
    groups = {}
    for work in _works(seconds, state):
        medians = {peer: _median(seconds[state, work, peer].values()) for peer in _with(seconds, state, work)}
        groups[work] = [(peer, m, m, m, _duration(m)) for peer, m in medians.items()]
    shortest = min(bar[1] for bars in groups.values() for bar in bars)
    figure, axes = _bars(groups, start=shortest / 2)
    axes.set_title(f"{_STATES[state]}\nmedian time, slower rank; shorter is better")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    return figure


def _memory(memory: Samples) -> Figure:
    """What a call needs at any moment beyond the tensors."""
    groups: dict[str, list[Bar]] = {}
    for state, work in dict.fromkeys((state, work) for state, work, _ in memory):
        bars = groups[f"{state}: {work}"] = []
        for peer in _with(memory, state, work):
            peak = _median([sample["peak"] / 2**20 for sample in memory[state, work, peer]])
            text = f"{_short(peak)} MiB" if peak >= _LEAST_MIB else f"less than {_LEAST_MIB:g} MiB"
            length = max(_LEAST_MIB, peak)
            bars.append((peer, length, length, length, text))
    figure, axes = _bars(groups, start=_LEAST_MIB)
    axes.set_title("Memory that a call needs beyond the tensors, worse rank\n(state C: 4.1 GB); shorter is better")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MiB"))
    return figure


def _bars(groups: Mapping[str, Sequence[Bar]], start: float) -> tuple[Figure, Axes]:
    """Horizontal bars on a logarithmic scale, from ``start``, in groups from top to bottom."""
    groups = {name: bars for name, bars in groups.items() if bars}
    count = sum(map(len, groups.values())) + _ROOM * len(groups)
    figure = Figure(figsize=(9, 1.4 + _INCH_A_BAR * count))
    axes = figure.add_subplot()
    axes.set_xscale("log")
    place, middles, named = 0.0, [], set()
    for bars in groups.values():
        middles.append(place + (len(bars) - 1) / 2)
        for peer, length, low, high, text in bars:
            axes.barh(
                place, length - start, _BAR, left=start, color=_COLOURS[peer], label=None if peer in named else peer
            )
            if low != high:
                axes.plot([low, high], [place, place], color="black", linewidth=1)
            axes.annotate(f" {text}", (max(length, high, start), place), va="center", fontsize=8)
            named.add(peer)
            place += 1
        place += _ROOM
    lengths = [end for bars in groups.values() for bar in bars for end in bar[1:4]]
    axes.set_xlim(min(start, *lengths) / 1.08, max(start, *lengths) * 1.6)
    axes.set_yticks(middles, [textwrap.fill(name, _WRAP) for name in groups])
    axes.set_ylim(place - _ROOM, -1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(lengths) < 1000 * min(lengths) else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    handles, peers = axes.get_legend_handles_labels()
    order = sorted(range(len(peers)), key=lambda i: list(_TITLES).index(peers[i]))
    axes.legend(
        [handles[i] for i in order],
        [_TITLES[peers[i]] for i in order],
        loc="upper center",
        bbox_to_anchor=(0.4, -0.35 / (figure.get_figheight() - 1.4)),
        ncols=3,
        frameon=False,
    )
    return figure, axes


def _works(samples: Samples, state: str) -> list[str]:
    """The works of a state that were measured, in the order of the table."""
    wanted = [work for job in JOBS if job.state == state for work in job.works]
    return [work for work in wanted if any((state, work, peer) in samples for peer in _TITLES)]


def _with(samples: Samples, state: str, work: str) -> list[str]:
    return [peer for peer in _TITLES if (state, work, peer) in samples]


# -- curves


def _scale(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Seconds and megabytes over the number of ranks, and of tensors; both axes logarithmic."""
    units = list(dict.fromkeys(unit for _, unit, _ in _CURVES))
    figure = Figure(figsize=(5.2 * len(curves), 4.4 * len(units)), layout="constrained")
    grid = figure.subplots(len(units), len(curves), squeeze=False, sharex="col", sharey="row")
    for column, (over, rows) in enumerate(curves.items()):
        for line, unit in enumerate(units):
            axes = grid[line][column]
            _draw_curves(axes, rows, over, unit)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set_xlabel(over)
            axes.set_ylabel(unit)
        grid[0][column].set_title(_constant(rows, over))
        grid[0][column].set_xticks([row[over] for row in rows], [f"{row[over]:,}" for row in rows])
        grid[0][column].minorticks_off()
    for line in range(len(units)):
        grid[line][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return figure


def _draw_curves(axes: Axes, rows: Sequence[Mapping[str, Any]], over: str, unit: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    x = [row[over] for row in rows]
    wanted = [(name, value) for name, its_unit, value in _CURVES if its_unit == unit]
    for name, value in wanted:
        axes.plot(x, [value(row) for row in rows], marker="o", markersize=4, label=name)
    top = max(value(rows[-1]) for _, value in wanted) * 2
    axes.plot([x[0], x[-1]], [top * x[0] / x[-1], top], color="#999999", linestyle=":", label="as slope 1: linear")
    axes.grid(color="#dddddd", linewidth=0.6)


def _growth(curves: Sequence[Mapping[str, Any]]) -> Figure:
    """Seconds and megabytes of ``benchmark.curves``, with slopes."""
    curves = [curve for curve in curves if curve["points"]]
    figure = Figure(figsize=(4.6 * len(curves), 8.4), layout="constrained")
    grid = figure.subplots(2, len(curves), squeeze=False, sharex="col", sharey="row")
    for column, curve in enumerate(curves):
        x = [point["size"] for point in curve["points"]]
        for name, slope in curve["slopes"].items():
            is_memory = name.endswith("memory")
            axes = grid[int(is_memory)][column]
            y = [max(point[name] / 1e6, _LEAST_MIB) if is_memory else point[name] for point in curve["points"]]
            label = name.removesuffix(": memory") + ("" if slope is None else f" ({slope:.2f})")
            axes.plot(x, y, marker="o", markersize=4, label=label)
        for line, unit in enumerate(("seconds", "MB beyond the state")):
            axes = grid[line][column]
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid(color="#dddddd", linewidth=0.6)
            if x[-1] < 100 * x[0]:  # the axis would have only one label in large letters, and many in small ones
                axes.set_xticks(x, [f"{size:,}" for size in x])
                axes.minorticks_off()
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set_xlabel(curve["name"])
            axes.set_ylabel(unit)
            axes.legend(frameon=False, fontsize=9)
        grid[0][column].set_title(textwrap.fill(f"over {curve['title']}", 40) + "\n(slope)", fontsize=9)
    return figure


def _constant(rows: Sequence[Mapping[str, Any]], over: str) -> str:
    """What stays the same on the way."""
    other = "tensors" if over == "ranks" else "ranks"
    return f"over {over}, with {rows[0][other]:,} {other}"


# -- numbers


def _median(values: Any) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _duration(seconds: float) -> str:
    return f"{_short(seconds * 1000)} ms" if seconds < 1 else f"{_short(seconds)} s"


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> int:
    """Draw and list the files; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw the results of benchmark.run, scale and curves.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the JSON files")
    parser.add_argument("--smoke", action="store_true", help="draw into a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in draw(args.results, Path(folder) if args.smoke else args.results):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
