"""The report page without a browser: all is there, nothing leaves the machine, no word of a user is markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest

from kvbench.analysis.compare import compare
from kvbench.contract.result import Ceiling
from kvbench.report.html import HEAD, Contents, make_report
from tests.needs import missing_module, require
from tests.report.made import big, case, many, side
from tests.store.factories import HOSTILE

VOID = {"meta", "input", "br", "link", "img", "hr"}
MARKUP = (
    "<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "\" onmouseover=\"alert(1)", "{{ 7*7 }}",
    "javascript:alert(1)", "</svg><iframe src='//x.example'>", "${alert(1)}", "]]>", "&lt;b&gt;", "\u202etxt.exe",
    "\x00",
)  # fmt: skip


@pytest.fixture(autouse=True)
def the_extra() -> None:
    require("report", missing_module("vl_convert") or missing_module("jinja2"))


class Parsed(HTMLParser):
    """Every element, attribute and text of a page; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def test_500_cases_are_all_there_in_two_megabytes() -> None:
    made = big()
    parsed = Parsed(made.html)
    assert (made.cases, made.rows) == (500, 1000)
    assert len(made.html.encode()) <= 2_000_000
    assert made.html.startswith(HEAD)
    assert made.undrawn == 0
    assert parsed.tags["figure"] == parsed.tags["svg"] == len(made.figures) > 20
    assert parsed.texts.count("skipped") >= 20  # 10 cases a side
    assert "modelled" in parsed.texts
    for row in many():
        if row.bench == "dots":
            assert f"kind={row.axes['kind']}" in made.html


def test_nothing_is_asked_of_the_network_and_only_the_own_script_may_run() -> None:
    made = big()
    parsed = Parsed(made.html)
    links = [value for _, name, value in parsed.attributes if name in ("src", "href", "data", "action", "xlink:href")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#f)|<base|<link|<object|<embed|<iframe", made.html)
    assert (parsed.tags["script"], parsed.tags["style"]) == (1, 1)
    (policy,) = [v for t, n, v in parsed.attributes if t == "meta" and n == "content" and "default-src" in v]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [a for a in parsed.attributes if a[1] == "style" or a[1].startswith("on")]
    identities = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(identities) == len(set(identities))
    for reference in re.findall(r"url\(#([^)]*)\)", made.html):
        assert reference in identities


def test_no_word_of_a_user_is_markup() -> None:
    words = [*HOSTILE, *MARKUP]
    rows = []
    for number, word in enumerate(words):
        for i in range(3):
            axes: dict[str, Any] = {"op": word, "bytes": 4096 << i, word: word}
            rows.append(case(
                word or "s", f"b{word}", axes, 1e9, metric=word or "m", unit="B/s" if number % 2 else word, kernel=word,
                reason=word, flags=(word,), resolved={"op": f"{word} {number}"}, fraction=0.5,
                ceilings=(Ceiling(word, 2e9, "measured", word),), digest=f"{100 * number + i:064x}",
            ))  # fmt: skip
    tree = {word: {word: word, "list": [{word: word}]} for word in words}
    machine = {
        "key": tree,
        "facts": {"cpu_name": MARKUP[0], "gpus": [{"name": w} for w in words]},
        "disagreements": words,
    }
    everywhere = " ".join(words)
    info = {"label": everywhere, "machine": machine, "env": tree, "profile": everywhere, "git": everywhere}
    sides = (side(everywhere, [rows], **info), side("b", [rows], **(info | {"hw_class": everywhere})))
    made = make_report(Contents(sides, "now", compare(sides), no_trends=everywhere, no_claims=everywhere))
    parsed = Parsed(made.html)
    assert len(made.figures) >= len(words)
    assert set(parsed.tags) <= set(Parsed(big().html).tags) | {"code"}
    assert (parsed.tags["script"], parsed.tags["style"]) == (1, 1)
    assert not [a for a in parsed.attributes if a[1].startswith("on") or a[1] in ("src", "style")]
    outside = re.sub(r"<(style|script)>.*?</\1>", "", made.html, flags=re.DOTALL)
    assert all(c.isprintable() or c == "\n" for c in outside)
    for word in (
        "{{ 7*7 }}",
        "<script>alert(1)</script>",
        "'); DROP TABLE results; --",
        "&lt;b&gt;",
        "[bold]markup[/]",
    ):
        assert word in parsed.text
    for drawn in made.figures:
        Parsed(drawn.svg)
        json.dumps(drawn.figure.spec, allow_nan=False)


def test_another_basis_stands_beside_the_number_and_in_the_figure() -> None:
    rows = [case("s", "b", {"n": i}, 1.0 + i, metric="m", unit="1", basis=basis)
            for i, basis in enumerate(("modelled", "emulated", "simulated", "measured"))]  # fmt: skip
    made = make_report(Contents((side("a", [rows]),), "now"))
    parsed = Parsed(made.html)
    for basis in ("modelled", "emulated", "simulated"):
        assert basis in parsed.texts
        assert f"[{basis}]" in parsed.text
    assert "not measured: 1 emulated, 1 modelled, 1 simulated; each is marked with its basis" in parsed.text
    (figure,) = [drawn.figure for drawn in made.figures]
    assert figure.basis == ("emulated", "measured", "modelled", "simulated")


@pytest.mark.parametrize("status", ["tainted", "skipped", "failed", "invalid", "suspect"])
def test_a_row_that_is_not_ok_says_so_and_why(status: Any) -> None:
    value = None if status in ("skipped", "failed") else 5e9
    rows = [case("s", "b", {"n": 1}, 1e9), case("s", "b", {"n": 2}, value, status=status, reason="because of X")]
    parsed = Parsed(make_report(Contents((side("a", [rows]),), "now")).html)
    assert status in parsed.texts
    assert "because of X" in parsed.text
    assert ("not drawn: 1" in parsed.text) == (status in ("skipped", "failed", "invalid"))
    assert ("5.00 GB/s" in parsed.text) == (value is not None)
    assert ("1 value of disturbed runs, hollow" in parsed.text) == (status == "tainted")


def test_a_run_that_ended_early_and_no_value_at_all() -> None:
    rows = [case("s", "b", {"n": 1}, None, status="failed", reason="it died")]
    made = make_report(Contents((side("a", [rows], status="interrupted"),), "now"))
    parsed = Parsed(made.html)
    assert "is interrupted: what is missing was not measured" in parsed.text
    assert made.figures == ()


def test_numbers_only_a_file_has_are_shown_and_not_drawn() -> None:
    values = (1e-300, 1e300, -1.0, 0.0, 5e-324)
    rows = [case("s", "b", {"n": i}, value, unit="1", low=value, high=value) for i, value in enumerate(values)]
    rows.append(case("s", "b", {"n": 9}, 1.0, unit="1", low=2.0, high=3.0))
    rows.append(case("s", "b", {"n": 10**400}, 1.0, unit="1"))
    made = make_report(Contents((side("a", [rows, rows]),), "now"))
    assert "1e+300" in Parsed(made.html).text


def test_the_figure_budget_is_said_and_each_bench_has_its_first() -> None:
    rows = [
        case("s", f"bench_{b}", {"n": n}, 1.0 + n, metric=f"m{m}", unit="1").with_(digest=f"{b * 10 + n:064x}")
        for b in range(31) for n in range(2) for m in range(3)
    ]  # fmt: skip
    made = make_report(Contents((side("a", [rows]),), "now"))
    assert (len(made.figures), made.undrawn) == (60, 33)
    assert "33 more figures are not drawn" in made.html
    assert {f"s-s-bench_{b}-m0" for b in range(31)} <= {drawn.figure.name for drawn in made.figures}
