"""The map of routes: which policy wins at which link bandwidth and context length, and where the model says another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.errors import printable
from kvbench.report.figures import DOT, LIGHT, SERIES, Figure, Spec, framed
from kvbench.report.pooled import Pooled
from kvbench.units import format_value

STEP, TALL = 64, 36  # pixels of a place
POLICIES = ("strata", "neo", "ellm_isolated", "ellm_elastic", "directkv", "recompute", "preempt", "lru")
BESIDE = ("questions", "fits", "output", "machine", "model")  # axes that make a map of their own
AXIS = {"labelAngle": 0}


def map_figures(rows: Sequence[Pooled], sides: Sequence[str]) -> Iterator[Figure]:
    """Yield a map for each side, machine, model and pressure that has at least two places.

    ``rows``: all rows of routes/map. A place is coloured by its winner; the number is its gain over computing again,
    and a frame marks a place where the model names another route.
    """
    maps: dict[tuple[Any, ...], list[Pooled]] = {}
    for pooled in rows:
        if pooled.primary and pooled.drawable and pooled.row.detail.get("winner") in POLICIES:
            key = (pooled.side, *(pooled.row.axes.get(name) for name in BESIDE))
            maps.setdefault(key, []).append(pooled)
    for key, places in maps.items():
        if len(places) > 1:
            yield _figure(places, dict(zip(("side", *BESIDE), key, strict=True)), sides)


def _figure(places: Sequence[Pooled], of: dict[str, Any], sides: Sequence[str]) -> Figure:
    values = [_place(pooled) for pooled in places]
    links, contexts = (sorted({value[name] for value in values}) for name in ("link", "context"))
    winners = [name for name in POLICIES if any(value["winner"] == name for value in values)]
    x: Spec = {"field": "link", "type": "ordinal", "sort": links, "title": "link, GB/s in each direction", "axis": AXIS}
    y: Spec = {
        "field": "context", "type": "ordinal", "sort": list(reversed(contexts)), "title": "tokens of context",
    }  # fmt: skip
    colour: Spec = {
        "field": "winner", "type": "nominal", "title": None,
        "scale": {"domain": winners, "range": [SERIES[POLICIES.index(name)] for name in winners]},
        "legend": {"symbolType": "square", "symbolStrokeWidth": 0},
    }  # fmt: skip
    body: Spec = {
        "width": STEP * len(links), "height": TALL * len(contexts), "data": {"values": values},
        "layer": [
            {"mark": {"type": "rect"}, "encoding": {"x": x, "y": y, "color": colour, "description": {"field": "tip"}}},
            {
                "transform": [{"filter": "!datum.agree"}],
                "mark": {"type": "rect", "filled": False, "stroke": LIGHT["ink"], "strokeWidth": 2, "aria": False},
                "encoding": {"x": x, "y": y},
            },
            {
                "mark": {"type": "text", "color": LIGHT["paper"], "fontWeight": "bold", "aria": False},
                "encoding": {"x": x, "y": y, "text": {"field": "gain"}},
            },
        ],
    }  # fmt: skip
    side = f"{sides[of['side']]}: " if len(sides) > 1 else ""
    title = f"{side}which policy wins, {of['model']} on {of['machine']}, each context asked {of['questions']}x"
    notes = [
        f"The number is how many times as fast the winner is as computing again; {of['fits']} contexts fit near, "
        f"{of['output']} output tokens. "
        "A frame: the model names another route than the winner's.",
    ]
    if any(pooled.marked for pooled in places):
        notes.append("Some places are not ok; see the table.")
    words = " ".join(["routes/map", title, *winners, *(value["tip"] for value in values)])
    return Figure(
        "routes-map", "routes", printable(title, 160), tuple(notes), framed(title, "", body), printable(words, 8_000),
        tuple(sorted({pooled.row.basis for pooled in places})),
    )  # fmt: skip


def _place(pooled: Pooled) -> dict[str, Any]:
    row = pooled.row
    detail, gain = row.detail, row.value if row.value is not None else 0.0
    parts = [
        f"link {row.axes['link']} GB/s, {row.axes['context']} tokens",
        f"{detail['winner']} wins, {format_value(gain, '1')} times recompute",
        f"second {detail.get('second')}", f"model: {detail.get('model_winner')}", f"{row.basis}, {row.status}",
    ]  # fmt: skip
    return {
        "link": row.axes["link"], "context": row.axes["context"], "winner": str(detail["winner"]),
        "agree": detail.get("agree") is True, "gain": format_value(gain, "1"),
        "tip": DOT.join(printable(part, 100) for part in parts),
    }  # fmt: skip
