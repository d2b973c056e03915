"""The documentation: pages in both languages, examples that run, a format that can be read and written by the book."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

import paddle_dist_ckpt
from paddle_dist_ckpt.cli.main import app
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.manager.steps import NOTE, step_folder
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks, shard_array
from test.cli.commands import save_model
from test.jobs import load_whole, save_alone
from test.ranks.launcher import forked
from test.readers.golden import GOLDEN

ROOT = Path(__file__).parents[1]
LANGUAGES = ("en", "cn")
_TITLE = re.compile(r"^(?! )\S.*\n([-:=~^\"])\1{3,}$", re.MULTILINE)
_RST_BLOCK = re.compile(r"^\.\. (?P<mark>.+)\n\n\.\. code-block:: \w+\n\n(?P<code>(?:(?:    .*)?\n)+)", re.MULTILINE)
_MD_BLOCK = re.compile(r"^<!-- (?P<mark>.+) -->\n```python\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)


def pages(language: str) -> dict[str, str]:
    """The text of each page, by its name without the language."""
    folder = ROOT / f"docs_{language}"
    found = sorted(folder.rglob("*.rst"))
    return {re.sub(r"_(cn|en)$", "", str(p.relative_to(folder).with_suffix(""))): p.read_text("utf-8") for p in found}


def blocks(text: str) -> list[tuple[str, str]]:
    """Marks and code of the marked code blocks of a page."""
    return [
        (m["mark"], textwrap.dedent(m["code"]).strip("\n") + "\n")
        for kind in (_RST_BLOCK, _MD_BLOCK)
        for m in kind.finditer(text)
    ]


def signatures(page: str) -> list[str]:
    """The signatures on a page, each in one line."""
    lines = (" ".join(code.split()) for mark, code in blocks(page) if mark == "signature")
    return [re.sub(r"(?<=\() | (?=\)$)", "", line) for line in lines]


EVERYTHING = {"README": (ROOT / "README.md").read_text("utf-8"), **pages("en")}
MARKED = [(f"{page}-{i}", *block) for page, text in EVERYTHING.items() for i, block in enumerate(blocks(text))]
EITHER = {name: code for name, mark, code in MARKED if name.startswith("README") and mark.startswith("runnable")}
ALONE = {name: code for name, mark, code in MARKED if mark == "runnable"} | EITHER
TOGETHER = {name: code for name, mark, code in MARKED if mark == "runnable with 2 ranks"} | EITHER
READER = next(code for _, mark, code in MARKED if mark == "reader")


def test_both_languages_have_the_same_pages_and_sections() -> None:
    english, chinese = pages("en"), pages("cn")
    assert english.keys() == chinese.keys()
    sections = {name: [len(_TITLE.findall(text[name])) for text in (english, chinese)] for name in english}
    assert {name: counts for name, counts in sections.items() if counts[0] != counts[1] or not counts[0]} == {}


def test_both_languages_have_the_same_code() -> None:
    english, chinese = pages("en"), pages("cn")
    assert {name: blocks(text) for name, text in english.items()} == {n: blocks(t) for n, t in chinese.items()}


def test_the_readme_has_the_same_code_in_both_languages() -> None:
    assert blocks(EVERYTHING["README"]) == blocks((ROOT / "README_cn.md").read_text("utf-8")) != []


def test_all_python_in_the_pages_is_marked_and_found() -> None:
    for text in (EVERYTHING["README"], *pages("en").values(), *pages("cn").values()):
        marked = [mark for mark, _ in blocks(text) if not mark.startswith("example")]
        assert len(marked) == text.count("code-block:: python") + text.count("```python")
        assert set(marked) <= {
            "runnable",
            "runnable with 2 ranks",
            "runnable with PaddleFormers",
            "reader",
            "recipes.py",
            "signature",
        }
        runnable = sum(line.startswith((".. runnable", "<!-- runnable")) for line in text.splitlines())
        assert sum(mark.startswith("runnable") for mark in marked) == runnable


def test_all_examples_of_the_readme_and_the_pages_run() -> None:
    lines = [line for text in EVERYTHING.values() for line in text.splitlines()]
    assert len(ALONE.keys() - EITHER) == lines.count(".. runnable") > 0
    assert len(TOGETHER.keys() - EITHER) == lines.count(".. runnable with 2 ranks") > 0
    assert len(EITHER) == sum(line.startswith("<!-- runnable") for line in lines) > 0


@pytest.mark.parametrize("language", LANGUAGES)
def test_public_names_are_documented(language: str) -> None:
    text = pages(language)
    for name in paddle_dist_ckpt.__all__:
        public = getattr(paddle_dist_ckpt, name)
        if inspect.isfunction(public) or name in ("SaveOptions", "LoadOptions", "Metadata", "Storage"):
            assert f"api/{name}" in text
        if callable(public):
            declared = re.compile(rf"(class |exception )?paddle_dist_ckpt\.{name}\b")
            assert any(declared.match(code) for page in text.values() for code in signatures(page)), name


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_summary_about_performance_has_the_numbers_of_the_tables(language: str) -> None:
    """Benchmarks put new tables into the page, and do not know of its summary."""
    _, summary, *rest = re.split(r"^:{4,}$", pages(language)["performance"], flags=re.MULTILINE)
    number = re.compile(r"(?<![\d.,])[\d.]+(?:x| (?:ms|s|MiB|%))(?!\w)", re.ASCII)
    said, measured = (set(number.findall(text)) for text in (summary, "".join(rest)))
    assert len(said) > 40
    assert said - measured == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_signatures_are_those_of_the_code(language: str) -> None:
    text = pages(language)
    for name in paddle_dist_ckpt.__all__:
        public = getattr(paddle_dist_ckpt, name)
        if inspect.isfunction(public) or name.endswith("Options"):
            parameters = inspect.signature(public).parameters.values()
            plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
            expected = f"paddle_dist_ckpt.{name}{inspect.Signature(plain)}"
            page = text[f"api/{name}"]
            assert expected in [code.removeprefix("class ") for code in signatures(page)]
            assert re.findall(r"^    - \*\*(\w+)\*\* \(", page, re.MULTILINE) == [p.name for p in plain]


@pytest.mark.parametrize("language", LANGUAGES)
def test_fields_of_reports_are_documented(language: str) -> None:
    page = pages(language)["api/reports"]
    named = re.findall(r"^- \*\*(\w+)\*\* \(", page, re.MULTILINE)
    names = ("SaveReport", "LoadReport", "VerifyReport", "ExportReport")
    reports = [getattr(paddle_dist_ckpt, name) for name in names]
    assert named == [field.name for report in reports for field in dataclasses.fields(report)]


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    monkeypatch.chdir(tmp_path)
    exec(compile(ALONE[name], name, "exec"), {"__name__": "__main__"})


RUN = """
import os
from test.ranks import groups

groups.install()
print()

def run(code, folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exec(compile(code, folder, "exec"), {"__name__": "__main__"})
    print("ran", folder)

"""


def test_the_examples_for_two_ranks_run(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    calls = [f"run({code!r}, {str(tmp_path / name.replace('/', '-'))!r})\n" for name, code in TOGETHER.items()]
    ends = forked(tmp_path, RUN + "".join(calls), timeout=300.0)
    assert [(code, text.count("\nran ")) for code, text in ends] == [(0, len(TOGETHER))] * 2, ends


def _make_checkpoints() -> None:
    """What the page about the command line says that its examples are run on, in the current folder."""
    arrays = {"embed.weight": np.arange(64 * 16, dtype=np.float32).reshape(64, 16)}
    for i in range(4):
        arrays[f"layers.{i}.weight"] = np.full((16, 16), i, np.float32)
        arrays[f"layers.{i}.bias"] = np.zeros(16, np.float32)
    save_model(Path("checkpoints"), arrays, 1, step=100)
    arrays["layers.3.weight"][0, :3] += 0.5
    save_model(Path("checkpoints"), arrays, 2, step=200)
    for step, loss in ((100, 0.5), (200, 0.4), (300, 0.6)):
        options = paddle_dist_ckpt.SaveOptions(user_metadata={NOTE: {"step": step, "metrics": {"loss": loss}}})
        save_alone({"model": arrays, "step": step}, step_folder(Path("run-7"), step), step, options=options)
    shutil.copytree(GOLDEN / "paddle-3.3.1-nested", "old")
    Path("old/expected.npz").unlink()
    Path("recipes.py").write_text(
        next(code for mark, code in blocks(pages("en")["command_line"]) if mark == "recipes.py")
    )


def test_the_examples_of_the_command_line_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _make_checkpoints()
    varies = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00|(?<=report\.html: )[\d.]+")
    shown = "".join(code for mark, code in blocks(pages("en")["command_line"]) if mark != "recipes.py")
    assert {args[0] for args in map(shlex.split, re.findall(r"^\$ paddle-dist-ckpt (.*)", shown, re.MULTILINE))} == {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for example in re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]:
        line, _, expected = example.partition("\n")
        command, *args = shlex.split(line)
        if command == "rm":
            Path(args[0]).unlink()
            continue
        found = CliRunner().invoke(app, args)
        assert found.exit_code == ("different" in expected), found.output
        texts = [varies.sub("", text) for text in (found.output.replace(str(tmp_path), "/data"), expected)]
        lines, as_shown = ([line.rstrip() for line in text.rstrip().splitlines()] for text in texts)
        assert lines == as_shown


def reader() -> Callable[[str | Path, int], dict[str, Any]]:
    """The ``load`` of the page about the format."""
    imported = set(re.findall(r"^(?:import|from) (\w+)", READER, re.MULTILINE))
    assert imported <= {"base64", "json", "os", "numpy", "safetensors"}
    module: dict[str, Any] = {}
    exec(compile(READER, "format.rst", "exec"), module)
    load: Callable[[str | Path, int], dict[str, Any]] = module["load"]
    return load


VALUES = {
    "int": 2**70,
    "floats": [float("inf"), 1.0, -0.0, 1e300],
    "complex": complex(1, -2),
    "bytes": b"\x00\xff",
    "text": "\ud800",
    "tuple": (1, ("x", None)),
    "dict": {(1, 2): 3, None: True},
    "scalars": [np.float16(2), np.str_(""), np.datetime64("2020-01-01", "ns")],
    "empty": {},
    "long": "x" * 5000,
}


def test_the_reader_of_the_format_page_reads_a_checkpoint(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for name, dtype in DTYPES.items():
        raw = random.integers(0, 2 if name == "bool" else 256, (6, 5, dtype.itemsize), np.uint8)
        arrays[name] = raw.view(arithmetic_dtype(dtype)).reshape(6, 5)
    large = random.standard_normal((200, 300))
    no_grid = ([Box((0, 0), (4, 3)), Box((4, 0), (2, 5))], [Box((0, 3), (4, 2))], [])

    def save(rank: SimulatedRank) -> None:
        state: dict[Any, Any] = {
            "a.b": {name: shard_array(array, no_grid[rank.rank]) for name, array in arrays.items()},
            "large": shard_array(large, [Box((0, 0), large.shape)]),  # is divided among the ranks
            "list": [np.arange(10), (np.zeros((0, 3)), np.array(3.5))],
            7: VALUES,
            "words": np.array(["ab", "c"]),
        }
        options = paddle_dist_ckpt.SaveOptions(block_bytes=4096, timeout=60)
        rank.save(state, tmp_path, unique_id=12, options=options)

    assert run_ranks(3, save) == [None] * 3
    found = reader()(tmp_path, 12)
    for name, array in arrays.items():
        assert found[f"/a.b/{name}"].tobytes() == array.tobytes(), name
    assert np.array_equal(found["/large"], large)
    assert found["/list/~l0"].tolist() == list(range(10))
    assert (found["/list/~l1/~t0"].shape, found["/list/~l1/~t1"].item()) == ((0, 3), 3.5)
    assert {name: found[f"/~i7/{name}"] for name in VALUES} == VALUES
    assert found["/words"].tolist() == ["ab", "c"]


def test_the_example_of_the_format_page_is_a_checkpoint(tmp_path: Path) -> None:
    for mark, code in blocks(pages("en")["format"]):
        if not mark.startswith("example "):
            continue
        name = mark.removeprefix("example ")
        if name.endswith(".metadata"):
            (tmp_path / name).write_text(re.sub(r"\n {2}", "", code), encoding="utf-8")
            continue
        length, header, data = code.strip().split("\n\n")
        prefix = bytes.fromhex(length)
        text = re.sub(r"\n {2}", "", header).ljust(int.from_bytes(prefix, "little"))
        (tmp_path / name).write_bytes(prefix + text.encode() + bytes.fromhex(data))
    assert paddle_dist_ckpt.verify(tmp_path).ok
    found = reader()(tmp_path, 0)
    assert found["/layers/~l0/w"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found["/bias"].tolist() == [0.5, -1.0]
    assert (found["/step"], found["/best"]) == (7, (float("inf"), "a.b"))


def test_a_checkpoint_written_by_the_book_is_read(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype="<f4").reshape(3, 2), np.arange(3000, dtype="<f8")
    save, block = "0123456789abcdef", 4096

    def column(*numbers: int) -> list[str]:
        return ["<u1", base64.b64encode(bytes(numbers)).decode()]

    def sealed(data: bytes, prefix_length: bool = False) -> bytes:
        data = len(data).to_bytes(8, "little") + data if prefix_length else data
        return data.replace(b"0" * 16, f"{xxhash.xxh3_64_intdigest(data):016x}".encode(), 1)

    def digest(data: bytes) -> bytes:
        return int(xxhash.xxh3_64_intdigest(data)).to_bytes(8, "little")

    parts = {"second": second, "first[0:1,0:2]": first[:1], "first[1:3,0:2]": first[1:]}  # larger items first
    digests = [digest(p.tobytes()[i : i + block]) for p in parts.values() for i in range(0, p.nbytes, block)]
    info = {"xxh3_64": "0" * 16, "hashes": base64.b64encode(b"".join(digests)).decode(), "info": "{}"}
    header, at = {"__metadata__": info}, 0
    for name, part in parts.items():
        entry = {"dtype": f"F{8 * part.itemsize}", "shape": part.shape, "data_offsets": [at, at + part.nbytes]}
        header, at = header | {name: entry}, at + part.nbytes  # type: ignore[dict-item]
    start = sealed(json.dumps(header, separators=(",", ":")).encode(), prefix_length=True)
    file = f"3_9.{save}.0.safetensors"
    (tmp_path / file).write_bytes(start + b"".join(part.tobytes() for part in parts.values()))
    tensors = {
        "paths": ["/first", "/second"],
        "dtypes": ["float64", "float32"],
        "dtype": column(1, 0),
        "kind": column(1, 1),
        "layouts": [{"shape": [3, 2], "cuts": [[1], []]}, {"shape": [3000], "cuts": [[]]}],
        "layout": column(0, 1),
        "shard_file": column(0, 0, 0),
    }
    record = [file, len(start) + at, re.findall(rb"[0-9a-f]{16}", start)[0].decode()]
    body = {"save": save, "unique_id": 5, "world_size": 4, "block_bytes": block, "created": "2020-01-01T00:00:00+00:00"}
    body |= {"library": "a book", "paddle": None, "user_metadata": None, "files": [record], "tensors": tensors}
    body |= {"values": [["/step", 7]], "a field of the future": 1}
    line = json.dumps(body)
    head = {"format": "paddle_dist_ckpt.metadata", "version": [1, 3], "required_features": [], "save": save}
    head |= {"body_bytes": len(line), "xxh3_64": "0" * 16}
    blank = json.dumps(head, separators=(",", ":")) + "\n" + line + "\n"
    (tmp_path / "5.metadata").write_bytes(sealed(blank.encode()))

    assert paddle_dist_ckpt.verify(tmp_path).problems == ()
    found = load_whole(tmp_path)
    assert np.array_equal(found["first"], first)
    assert np.array_equal(found["second"], second)
    assert found["step"] == 7
