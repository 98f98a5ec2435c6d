"""The page of a record in a real browser: hover, zoom, how wide it is, and how it grows.

They need Chromium (`apt-get install chromium fonts-noto-cjk`) and Playwright (`make browser`).
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import pytest

from lockstep.extensions.report import live
from lockstep.extensions.report.page import render
from lockstep.extensions.report.reading import Record

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: make browser installs it"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]

BAD = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium


@pytest.fixture
def problems() -> list[str]:
    """What the browser complains of: errors of scripts, refused ones, what it asks others for."""
    return []


@pytest.fixture
def tab(driver: Any, problems: list[str], request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = getattr(request, "param", (1400, "light"))
    # Each test has a browser of its own, as it starts helper processes when it needs them.
    browser = driver.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))

    def note_request(asked: Any) -> None:
        if not asked.url.startswith(("file://", "http://127.0.0.1:")):
            problems.append(f"asks for {asked.url}")

    page.on("request", note_request)
    yield page
    browser.close()
    assert problems == []


def open_page(tab: Any, folder: Path, *others: Path) -> None:
    text = render(Record(folder), [Record(other) for other in others])
    path = folder / "report.html"
    path.write_text(text)
    tab.goto(path.as_uri())


def plot(tab: Any, title: str) -> Any:
    """The part of a curve's chart over which the pointer reads values."""
    figure = tab.locator("#curve-charts figure").filter(has=tab.locator(f'h3:text-is("{title}")'))
    over = figure.locator(".u-over")
    over.scroll_into_view_if_needed()
    return over


def hover(tab: Any, over: Any, part: float, height: float = 0.5) -> str:
    """Moves the pointer to a part of the width of a chart, and returns what the page tells then."""
    box = over.bounding_box()
    tab.mouse.move(box["x"] + part * (box["width"] - 1), box["y"] + height * box["height"])
    tip: str = tab.locator("#tip").inner_text()
    return tip


def drag(tab: Any, over: Any, begin: float, end: float) -> None:
    hover(tab, over, begin)
    tab.mouse.down()
    hover(tab, over, (begin + end) / 2)
    hover(tab, over, end)
    tab.mouse.up()


def test_values_are_read_and_zoomed_into(tab: Any, tmp_path: Path) -> None:
    lines = []
    for step in range(10, 101, 10):
        lines.append(made.logged(step, {"acc": step / 1000}, "test"))
    made.write(tmp_path, 2, rows=101, loss=lambda step: 1.0 + step, lines=tuple(lines))
    open_page(tab, tmp_path)
    loss = plot(tab, "loss")
    assert hover(tab, loss, 0.5) == "step 51\n51"
    assert hover(tab, loss, 1.0) == "step 101\n101"
    assert hover(tab, plot(tab, "acc (test)"), 1.0) == "step 100\n0.1"
    # Zooming one chart zooms all.
    drag(tab, loss, 0.2, 0.3)
    assert hover(tab, loss, 0.0) == "step 21\n21"
    assert hover(tab, plot(tab, "Throughput in samples/s"), 1.0)[:7] in ("step 30", "step 31")
    stack = tab.locator("#over-time .u-over")
    stack.scroll_into_view_if_needed()
    assert hover(tab, stack, 0.0).startswith("step 21 · 125 ms\ncommunication: 13 ms\n")
    tab.locator("#unzoom").click()
    assert hover(tab, plot(tab, "loss"), 0.0) == "step 1\n1"
    drag(tab, loss, 0.2, 0.3)
    loss.dblclick()
    assert hover(tab, loss, 0.0) == "step 1\n1"
    assert tab.locator("#unzoom").is_disabled()
    # Smoothed, the rising line lags behind; against time, the middle is that of the time.
    tab.locator("#smoothing").fill("0.9")
    smooth = float(hover(tab, plot(tab, "loss"), 1.0).split("\n")[1])
    assert 90 < smooth < 95
    tab.locator("#smoothing").fill("0")
    tab.locator("#axis").select_option("seconds")
    assert hover(tab, plot(tab, "loss"), 1.0) == "12.6 s\n101"
    tab.locator("#all-log").check()
    assert hover(tab, plot(tab, "loss"), 1.0) == "12.6 s\n101"


def test_bars_and_ranks_say_what_they_are(tab: Any, tmp_path: Path) -> None:
    made.write(tmp_path, 8, rows=100, work=lambda rank, _: {"data": 0.01 * (1 + (rank == 5))})
    open_page(tab, tmp_path)
    part = tab.locator('[data-tip^="rank 5 · data"]')
    part.hover()
    assert tab.locator("#tip").inner_text() == "rank 5 · data · 20 ms"
    # A slow rank takes a part of the width that is in proportion, of two ranks as of eight.
    track = tab.locator(".bar .track").nth(5).bounding_box()
    assert part.bounding_box()["width"] / track["width"] == pytest.approx(20 / 33, abs=0.01)
    ranks = tab.locator("#slow-ranks .u-over")
    ranks.scroll_into_view_if_needed()
    assert hover(tab, ranks, 0.5, 5.5 / 8).endswith("\n100 % longer than the median rank")
    assert hover(tab, ranks, 0.5, 4.5 / 8).startswith("rank 4 · step 5")
    assert tab.locator("#tip").inner_text().endswith("\nlike the median rank")


def test_runs_are_drawn_together_and_one_by_one(tab: Any, tmp_path: Path) -> None:
    made.write(tmp_path / "a", 2, rows=50, loss=lambda step: 2.0)
    made.write(tmp_path / "b", 2, rows=100, loss=lambda step: 4.0)
    open_page(tab, tmp_path / "a", tmp_path / "b")
    assert hover(tab, plot(tab, "loss"), 0.25) == "step 26\na: 2\nb: 4"
    tab.locator('[data-run="1"]').uncheck()
    assert hover(tab, plot(tab, "loss"), 1.0) == "step 50\na: 2"


def test_text_of_the_run_is_never_run(tab: Any, problems: list[str], tmp_path: Path) -> None:
    logged = made.logged(3, {BAD: 1.0}, BAD)
    lines = ({"choices": [[BAD, BAD, BAD]]}, logged, {"warning": BAD, "step": 1})
    made.write(tmp_path, 2, rows=20, lines=lines, host=BAD, command=[BAD, BAD])
    open_page(tab, tmp_path)
    hover(tab, tab.locator(".u-over").nth(1), 0.5)
    assert problems == []
    # Even text that got into the page as code would not run.
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'alert(3)'}))"
    )
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(4)>')")
    tab.wait_for_function("document.querySelector('img').complete")
    assert not [text for text in problems if text.startswith("dialog")]
    assert "Content Security Policy" in problems[0]
    problems.clear()


def all_of_a_run(folder: Path, ranks: int, *, fails: bool) -> None:
    """A record that has everything that a page shows, with long names and values."""
    warning = {"warning": f"a long word: {'x' * 200}\nand more", "step": 60, "time": 1e9}
    values = {"a_long_name_of_a_metric_" * 3: 12345.678}
    lines: list[Any] = [made.logged(step, values, training=True) for step in range(10, 50, 10)]
    about = {"command": ["train.py", *["--an-argument", "with a value"] * 12]}
    work = made.noisy({ranks - 1: ("data", 0.05)} if fails else {})
    end = "failed" if fails else "ok"
    loss = (lambda step: math.nan if step > 40 else 1e-7) if fails else (lambda step: 1e6)
    made.write(
        folder, ranks, rows=50, work=work, loss=loss, end=end, lines=(*lines, warning), **about
    )
    if fails:
        words = "\n".join(["FIRST FAILURE: rank 1", *["  a line of the traceback" * 8] * 20])
        told = {"host": "node1", "kind": "failure", "text": words, "time": 1.9e9, "exit_code": 1}
        (folder / "1-a.launcher.record").write_text(json.dumps(told) + "\n")


@pytest.mark.thorough
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ranks", [2, 64])
@pytest.mark.parametrize(
    "tab", [(1400, "light"), (1400, "dark"), (420, "light"), (420, "dark")], indirect=True
)
def test_nothing_runs_out_of_the_page(tab: Any, ranks: int, fails: bool, tmp_path: Path) -> None:
    all_of_a_run(tmp_path, ranks, fails=fails)
    open_page(tab, tmp_path)
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    beyond = tab.evaluate(
        """[...document.querySelectorAll('a, h1, h2, h3, p, li, dd, canvas, button, label')]
           .filter(e => !e.closest('.wide') && e.getBoundingClientRect().right > innerWidth + 1)
           .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    # The bars of two ranks are as wide as those of many.
    track = tab.locator(".bar .track").first.bounding_box()
    figure = tab.locator(".bars").bounding_box()
    assert track["width"] > 0.85 * figure["width"]
    (tmp_path / "page.png").write_bytes(tab.screenshot(full_page=True))  # to be looked at


def test_a_live_page_grows_in_place(tab: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(live, "REFRESH_S", 0.1)
    made.write(tmp_path, 2, rows=0, end=None)
    page = live.LivePage(Record(tmp_path))
    server = live.make_server(page)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        tab.goto(f"http://127.0.0.1:{server.server_port}/")
        tab.evaluate("window.isTheSamePage = true")
        assert tab.locator("#curve-charts").count() == 0
        made.write(tmp_path, 2, rows=50, end=None, loss=lambda step: 1.0 + step)
        figure = tab.locator("#curve-charts figure").first
        figure.wait_for()  # the first steps have been made
        table = tab.locator("details").filter(has_text="The same as a table")
        table.locator("summary").click()
        loss = plot(tab, "loss")
        drag(tab, loss, 0.2, 0.4)
        zoomed = hover(tab, loss, 0.0)
        tab.mouse.move(0, 0)
        made.write(tmp_path, 2, rows=80, end=None, loss=lambda step: 1.0 + step)
        figure.locator(".value").get_by_text("80", exact=True).wait_for()
        assert hover(tab, plot(tab, "loss"), 0.0) == zoomed
        assert tab.locator("dt:text-is('Last step') + dd").inner_text() == "80"
        assert table.get_attribute("open") is not None
        assert tab.evaluate("window.isTheSamePage")
        assert tab.locator("#connection").inner_text() == ""
    finally:
        tab.goto("about:blank")
        server.shutdown()
        thread.join()
        server.server_close()
