"""Draw sensitivities: one bar for each layer, as high as its narrowest candidate is dear, in the colour of its format.

The same scale in every panel, logarithmic, so that layers of different kinds compare. Below, the budget curve.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from pipeline.quantize.choice import Choice, Chosen, options
from pipeline.quantize.sensitivities import Group

COLOURS: Mapping[Chosen, str] = {
    "16bit": "#64748b",
    "bf16": "#64748b",
    "fp16": "#64748b",
    "fp8": "#0d9488",
    "fp8_rowwise": "#65a30d",
    "int8_sq": "#7c3aed",
    "int8_wo": "#2563eb",
    "int4_awq": "#ea580c",
    "int4_wo": "#ca8a04",
    "w4a8_awq": "#be123c",
}
_WIDTH, _LEFT, _RIGHT, _TOP = 960, 80, 24, 98
_PANEL, _GAP, _CURVE = 96, 46, 150
_INK, _FAINT = "#1e293b", "#e2e8f0"
_NUMBER = re.compile(r"\.(\d+)\.")


def svg(choice: Choice, curve: Sequence[Choice], title: str) -> str:
    """Return an SVG document.

    Args:
        choice: gives the colours.
        curve: choices for other budgets, for the curve.
        title: of the whole.
    """
    return ET.tostring(_draw(choice, curve, title), encoding="unicode") + "\n"


def html(choice: Choice, curve: Sequence[Choice], title: str) -> str:
    """Return a page with the same drawing; a pointer on a bar shows its figures."""
    page = ET.Element("html", {"lang": "en"})
    head = ET.SubElement(page, "head")
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    ET.SubElement(head, "title").text = title
    body = ET.SubElement(page, "body", {"style": "margin:0;background:#ffffff"})
    body.append(_draw(choice, curve, title))
    return "<!doctype html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


@dataclass(frozen=True, kw_only=True)
class _Bar:
    group: Group
    format: Chosen
    depth: int
    score: float


def _draw(choice: Choice, curve: Sequence[Choice], title: str) -> ET.Element:
    panels = _panels(choice)
    height = _TOP + len(panels) * (_PANEL + _GAP) + (_CURVE + _GAP if curve else 0)
    size = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    look = {"font-family": "system-ui, sans-serif", "font-size": "11", "fill": _INK}
    named = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title}
    root = ET.Element("svg", {**named, **size, **look})
    ET.SubElement(root, "rect", {"width": str(_WIDTH), "height": str(height), "fill": "#ffffff"})
    _text(root, _LEFT, 26, title, size=16)
    narrowest = choice.sensitivities.candidates[0]
    _text(root, _LEFT, 44, f"estimated loss of {narrowest} in nats per token, by decoder layer; colour: format chosen")
    _legend(root, choice)
    scores = [bar.score for bars in panels.values() for bar in bars if bar.score > 0] or [1.0]
    decades = math.floor(math.log10(min(scores))), math.ceil(math.log10(max(scores)) + 1e-9)
    deepest = max(bar.depth for bars in panels.values() for bar in bars)
    for number, (kind, bars) in enumerate(panels.items()):
        top = _TOP + number * (_PANEL + _GAP)
        _text(root, _LEFT, top - 6, kind, size=12)
        _panel(root, top, bars, decades, deepest)
    if curve:
        _curve(root, _TOP + len(panels) * (_PANEL + _GAP), choice, curve)
    return root


def _panels(choice: Choice) -> dict[str, list[_Bar]]:
    """Bars by kind of layer; a layer outside the decoder is a kind of its own."""
    narrowest = choice.sensitivities.candidates[0]
    panels: dict[str, list[_Bar]] = {}
    for group, taken in zip(choice.sensitivities.groups, choice.taken, strict=True):
        found = _NUMBER.search(group.name)
        kind, depth = (group.name[found.end() :], int(found[1])) if found else (group.name, 0)
        score = next(option.score for option in options(group) if option.format == narrowest)
        panels.setdefault(kind, []).append(_Bar(group=group, format=taken.format, depth=depth, score=score))
    return panels


def _panel(root: ET.Element, top: int, bars: Sequence[_Bar], decades: tuple[int, int], deepest: int) -> None:
    low, high = decades
    bottom, inside = top + _PANEL, _WIDTH - _LEFT - _RIGHT
    step = inside / (deepest + 1)
    for decade in range(low, high + 1):
        y = bottom - _PANEL * (decade - low) / (high - low)
        _line(root, (_LEFT, y), (_WIDTH - _RIGHT, y), _FAINT)
        _text(root, _LEFT - 8, y + 4, f"1e{decade}", anchor="end")
    for bar in bars:
        share = (math.log10(bar.score) - low) / (high - low) if bar.score > 0 else 0.0
        height = max(1.5, _PANEL * share)
        x = _LEFT + bar.depth * step + step * 0.1
        place = {"x": f"{x:.1f}", "y": f"{bottom - height:.1f}", "width": f"{step * 0.8:.1f}"}
        drawn = ET.SubElement(root, "rect", {**place, "height": f"{height:.1f}", "fill": COLOURS[bar.format]})
        figures = ", ".join(f"{name} {score:.3g}" for name, score in bar.group.scores.items())
        ET.SubElement(drawn, "title").text = f"{bar.group.name}: {bar.format} ({figures} nats)"
    every = max(1, math.ceil((deepest + 1) / 32))
    for depth in range(0, deepest + 1, every):
        _text(root, _LEFT + (depth + 0.5) * step, bottom + 14, str(depth), anchor="middle")


def _curve(root: ET.Element, top: int, choice: Choice, curve: Sequence[Choice]) -> None:
    """Estimated loss over effective bits, linear; the choice of the colours is the filled point."""
    points = sorted({(each.effective_bits, each.loss) for each in (*curve, choice)})
    bits = [point[0] for point in points]
    low, high = math.floor(bits[0]), max(math.ceil(bits[-1]), math.floor(bits[0]) + 1)
    most = max(point[1] for point in points) or 1.0
    bottom, inside = top + _CURVE, _WIDTH - _LEFT - _RIGHT

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + inside * (point[0] - low) / (high - low), bottom - _CURVE * point[1] / most

    _text(root, _LEFT, top - 6, "estimated loss in nats per token, by effective bits", size=12)
    for share in (0, 0.5, 1):
        y = bottom - _CURVE * share
        _line(root, (_LEFT, y), (_WIDTH - _RIGHT, y), _FAINT)
        _text(root, _LEFT - 8, y + 4, f"{most * share:.2g}", anchor="end")
    for whole in range(low, high + 1):
        _text(root, place((whole, 0))[0], bottom + 14, str(whole), anchor="middle")
    for start, end in itertools.pairwise(points):
        _line(root, place(start), place(end), _INK)
    for point in points:
        x, y = place(point)
        taken = point == (choice.effective_bits, choice.loss)
        where = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "4", "stroke": _INK, "fill": _INK if taken else "#ffffff"}
        drawn = ET.SubElement(root, "circle", where)
        ET.SubElement(drawn, "title").text = f"{point[0]:.4g} bits: {point[1]:.3g} nats"


def _legend(root: ET.Element, choice: Choice) -> None:
    used = list(dict.fromkeys(option.format for option in choice.taken))
    for number, name in enumerate(sorted(used, key=list(COLOURS).index)):
        x = _LEFT + number * 110
        ET.SubElement(root, "rect", {"x": str(x), "y": "54", "width": "11", "height": "11", "fill": COLOURS[name]})
        _text(root, x + 16, 64, name)


def _text(root: ET.Element, x: float, y: float, words: str, *, anchor: str = "start", size: int = 11) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "font-size": str(size)}
    ET.SubElement(root, "text", place).text = words


def _line(root: ET.Element, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    place = {"x1": f"{start[0]:.1f}", "y1": f"{start[1]:.1f}", "x2": f"{end[0]:.1f}", "y2": f"{end[1]:.1f}"}
    ET.SubElement(root, "line", {**place, "stroke": colour})
