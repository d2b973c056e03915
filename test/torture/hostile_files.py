"""Files in our own format that describe far more than they hold, to everything that reads files.

What is allowed: an error of the library, or success; memory of 64 MiB and what the files take on the disk; a second of
processor time, and one for each 10 MiB of them. (A load into a tensor that is there already may fill it.)
"""

from __future__ import annotations

import io
import os
import shutil
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np

import paddle_dist_ckpt
from paddle_dist_ckpt.cli.main import app
from paddle_dist_ckpt.errors import CheckpointError
from test.jobs import load_alone, load_whole, try_load
from test.pace import slowness

from .budgets import Cost, bytes_on_disk, cost_of
from .crafting import Entry, column, dumped, write_checkpoint

__all__ = ["NAME", "RECIPES", "attempt"]

NAME = "hostile files"
_MEMORY = 64 << 20
_BYTES_A_SECOND = 10 << 20
_SPARE = 2  # for a machine that does much else: caches are cold, and clocks coarse
_HOLE = 1 << 28  # which is 2**16 times what it takes


# -- what is written


def _hole(folder: Path) -> None:
    write_checkpoint(folder, {"/w": Entry([_HOLE // 4], [[]])}, block_bytes=64 << 20)


def _hole_in_columns(folder: Path) -> None:
    write_checkpoint(folder, {"/w": Entry([1 << 14, _HOLE >> 16], [[], [1 << 12, 1 << 13]])}, block_bytes=64 << 20)


def _hole_in_many_columns(folder: Path) -> None:
    columns = 1 << 14
    write_checkpoint(folder, {"/w": Entry([_HOLE >> 14, columns], [[], list(range(1, columns))])}, block_bytes=64 << 20)


def _little_in_every_block(block_bytes: int, blocks: int, cuts: Sequence[int] = ()) -> Callable[[Path], None]:
    """Holes of which each block has a page of something else."""

    def write(folder: Path) -> None:
        entry = Entry([blocks * block_bytes >> 14, 1 << 14], [[], list(cuts)], "uint8")
        write_checkpoint(folder, {"/w": entry}, block_bytes=block_bytes, page=b"x" * 4096)

    return write


def _holes(folder: Path) -> None:
    write_checkpoint(folder, {f"/w{i:03}": Entry([_HOLE >> 9], [[]]) for i in range(128)}, block_bytes=64 << 20)


def _hole_for_a_value(folder: Path) -> None:
    write_checkpoint(folder, {"/v": Entry([_HOLE], [[]], "uint8", 2)}, block_bytes=64 << 20)


def _hole_for_a_header(folder: Path) -> None:
    write_checkpoint(folder, {"/w": Entry([99_000_000], [[]], "uint8")})
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.write((98_000_000).to_bytes(8, "little"))


def _hole_behind_metadata(folder: Path) -> None:
    write_checkpoint(folder, {"/w": Entry([4], [[]])})
    os.truncate(folder / "0.metadata", 20 * _HOLE)


def _grid(dimensions: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        each = 20 // dimensions
        cuts = [list(range(1, 2**each)) for _ in range(dimensions)]
        entry = Entry([2**each] * dimensions, cuts, "uint8")
        write_checkpoint(folder, {"/w": entry}, header_entries=False)

    return write


def _grid_of_nothing(folder: Path) -> None:
    """No element, and shards without end, none of which needs a byte."""
    entry = Entry([*[2] * 20, 0], [*[[1]] * 20, []])
    write_checkpoint(folder, {"/w": entry}, header_entries=False)


def _claimed_grid(folder: Path) -> None:
    """The `.metadata` alone."""
    _grid(20)(folder)
    next(folder.glob("*.safetensors")).unlink()


def _deep_paths(part: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        count, deep = 10_000_000 // (255 * (len(part) + 1)), f"/{part}" * 253
        paths = sorted(f"/{i:05}{deep}/k" for i in range(count))
        write_checkpoint(folder, {}, [(path, b"1") for path in paths])

    return write


def _values(unit: bytes, nbytes: int = 3_000_000) -> Callable[[Path], None]:
    """A value in a data file, and then the same in `.metadata`."""

    def write(folder: Path) -> None:
        text = b"[" + b",".join([unit] * (nbytes // (len(unit) + 1))) + b"]"
        if folder.name.endswith("inline"):
            write_checkpoint(folder, {}, [("/v", text)])
        else:
            write_checkpoint(folder, {"/v": Entry([len(text)], [[]], "uint8", 2, text)})

    return write


def _keys(key: Callable[[int], Any], count: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        text = dumped({"dict": [[key(i), 0] for i in range(count)]})
        write_checkpoint(folder, {"/v": Entry([len(text)], [[]], "uint8", 2, text)})

    return write


def _text(unit: bytes, count: int) -> Callable[[Path], None]:
    text = b'"' + unit * count + b'"'
    return lambda folder: write_checkpoint(folder, {"/v": Entry([len(text)], [[]], "uint8", 2, text)})


def _long_keys(part: str, size: int, count: int) -> Callable[[Path], None]:
    keys = [f"/{i:04}{part * (size // len(part))}" for i in range(count)]
    return lambda folder: write_checkpoint(folder, {"/w": Entry([4], [[]])}, [(key, b"1") for key in keys])


def _named(part: str, size: int, count: int) -> Callable[[Path], None]:
    """Tensors, rather than values, of such keys."""
    keys = [f"/optimizer/{i:05}{part * (size // len(part))}moment1_0" for i in range(count)]
    return lambda folder: write_checkpoint(folder, {key: Entry([], [], "uint8") for key in keys})


def _own_layouts(shape: Sequence[int], count: int) -> Callable[[Path], None]:
    """Tensors that share no layout."""
    entry = Entry(list(shape), [[]] * len(shape), "uint8")
    return lambda folder: write_checkpoint(folder, {f"/{i:06x}": entry for i in range(count)}, header_entries=False)


def _many_values(damaged: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        entries = {f"/v/{i:05}": Entry([1], [[]], "uint8", 2, b"1") for i in range(20_000)}
        write_checkpoint(folder, entries)
        if damaged:
            (file,) = folder.glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-len(entries) :: 1] = b"2" * len(entries)
            file.write_bytes(data)

    return write


def _nested(folder: Path) -> None:
    text = b"[" * 200_000 + b"]" * 200_000
    write_checkpoint(folder, {"/v": Entry([len(text)], [[]], "uint8", 2, text)}, [("/n", text)])


def _changed(name: str, value: Any) -> Callable[[Path], None]:
    def edit(body: dict[str, Any]) -> None:
        target = body["tensors"] if name in body["tensors"] else body
        target[name] = value

    return lambda folder: write_checkpoint(folder, {"/w": Entry([4], [[]])}, [("/n", b"1")], edit=edit)


def _times(ranks: int, phases: int) -> Callable[[Path], None]:
    milliseconds = {f"{phase}": column(np.zeros(ranks)) for phase in range(phases)}
    times = {"ranks": column(range(ranks), "<u4"), "milliseconds": milliseconds}

    def edit(body: dict[str, Any]) -> None:
        body.update({"world_size": ranks, "times": times} if "files" in body else {"world_size": ranks})

    return lambda folder: write_checkpoint(folder, {"/w": Entry([4], [[]])}, edit=edit)


P = 2**61 - 1
RECIPES: dict[str, Callable[[Path], None]] = {
    "a hole": _hole,
    "a hole, cut by columns": _hole_in_columns,
    "a hole, cut by very many columns": _hole_in_many_columns,
    "a little in every block": _little_in_every_block(1 << 20, 256),
    "a little in every large block": _little_in_every_block(64 << 20, 4),
    "a little in every large block, cut by columns": _little_in_every_block(64 << 20, 4, [1 << 12, 1 << 13]),
    "a hole for 128 tensors": _holes,
    "a hole for a value": _hole_for_a_value,
    "a hole for a header": _hole_for_a_header,
    "a hole behind .metadata": _hole_behind_metadata,
    "a grid of 2**20 in 20 dimensions": _grid(20),
    "a grid of 2**20 in 2 dimensions": _grid(2),
    "a grid of 2**20 in 20 dimensions, claimed": _claimed_grid,
    "a grid of 2**20 shards of nothing": _grid_of_nothing,
    "paths of 255 short parts": _deep_paths("a"),
    "paths of 255 parts": _deep_paths("abcdefg"),
    "lists of empty lists": _values(b"[[],[]]"),
    "as many lists as there is room for": _values(b"[[],[]]", 1_300_000),
    "half as many lists as there is room for": _values(b"[[],[]]", 650_000),
    "numbers": _values(b"1000000", 11_000_000),
    "half as many numbers": _values(b"1000000", 5_500_000),
    "small dicts": _values(b'{"dict":[["a",1]]}', 1_700_000),
    "half as many small dicts": _values(b'{"dict":[["a",1]]}', 850_000),
    "a hundred megabytes of brackets": _values(b"[[],[]]", 100_000_000),
    "lists of lists of one": _values(b"[1]"),
    "empty objects": _values(b"{}"),
    "short texts": _values(b'"ab"'),
    "tuples": _values(b'{"tuple":[1,2]}'),
    "arrays of items without bytes": _values(b'{"array":["|S0",[2147483647],""]}', 60),
    "many arrays of items without bytes": _values(b'{"array":["|S0",[2147483647],""]}', 100_000),
    "empty arrays": _values(b'{"array":["|S999999999",[0],""]}'),
    "arrays of one number": _values(b'{"array":["<f4",[1],"zczMPQ=="]}'),
    "arrays of odd shapes": _values(b'{"array":["<f4",[-1,-1,1e9],"AAAA"]}', 100),
    "numbers far from one": _values(b"1e300", 3_500_000),
    "lists in lists": _values(b"[" * 100 + b"1" + b"]" * 100, 690_000),
    "integers of one hash": _keys(lambda i: {"int": hex((i + 8) * P)}, 80_000),
    "integers of 64 bits that are alike at the end": _keys(lambda i: i << 43, 100_000),
    "tuples of numbers": _keys(lambda i: {"tuple": [i, -i]}, 60_000),
    "complex numbers of one hash": _keys(lambda i: {"complex": [float(-1000003 * i), float(i)]}, 80_000),
    "a text of empty lines": _text(rb"\n", 4_000_000),
    "a text of what cannot be seen": _text(rb"\u0001", 3_000_000),
    "a text of what nobody sees": _text(b"\x7f", 4_000_000),
    "a text of one line": _text(b"a", 20_000_000),
    "a key of four megabytes": _long_keys("encoder_", 4_000_000, 1),
    "keys of a thousand letters": _long_keys("encoder_", 1000, 3000),
    "keys of six hundred letters, of many parts": _long_keys("encoder.", 600, 5000),
    "names of a run of eight thousand letters": _named("w_0_", 8000, 50),
    "names of a run that may end anywhere": _named("_0", 900, 2000),
    "a layout for each of many tensors of two dimensions": _own_layouts([0, 1], 60_000),
    "a layout for each of many tensors of thirty-two": _own_layouts([0] + [1] * 31, 4000),
    "a great many values in a data file": _many_values(damaged=False),
    "a great many damaged values in a data file": _many_values(damaged=True),
    "brackets without end": _nested,
    "a huge world_size": _changed("world_size", 10**4000),
    "a huge file": _changed("files", [[f"0_0.{'5' * 16}.0.safetensors", 10**30, "5" * 16]]),
    "a huge shape": _changed("layouts", [{"shape": [10**30], "cuts": [[]]}]),
    "a shape of text": _changed("layouts", [{"shape": "4", "cuts": [[]]}]),
    "a key of many digits": _changed("paths", ["/~i" + "9" * 5000]),
    "times of many ranks": _times(15_000, 100),
    "times that are none": _changed("times", {"ranks": column([0]), "milliseconds": {"write": column([1] * 9)}}),
}
INLINE = [name for name, write in RECIPES.items() if write.__qualname__.startswith("_values")]


# -- who reads it


def _run(*args: object) -> str:
    """What a command ends with, which prints to nobody: what is kept of its output would count as its memory."""
    errors = io.StringIO()
    with open(os.devnull, "w") as nobody, redirect_stdout(nobody), redirect_stderr(errors):
        try:
            app([str(arg) for arg in args])
        except SystemExit as end:
            assert "(--debug shows where)" not in errors.getvalue(), errors.getvalue()[:500]
            return f"exit {end.code}"
    raise AssertionError("a command ends by an exit")


def _into_targets(folder: Path) -> None:
    """A load by two ranks of which none asks for what is large."""
    results = try_load([{"v": None, "n": 0}, {}], folder)
    for result in results:
        if isinstance(result, BaseException):
            raise result


READERS: dict[str, Callable[[Path], object]] = {
    "list": paddle_dist_ckpt.list_checkpoints,
    "metadata": lambda folder: bool(paddle_dist_ckpt.read_metadata(folder).save_id),
    "verify": lambda folder: paddle_dist_ckpt.verify(folder).ok,
    "rebuild": lambda folder: bool(_rebuilt(folder)),
    "copy": lambda folder: bool(paddle_dist_ckpt.copy_checkpoint(folder, f"{folder}-copied").save_id),
    "load": lambda folder: len(load_whole(folder)),
    "load into": lambda folder: load_alone({"v": None, "n": 0}, folder).unique_id,
    "load by two": _into_targets,
    "inspect": lambda folder: _run("inspect", folder),
    "inspect in JSON": lambda folder: _run("inspect", folder, "--json"),
    "report": lambda folder: _run("report", folder, "-o", f"{folder}.html"),
    "load other keys": lambda folder: load_alone({f"encoder{c}": np.zeros(1) for c in string.ascii_letters}, folder),
    "load a name of a run": lambda folder: load_alone({"linear_0.w_0_moment1_0": np.zeros(1)}, folder),
    "cat": lambda folder: _run("cat", folder, "w"),
    "cat value": lambda folder: _run("cat", folder, "v"),
    "cat value in JSON": lambda folder: _run("cat", folder, "v", "--json"),
    "cli verify": lambda folder: _run("verify", folder),
    "diff": lambda folder: _run("diff", folder, folder),
}


def _rebuilt(folder: Path) -> object:
    other = folder.parent / (folder.name + "-rebuilt")
    other.mkdir()
    for file in folder.glob("*.safetensors"):
        os.link(file, other / file.name)
    return paddle_dist_ckpt.rebuild_metadata(other)


def problem_of(cost: Cost, real: int) -> str | None:
    """What of a cost is not allowed for files of so many bytes on the disk."""
    if cost.kinds and "CheckpointError" not in cost.kinds:
        return f"raised {cost.outcome}"
    if cost.memory > _MEMORY + real:
        return f"took {cost.memory >> 20} MiB"
    most = _SPARE * (1 + real / _BYTES_A_SECOND)
    if cost.seconds > most and cost.seconds > most * slowness():
        return f"took {cost.seconds:.1f} s"
    return None


def attempt(seed: int, folder: Path, readers: Collection[str] = READERS.keys()) -> Counter[str]:
    """One hostile checkpoint, in turn, to all readers, or to some."""
    cases = [*((name, "file") for name in RECIPES), *((name, "inline") for name in INLINE)]
    name, where = cases[seed % len(cases)]
    place = folder / f"checkpoint-{where}"
    small = folder / "small"
    write_checkpoint(small, {"/w": Entry([4], [[]]), "/v": Entry([2], [[]], "uint8", 2, b"[]")}, [("/n", b"1")])
    for read in map(READERS.__getitem__, readers):
        with suppress(CheckpointError):
            read(small)  # imports what it needs, once for all children
    RECIPES[name](place)
    real, outcomes, problems = bytes_on_disk(place), Counter[str](), list[str]()
    for reader in readers:
        cost = cost_of(READERS[reader], small, place)
        both = 2 * real + _MEMORY if reader == "diff" else real  # which reads two checkpoints
        problem = problem_of(cost, both)
        if problem is not None:
            problems.append(f"{reader} {problem} ({cost.memory >> 20} MiB, {cost.seconds:.2f} s: {cost.outcome[:150]})")
        outcomes["refused" if cost.kinds else "read"] += 1
        for made in [*folder.glob("*-rebuilt"), *folder.glob("*-copied")]:
            if made.name.startswith("checkpoint") and bytes_on_disk(made) > real + _MEMORY:
                problems.append(f"{reader} wrote {bytes_on_disk(made) >> 20} MiB")
            shutil.rmtree(made)
    assert not problems, f"{name} ({where}), {real >> 10} KiB on the disk:\n  " + "\n  ".join(problems)
    return outcomes


def case_count() -> int:
    """How many different attempts there are."""
    return len(RECIPES) + len(INLINE)
