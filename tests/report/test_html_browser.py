"""The report page in a real headless Chromium: quiet console, no request, hover, filter, keyboard, light, dark, paper.

What a page does is asserted; how long it took is printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.needs import missing_module, require
from tests.report import chromium
from tests.report.made import big


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    """The page of 500 cases and two sides in a tab of its own."""
    require("report", missing_module("vl_convert") or missing_module("jinja2"))
    require("chromium", chromium.missing())
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(big().html, encoding="utf-8")
    began = time.perf_counter()
    with chromium.opened(path) as tab:
        timing = tab.run("performance.getEntriesByType('navigation')[0].domComplete")
        print(f"ready after {time.perf_counter() - began:.2f} s with the browser's start, {timing:.0f} ms in the page")
        yield tab


@pytest.fixture(autouse=True)
def fresh(page: chromium.Page) -> None:
    page.call("Emulation.setEmulatedMedia", media="", features=[])
    page.run("document.activeElement.blur(); document.getElementById('filter').value = ''; "
             "document.getElementById('filter').dispatchEvent(new Event('input')); scrollTo(0, 0)")  # fmt: skip


def visible(page: chromium.Page, selector: str) -> int:
    found: int = page.run(f"[...document.querySelectorAll({selector!r})].filter(e => e.offsetParent !== null).length")
    return found


def settle(page: chromium.Page) -> None:
    """Wait two frames: a scroll is told to the page with the next one."""
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")


def focus(page: chromium.Page, number: int) -> None:
    page.run(f"document.querySelectorAll('main figure')[{number}].focus()")
    settle(page)


def test_the_console_stays_quiet_and_only_the_file_is_read(page: chromium.Page) -> None:
    page.run("new Promise(done => setTimeout(() => done(1), 100))")
    assert page.of("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []
    assert len({event["request"]["url"] for event in page.of("Network.requestWillBeSent")}) == 1
    assert page.run("document.querySelectorAll('script').length") == 1
    assert page.run("document.querySelectorAll('img').length") == 0


def test_what_is_not_ours_cannot_run_even_if_it_got_in(page: chromium.Page) -> None:
    page.run("(() => { const s = document.createElement('div'); s.innerHTML = '<img src=x onerror=\"window.ran=1\">';"
             "document.body.append(s); const t = document.createElement('script'); t.textContent = 'window.ran=1';"
             "document.body.append(t); })()")  # fmt: skip
    page.run("new Promise(done => setTimeout(() => done(1), 100))")
    assert page.run("window.ran === undefined") is True
    page.run("document.body.lastChild.remove(); document.body.lastChild.remove()")
    page.events.clear()


def test_hovering_a_point_tells_all_about_it(page: chromium.Page) -> None:
    page.run("document.querySelectorAll('main figure')[3].scrollIntoView()")
    settle(page)
    mark: dict[str, Any] = page.run(
        "(() => { const m = document.querySelectorAll('main figure')[3].querySelector('svg [aria-label]');"
        "const b = m.getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2, "
        "text: m.getAttribute('aria-label')}; })()"
    )
    page.move(mark["x"] + 2, mark["y"])
    assert page.run("document.getElementById('tip').hidden") is False
    shown = page.run("[...document.getElementById('tip').children].map(e => e.textContent)")
    assert " · ".join(shown) in page.run(
        "[...document.querySelectorAll('main figure')[3].querySelectorAll('[aria-label]')].map(e => "
        "e.getAttribute('aria-label')).join('\\n')"
    )
    assert any("GB/s" in line for line in shown)
    page.move(2, 2)
    assert page.run("document.getElementById('tip').hidden") is True


def test_filtering_shows_the_rows_with_all_words_and_nothing_else(page: chromium.Page) -> None:
    whole = visible(page, "table.filtered tbody tr")
    page.key("/", "/")
    assert page.run("document.activeElement.id") == "filter"
    began = time.perf_counter()
    page.write("HOST_BANDWIDTH write 64KiB")
    rows = visible(page, "table.filtered tbody tr")
    print(f"filtered {whole} rows to {rows} in {time.perf_counter() - began:.3f} s")
    # three thread counts: a row a side, and one in the comparison
    assert rows == 9
    assert page.run("document.getElementById('found').textContent").startswith("9 of ")
    texts = page.run("[...document.querySelectorAll('table.filtered tbody tr')].filter(e => e.offsetParent !== null)"
                     ".map(e => e.textContent)")  # fmt: skip
    assert all("op=write" in text and "bytes=64KiB" in text for text in texts)
    assert visible(page, "section[id^='suite-']") == 1
    page.key("Escape")
    assert visible(page, "table.filtered tbody tr") == whole
    page.key("/", "/")
    page.write("<img src=x> nothing-has-this")
    assert visible(page, "table.filtered tbody tr") == 0
    assert visible(page, "main figure") == 0


def test_keys_go_from_figure_to_figure_and_from_point_to_point(page: chromium.Page) -> None:
    page.key("n", "n")
    page.key("n", "n")
    assert page.run("[...document.querySelectorAll('main figure')].indexOf(document.activeElement)") == 1
    page.key("p", "p")
    assert page.run("[...document.querySelectorAll('main figure')].indexOf(document.activeElement)") == 0
    focus(page, 3)
    page.key("ArrowRight")
    first = page.run("document.getElementById('tip').textContent")
    page.key("ArrowRight")
    second = page.run("document.getElementById('tip').textContent")
    page.key("ArrowLeft")
    assert first
    assert first != second
    assert page.run("document.getElementById('tip').textContent") == first
    assert page.run("document.querySelectorAll('.at').length") == 1
    page.key("Escape")
    assert page.run("document.getElementById('tip').hidden") is True


def colours(page: chromium.Page) -> tuple[str, str, str]:
    found = page.run("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
                     "getComputedStyle(document.querySelector('svg text')).fill]")  # fmt: skip
    return found[0], found[1], found[2]


def test_light_dark_and_paper(page: chromium.Page) -> None:
    def media(scheme: str, kind: str = "") -> tuple[str, str, str]:
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", media=kind, features=feature)
        return colours(page)

    light, dark, paper = media("light"), media("dark"), media("dark", "print")
    assert len({light[0], dark[0], paper[0]}) == 3
    assert paper[0] == "rgb(255, 255, 255)"
    assert light[1] == light[2]  # words in pictures follow the theme
    assert dark[1] == dark[2]
    assert visible(page, ".tools") == 0
    media("dark")
    page.key("t", "t")
    assert colours(page) == light
    page.key("t", "t")
    assert colours(page) == dark
    page.run("delete document.documentElement.dataset.theme")


def test_a_phone_needs_no_sideways_scrolling(page: chromium.Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=False)
    try:
        assert page.run("document.documentElement.scrollWidth") <= 430
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
