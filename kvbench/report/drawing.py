"""Specs to pictures by vl-convert, and SVG made fit to stand in a page: own ids, the page's colours, no ballast."""

from __future__ import annotations

import re
from typing import Any

from kvbench.errors import MissingExtra
from kvbench.report.figures import LIGHT, SERIES, Spec

_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()} | {
    colour: f"var(--s{i})" for i, colour in enumerate(SERIES)
}
_TAG = re.compile(r'<(/?)([a-zA-Z]+)((?:\s+[\w:.-]+="[^"]*")*)\s*(/?)>')
_ATTRIBUTE = re.compile(r'\s+([\w:.-]+)="([^"]*)"')
_ROLE = re.compile(r'aria-roledescription="(?:axis|title|legend)"')
_LONG = re.compile(r"(\d+\.\d{2})\d+")
_DROPPED = frozenset({
    "pointer-events", "aria-hidden", "aria-roledescription", "role", "font-family", "xmlns", "xmlns:xlink", "version",
})  # fmt: skip
_DEFAULTS = {"opacity": "1", "stroke-miterlimit": "10"}
_DRAWN = frozenset({"d", "transform", "x", "y", "x2", "y2", "width", "height"})
_ALLOWED = frozenset({"svg", "g", "path", "line", "rect", "text", "tspan", "defs", "clipPath", "circle", "title"})


def converter() -> Any:
    """Return the module vl_convert. Raises MissingExtra when it is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra("vl-convert-python", "report", "a report") from None
    return vl_convert


def to_svg(spec: Spec) -> str:
    """Return ``spec`` as SVG. Raises ValueError when it is no valid spec. Nothing is fetched."""
    drawn: str = converter().vegalite_to_svg(spec, allowed_base_urls=[])
    return drawn


def to_png(svg: str) -> bytes:
    """Return a drawn figure as PNG at twice its size."""
    drawn: bytes = converter().svg_to_png(svg, scale=2)
    return drawn


def for_page(svg: str, name: str) -> str:
    """Return ``svg`` for standing beside others in one page: ids begin with ``name``, colours follow the page's theme.

    Descriptions stay on marks (``aria-label``); empty frames and what repeats on every element go, half the size.
    Raises ValueError for an element a chart has no use for.
    """

    def tag(found: re.Match[str]) -> str:
        closing, element, attributes, empty = found.groups()
        if element not in _ALLOWED:
            raise ValueError(f"a figure holds the element {element}, expected one of {', '.join(sorted(_ALLOWED))}")
        kept = [_attribute(m[1], m[2], name, attributes) for m in _ATTRIBUTE.finditer(attributes)]
        role = ' role="img"' if any(part.startswith(" aria-label=") for part in kept) else ""
        return f"<{closing}{element}{''.join(kept)}{role}{empty}>"

    slim = _TAG.sub(tag, _TAG.sub(_frame, svg))
    return re.sub(r"<(\w+)((?: [\w:.-]+=\"[^\"]*\")*)></\1>", r"<\1\2/>", slim)


def _frame(found: re.Match[str]) -> str:
    """Return nothing for the paths Vega draws for hit testing alone, which nobody sees."""
    attributes = dict(_ATTRIBUTE.findall(found[3]))
    if found[2] != "path" or attributes.get("class") not in ("background", "foreground"):
        return found[0]
    hidden = attributes.get("display") == "none" or attributes.get("d") in ("", "M0,0h0v0h0Z")
    return "" if hidden or not attributes.keys() & {"stroke", "fill"} else found[0]


def _attribute(key: str, value: str, name: str, beside: str) -> str:
    if key in _DROPPED or _DEFAULTS.get(key) == value or key.startswith(("on", "href", "xlink")):
        return ""
    if key == "class" and value not in ("marks", "background", "foreground"):
        # what a hover or a key may stop at
        return ' class="mark"' if "role-mark" in value else ""
    if key == "aria-label":
        # titles, axes and legends are text in the picture already
        return "" if _ROLE.search(beside) else f' {key}="{value}"'
    if key == "id":
        value = f"{name}-{value}"
    elif value.startswith("url(#"):
        value = f"url(#{name}-{value[5:]}"
    elif key in ("fill", "stroke"):
        value = _VARIABLES.get(value, value)
    elif key in _DRAWN:
        value = _LONG.sub(r"\1", value)
    return f' {key}="{value}"'
