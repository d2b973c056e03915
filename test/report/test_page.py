"""The page as a file: whole in itself, and whatever stands in a checkpoint is text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import CheckpointNotFoundError, CheckpointReplacedError, read_metadata
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.folder.checkpoint import read_checkpoint
from paddle_dist_ckpt.report.facts import facts_of
from paddle_dist_ckpt.report.page import page_of
from paddle_dist_ckpt.report.report import report
from test.cli.commands import answer, fails, run
from test.jobs import save_alone
from test.report.samples import HOSTILE, hostile_metadata, large_metadata, metadata_of, own_names

GOLDEN = sorted(p for p in (Path(__file__).parents[1] / "golden").iterdir() if p.is_dir() and "-" in p.name)
ASSETS = resources.files("paddle_dist_ckpt.report") / "assets"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and what stands in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag
        if tag in ("script", "style"):
            self.inside.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.inside[-1] = (self._open, self.inside[-1][1] + data)


def data_of(page: str) -> Any:
    return json.loads(Elements(page).inside[1][1])


@pytest.fixture(scope="module")
def hostile() -> str:
    return page_of(facts_of(hostile_metadata(), f"/data/{HOSTILE}"))


def test_nothing_of_a_checkpoint_is_markup(hostile: str) -> None:
    plain = page_of(facts_of(metadata_of([("/w", Layout.from_cuts((4,), [[]]), [0])], own_names(1)), "/data"))
    assert Elements(hostile).found[5:] == Elements(plain).found[5:]  # in front of them are those of the policy
    assert "alert" not in hostile.replace(Elements(hostile).inside[1][1], "")
    embedded = Elements(hostile).inside[1][1]
    assert embedded.isascii()
    assert not set("<>&") & set(embedded)


def test_what_it_says_is_what_stands_in_the_checkpoint(hostile: str) -> None:
    data = data_of(hostile)
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066").replace("\0", "\\x00")
    assert shown in data["tensors"]["key"]
    assert shown in data["origin"]["location"]
    assert shown in data["user"]["key"]
    assert max(len(key) for key in data["tensors"]["key"]) < 600
    assert len(hostile) < 200_000


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(hostile: str) -> None:
    elements = Elements(hostile)
    (policy,) = [a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    (style, _, script) = [text for _, text in elements.inside]

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_it_needs_nothing_from_outside(hostile: str) -> None:
    elements = Elements(hostile)
    assert not [tag for tag, _ in elements.found if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    assert not [a for _, a in elements.found if {"src", "style"} & set(a) or any(name.startswith("on") for name in a)]
    own = "".join(text for _, text in (elements.inside[0], elements.inside[2]))
    assert re.findall(r"https?://[^\"']*", own) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", own)


def test_the_script_sets_text_only() -> None:
    for asset in ASSETS.iterdir():
        if asset.name.endswith(".js"):
            text = asset.read_text(encoding="utf-8")
            assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc", text), asset.name
            assert not re.findall(r"\beval\(|Function\(|setAttribute\(.style", text), asset.name
            assert "</" not in text, asset.name


def test_a_print_cuts_off_no_list() -> None:
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    (rules,) = re.findall(r"@media print \{.*?\n\}", style, re.DOTALL)
    whole = [rule for rule in rules.splitlines() if "max-height: none !important" in rule]
    assert whole
    assert {".scroll", "#detail"} <= set(re.split(r"[\s,{]+", whole[0]))


def test_asset_files_stay_small() -> None:
    sizes = {asset.name: len(asset.read_text(encoding="utf-8").splitlines()) for asset in ASSETS.iterdir()}
    assert max(sizes.values()) <= 350, sizes


def test_placeholders_in_a_checkpoint_stay_as_they_are() -> None:
    metadata = metadata_of([("/{{script}}", Layout.from_cuts((4,), [[]]), [0])], own_names(1))
    page = page_of(facts_of(metadata, "{{style}}"))
    assert data_of(page)["tensors"]["key"] == ["{{script}}"]
    assert data_of(page)["origin"]["location"] == "{{style}}"


def test_more_tensors_than_are_named_make_a_page_of_a_few_megabytes() -> None:
    page = page_of(facts_of(large_metadata(30_000, 1024), "/data"))
    assert len(page) < 8_000_000


# -- the function and the command


def test_a_report_of_the_newest_and_of_another(tmp_path: Path) -> None:
    save_alone({"w": 1}, tmp_path / "ckpt", 3)
    save_alone({"v": 2}, tmp_path / "ckpt", 8)
    page = report(tmp_path / "ckpt", tmp_path / "page.html")
    assert data_of(page.read_text(encoding="utf-8"))["values"]["key"] == ["v"]
    report(tmp_path / "ckpt", tmp_path / "page.html", 3)
    assert data_of(page.read_text(encoding="utf-8"))["values"]["key"] == ["w"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "page.html"]


@pytest.mark.parametrize("name", [folder.name for folder in GOLDEN])
def test_a_report_of_every_format(name: str, tmp_path: Path) -> None:
    metadata = read_metadata(GOLDEN[0].parent / name)
    data = data_of(report(GOLDEN[0].parent / name, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["origin"]["format"] == metadata.format
    assert data["tensors"]["key"] == [metadata.key(path) for path in metadata.table.paths]
    assert data["totals"]["nbytes"] == sum(info.nbytes for info in metadata.storage_metadata.values()) > 0
    assert set(data["files"]["state"]) == {""}
    assert data["times"]["rank"] == []


def test_a_report_of_a_single_file(tmp_path: Path) -> None:
    file = GOLDEN[0].parent / "hf-safetensors" / "model-00001-of-00002.safetensors"
    data = data_of(report(file, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["files"]["name"] == [file.name]


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    import numpy as np

    save_alone({"w": np.zeros(9)}, tmp_path / "ckpt")
    for path in (tmp_path / "ckpt").glob("*.safetensors"):
        path.unlink()
    page = report(tmp_path / "ckpt", tmp_path / "page.html")
    assert data_of(page.read_text(encoding="utf-8"))["files"]["state"] == ["missing"]


@pytest.mark.parametrize("times", [1, 100])
def test_a_report_is_of_one_save_where_the_checkpoint_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    import numpy as np

    saves = iter(range(times))

    def read_and_replaced(*args: Any) -> Any:
        found = read_checkpoint(*args)
        if next(saves, None) is not None:
            save_alone({"w": np.zeros(9)}, tmp_path / "ckpt", 3)
        return found

    save_alone({"w": np.zeros(5)}, tmp_path / "ckpt", 3)
    monkeypatch.setattr("paddle_dist_ckpt.report.report.read_checkpoint", read_and_replaced)
    if times == 1:
        page = report(tmp_path / "ckpt", tmp_path / "page.html")
        data = data_of(page.read_text(encoding="utf-8"))
        assert (data["files"]["state"], data["files"]["nbytes"]) == ([""], [72])
    else:
        with pytest.raises(CheckpointReplacedError, match="checkpoint 3 in"):
            report(tmp_path / "ckpt", tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()


def test_what_goes_wrong_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        report(tmp_path / "absent", tmp_path / "page.html")
    save_alone({"w": 1}, tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError):
        report(tmp_path / "ckpt", tmp_path / "no" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        report(tmp_path / "ckpt", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "folder"]


def test_a_link_that_lies_ready_is_not_written_to(tmp_path: Path) -> None:
    save_alone({"w": 1}, tmp_path / "ckpt", 3)
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / f".page.html.{os.getpid()}.tmp").symlink_to("theirs")
    report(tmp_path / "ckpt", tmp_path / "page.html")
    assert (tmp_path / "theirs").read_text() == "kept"
    assert not (tmp_path / "page.html").is_symlink()


def test_the_command(tmp_path: Path) -> None:
    save_alone({"w": 1}, tmp_path / "ckpt", 3)
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "ckpt", "-o", out).startswith(str(out))
    size = out.stat().st_size
    assert answer("report", tmp_path / "ckpt", "-o", out, "--id", 3) == {"path": str(out), "bytes": size}
    assert "absent" in fails("report", tmp_path / "absent", "-o", out)
    assert "looks like a URL" in fails("report", tmp_path / "ckpt", "-o", "s3://bucket/page.html")
