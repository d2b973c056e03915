"""The page in a headless Chromium: it draws itself in time, can be searched and clicked, and runs no other script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddle_dist_ckpt.files.metadata import Metadata
from paddle_dist_ckpt.report.facts import facts_of
from paddle_dist_ckpt.report.page import page_of
from paddle_dist_ckpt.report.report import report
from test.report.browser import Browser, chromium
from test.report.samples import hostile_metadata, large_metadata, metadata_of, save_model
from test.strategies import some

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def program() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as started:
        yield started


@pytest.fixture
def browser(program: Browser) -> Iterator[Browser]:
    """A browser, whose console must say nothing in the test."""
    program.problems.clear()
    program.look()
    yield program
    program.evaluate("1")  # what the browser has to say until here, is said
    assert program.problems == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    save_model(folder / "ckpt")
    report(folder / "ckpt", folder / "model.html")
    made: dict[str, Metadata] = {
        "large": large_metadata(5000),
        "huge": large_metadata(100_000, 1024),
        "hostile": hostile_metadata(),
        "empty": metadata_of([], []),
        "partly": msgspec.structs.replace(metadata_of([], []), left_out={"/model/w": "it has gaps"}),
    }
    facts = {name: facts_of(metadata, "/data/checkpoints") for name, metadata in made.items()}
    facts["large"] = replace(facts["large"], times=replace(facts["large"].times, left_out=1000))
    for name, each in facts.items():
        (folder / f"{name}.html").write_text(page_of(each), encoding="utf-8")
    return {path.stem: path for path in folder.glob("*.html")}


def text_of(browser: Browser, selector: str) -> str:
    found: str = browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def texts_of(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText.trim())"
    )
    return found


def search(browser: Browser, words: str) -> list[str]:
    """Type into the field; returns the keys that are listed then."""
    browser.click("#search")
    browser.evaluate("document.querySelector('#search').select()")
    browser.type(words)
    return texts_of(browser, "#table tbody td:first-child")


def test_it_shows_the_checkpoint(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    assert browser.evaluate("document.title") == "Checkpoint 1200"
    tiles = dict(zip(texts_of(browser, "#tiles dt"), texts_of(browser, "#tiles dd"), strict=True))
    assert tiles["Tensors"] == "78"
    assert tiles["Ranks that saved"] == "4"
    assert "paddle_dist_ckpt" in text_of(browser, "#origin")
    assert text_of(browser, "#user-table").count("baseline-7b") == 1
    assert "trainer.step" in text_of(browser, "#values-table")
    assert len(texts_of(browser, "#files-table tbody tr")) == 4
    assert texts_of(browser, "#balance-chart .name") == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {"plan", "write"} <= set(texts_of(browser, "#timeline-chart .legend li"))
    assert "float16" in text_of(browser, "#dtypes")


def test_it_says_how_many_ranks_times_are_not_there(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    assert "not on this page" not in text_of(browser, "#timeline-says")
    browser.open(pages["large"])
    assert text_of(browser, "#timeline-says").endswith(" The times of 1,000 more ranks are not on this page.")


def test_a_search_and_a_click_on_a_tensor(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    keys = search(browser, "LAYERS.2 model. up.weight")
    assert keys == ["model.decoder.layers.2.mlp.up.weight"]
    assert text_of(browser, "#found").startswith("1 of 78 tensors")
    browser.click("#table tbody tr:first-child button")
    assert text_of(browser, "#detail-h") == "model.decoder.layers.2.mlp.up.weight"
    assert browser.evaluate("document.activeElement.id") == "detail"
    rows = texts_of(browser, "#detail tbody tr")
    assert [row.split("\t")[:2] for row in rows] == [[f"[0:64, {64 * i}:{64 * i + 64}]", f"{i}"] for i in range(4)]
    labels = browser.evaluate("[...document.querySelectorAll('#detail .region text')].map((t) => t.textContent)")
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert search(browser, "nothing has this name") == []


def test_filters_and_order(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])

    def choose(selector: str, text: str) -> None:
        browser.evaluate(
            f"(() => {{ const select = document.querySelector('{selector}'); select.value = [...select.options]."
            f"find((o) => o.text === '{text}').value; select.dispatchEvent(new Event('change')); }})()"
        )

    choose("#pick-dtype", "float16")
    assert {row.split("\t")[1] for row in texts_of(browser, "#table tbody tr")} == {"float16"}
    choose("#pick-dtype", "all")
    choose("#pick-holder", "rank 3")
    held = texts_of(browser, "#table tbody td:first-child")
    assert 0 < len(held) < 78
    assert "model.embed.weight" in held
    choose("#pick-holder", "all")
    browser.click("#table th button[data-by=key]")
    keys = texts_of(browser, "#table tbody td:first-child")
    assert keys == sorted(keys)
    assert browser.evaluate("document.querySelector('#table th[aria-sort]').ariaSort") == "ascending"


def test_a_tensor_of_four_dimensions_is_drawn_on_two(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    search(browser, "model.patch")
    browser.click("#table tbody tr:first-child button")
    chosen = "[...document.querySelectorAll('#detail .controls select')].map((s) => s.selectedOptions[0].text)"
    assert browser.evaluate(chosen) == ["0 (of 64)", "1 (of 16)"]
    across = "document.querySelectorAll('#detail .controls select')[1]"
    browser.evaluate(f"{across}.value = '2'; {across}.dispatchEvent(new Event('change'))")
    assert browser.evaluate(chosen) == ["0 (of 64)", "2 (of 8)", "all"]
    count = "document.querySelectorAll('#detail .region').length"
    assert browser.evaluate(count) == 1
    slices = "document.querySelectorAll('#detail .controls select')[2]"
    browser.evaluate(f"{slices}.value = '12'; {slices}.dispatchEvent(new Event('change'))")
    assert browser.evaluate("document.querySelector('#detail .region').dataset.members") == "3"


def test_into_a_layer_and_out(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    browser.evaluate("document.querySelector('#treemap .layer[aria-label^=\"model:\"]').click()")
    assert texts_of(browser, "#crumbs button")[-1].startswith("model ")
    browser.click("#layer-list")
    assert all(key.startswith("model.") for key in texts_of(browser, "#table tbody td:first-child"))
    browser.click("#crumbs button:first-child")
    assert len(texts_of(browser, "#crumbs button")) == 1
    browser.evaluate("document.querySelector('#treemap .layer[aria-label^=\"embed.weight: 64\"]').click()")
    assert text_of(browser, "#detail-h") == "model.embed.weight"


def test_the_keyboard_does_it_too(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    browser.evaluate("document.querySelector('#table tbody button').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    browser.press("ArrowUp")
    key = browser.evaluate("document.activeElement.textContent")
    assert key == texts_of(browser, "#table tbody td:first-child")[1]
    browser.press("Enter")
    assert text_of(browser, "#detail-h") == key
    browser.open(pages["model"])
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the tensors"


@pytest.mark.parametrize("name", ["model", "large", "hostile", "empty"])
def test_screen_readers_are_told_what_things_are(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    needs = {"button", "textbox", "searchbox", "combobox", "radio", "link", "image", "img", "region"}
    unnamed = [
        node
        for node in nodes
        if node.get("role", {}).get("value") in needs and not node.get("name", {}).get("value") and not node["ignored"]
    ]
    assert unnamed == []
    browser.call("Accessibility.disable")


@pytest.mark.parametrize("name", ["model", "large", "hostile", "empty", "huge"])
@pytest.mark.parametrize(("width", "dark"), some([(390, False), (1440, True)], 1))
def test_it_fits_the_window(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.look(width, 900, dark)
    browser.open(pages[name])
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == dark


def test_what_cannot_be_read_is_named(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["partly"])
    assert "1 key of this checkpoint cannot be read" in text_of(browser, "#warnings")
    assert texts_of(browser, "#unread-table td") == ["model.w", "it has gaps"]
    browser.open(pages["empty"])
    assert texts_of(browser, "#unread-h, #warnings p") == []


def test_nothing_hostile_runs(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.evaluate("[document.scripts.length, document.images.length]") == [2, 0]
    for key in range(len(texts_of(browser, "#table tbody tr"))):
        browser.click(f"#table tbody tr:nth-child({key + 1}) button")
        assert text_of(browser, "#detail-h")
    shown = texts_of(browser, "#table tbody td:first-child")
    assert any("</script><script>alert(1)</script>" in key and "\\u202e" in key for key in shown)
    assert search(browser, "<img src=x")
    browser.evaluate("document.querySelectorAll('#treemap .layer').forEach((node) => node.click())")
    assert browser.evaluate("[document.scripts.length, document.images.length]") == [2, 0]


def test_the_policy_holds(program: Browser, pages: dict[str, Path]) -> None:
    """A script that got into the page all the same would not be run."""
    program.look()
    program.open(pages["model"])
    program.problems.clear()
    program.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'}),"
        " Object.assign(document.createElement('img'), {src: 'http://127.0.0.1:9/x.png'}))"
    )
    assert program.evaluate("window.hacked === undefined")
    refused = [problem for problem in program.problems if "Content Security Policy" in problem]
    assert len(refused) == 2


def test_5000_tensors_are_drawn_in_two_seconds(browser: Browser, pages: dict[str, Path]) -> None:
    assert min(browser.open(pages["large"]) for _ in range(3)) < 2
    started: Any = browser.evaluate("performance.now()")
    assert len(search(browser, "layers.00123")) == 10
    assert browser.evaluate("performance.now()") - started < 2000
    assert "5,000" in text_of(browser, "#tiles")


def test_100_000_tensors_still_open(browser: Browser, pages: dict[str, Path]) -> None:
    assert min(browser.open(pages["huge"]) for _ in range(2)) < 5
    assert "Only the 20,000 largest are listed here, of 100,000." in text_of(browser, "#found")
    assert len(texts_of(browser, "#treemap .layer")) < 1600
