"""A report as one page that asks the network for nothing: pictures drawn beforehand, one style sheet, one script.

The content security policy of the page allows exactly its own style and script, by their hashes: even a string that got
past the escaping could neither run nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvbench import __version__
from kvbench.analysis.compare import Comparison, Side
from kvbench.errors import MissingExtra, printable
from kvbench.report import page_tables as tables
from kvbench.report.curve_figures import bench_figures
from kvbench.report.decision_figures import bars, trend_figure
from kvbench.report.drawing import converter, for_page, to_svg
from kvbench.report.figures import Figure
from kvbench.report.ladder_figure import ladder_figure
from kvbench.report.pooled import Pooled, pool, reading_order
from kvbench.report.replay_figures import replay_figures
from kvbench.report.routes_figure import map_figures

if TYPE_CHECKING:
    from kvbench.analysis.claim_check import Check
    from kvbench.analysis.shapes import Shape
    from kvbench.analysis.trend import Trend

MOST_FIGURES = 60  # of benches; drawing one takes 40 ms and 5 kB
MOST_TRENDS = 12
# Benches whose rows want pictures of their own; all others have curves or dots.
OWN_FIGURES: Mapping[tuple[str, str], Callable[[Sequence[Pooled], Sequence[str]], Iterable[Figure]]] = {
    ("routes", "map"): map_figures,
    ("routes", "replay"): replay_figures,
}
# The first bytes of every report: what may be overwritten without asking is told by them.
HEAD = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="kvbench '
_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class Contents:
    """What a report is made of. ``sides``: what was selected, the base of a comparison first.

    ``shapes``: of each other side against the first. ``no_trends`` and ``no_claims`` say why there are none.
    """

    sides: tuple[Side, ...]
    made_at: str
    comparison: Comparison | None = None
    shapes: Mapping[int, Sequence[Shape]] = field(default_factory=dict)
    trends: Sequence[Trend] = ()
    no_trends: str = ""
    claims: Sequence[Check] = ()
    no_claims: str = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure with its picture as vl-convert drew it."""

    figure: Figure
    svg: str


@dataclass(frozen=True, slots=True)
class Report:
    """The page and its figures. ``rows``: one a case, metric and side; ``undrawn``: figures left to the tables."""

    html: str
    figures: tuple[Drawn, ...]
    cases: int
    rows: int
    undrawn: int


def names_of(sides: Sequence[Side]) -> list[str]:
    """Return what each side is called in the page: its letter and the selector or label."""
    return [f"{chr(ord('a') + i) if i < 26 else str(i)}: {printable(side.name, 60)}" for i, side in enumerate(sides)]


def make_report(contents: Contents) -> Report:
    """Return the report of ``contents``. Raises MissingExtra without the extra ``report``."""
    template, converter_there = _template(), converter()
    assert converter_there is not None
    names = names_of(contents.sides)
    shown = names if len(names) > 1 else [contents.sides[0].name]
    rows = [pooled for i, side in enumerate(contents.sides) for pooled in pool(i, side.runs)]
    benches: dict[tuple[str, str], list[Pooled]] = {}
    for pooled in rows:
        benches.setdefault((pooled.row.suite, pooled.row.bench), []).append(pooled)
    for found in benches.values():
        found.sort(key=reading_order)  # runs of a group are measured in shuffled order
    of_benches, undrawn = _chosen(
        {key: list(OWN_FIGURES.get(key, bench_figures)(found, shown)) for key, found in benches.items()}
    )
    ladders = [
        figure for i, side in enumerate(contents.sides)
        if (figure := ladder_figure([p for p in rows if p.side == i], _facts(side), shown[i], i + 1)) is not None
    ]  # fmt: skip
    against = {
        other.index: list(bars(other, names[other.index][0], names[0][0]))
        for other in (contents.comparison.against if contents.comparison else ())
    }  # fmt: skip
    trends = _trends(contents.trends)
    used: dict[str, int] = {}
    drawn: list[Drawn] = []

    def draw(figure: Figure) -> dict[str, Any]:
        number = used[figure.name] = used.get(figure.name, 0) + 1
        if number > 1:
            figure = replace(figure, name=f"{figure.name}-{number}")
        svg = to_svg(figure.spec)
        drawn.append(Drawn(figure, svg))
        return {"figure": figure, "svg": _markup(for_page(svg, f"f{len(drawn)}"))}

    view = {
        "head": _markup(HEAD), "version": __version__, "made_at": contents.made_at, "title": ", ".join(shown),
        "several": len(names) > 1,
        "sides": [tables.side(name, side) for name, side in zip(names, contents.sides, strict=True)],
        "warnings": tables.warnings(rows, contents.sides), "machine": tables.machine(contents.sides),
        "ladders": [draw(figure) for figure in ladders],
        "suites": [
            {
                "name": suite,
                "benches": [
                    {
                        **tables.bench(benches[suite, name], names),
                        "figures": [draw(figure) for figure in of_benches.get((suite, name), ())],
                    } for other, name in benches if other == suite
                ],
            } for suite in dict.fromkeys(suite for suite, _ in benches)
        ],
        "undrawn": undrawn,
        "comparisons": [] if contents.comparison is None else [
            {
                **tables.against(other, names, contents.shapes.get(other.index, ())),
                "figures": [draw(figure) for figure in against[other.index]],
            } for other in contents.comparison.against
        ],
        "verdict": contents.comparison.verdict if contents.comparison else "",
        "trends": tables.trends(contents.trends), "trend_figures": [draw(figure) for figure in trends],
        "no_trends": contents.no_trends, "claims": tables.claims(contents.claims), "no_claims": contents.no_claims,
        "canaries": tables.canaries(contents.sides, names), "flags": tables.flags(rows),
    }  # fmt: skip
    style, script = _packaged("page.css"), _packaged("page.js")
    view |= {"style": _markup(style), "script": _markup(script), "policy": _policy(style, script)}
    cases = len({pooled.row.digest for pooled in rows})
    return Report(template.render(view), tuple(drawn), cases, len(rows), undrawn)


def _chosen(
    figures: Mapping[tuple[str, str], list[Figure]],
) -> tuple[Mapping[tuple[str, str], Sequence[Figure]], int]:
    """Return at most ``MOST_FIGURES``, in turns over the benches so that each has its first, and how many are left."""
    chosen: dict[tuple[str, str], list[Figure]] = {}
    left = MOST_FIGURES
    for turn in range(max(map(len, figures.values()), default=0)):
        for key, found in figures.items():
            if turn < len(found) and left:
                chosen.setdefault(key, []).append(found[turn])
                left -= 1
    return chosen, sum(map(len, figures.values())) - sum(map(len, chosen.values()))


def _trends(found: Iterable[Trend]) -> list[Figure]:
    """Return the pictures of the series that changed most, then of the longest."""
    ordered = sorted(
        found, key=lambda t: (-len(t.changes), -max((abs(1 - c.ratio) for c in t.changes), default=0), -sum(t.counted))
    )
    return [figure for trend in ordered[:MOST_TRENDS] if (figure := trend_figure(trend)) is not None]


def _facts(side: Side) -> Mapping[str, Any]:
    found = side.runs[0].info.machine.get("facts")
    return found if isinstance(found, dict) else {}


def _template() -> Any:
    try:
        import jinja2
        import markupsafe
    except ImportError:
        raise MissingExtra("jinja2", "report", "a report") from None

    def plain(value: object) -> object:
        """Every word that reaches the page passes here: on one line, no control characters; escaping comes after."""
        return value if isinstance(value, markupsafe.Markup) else printable(str(value), _TEXT)

    environment = jinja2.Environment(
        autoescape=True, finalize=plain, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.from_string(_packaged("page.html.j2"))


def _markup(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)  # our own files and pictures whose words the converter has escaped


def _packaged(name: str) -> str:
    return (files("kvbench.report") / "page" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    hashed: Callable[[str], str] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()  # noqa: E731
    return f"default-src 'none'; style-src 'sha256-{hashed(style)}'; script-src 'sha256-{hashed(script)}'"
