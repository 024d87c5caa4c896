"""Draws small charts as SVG text for pages that must work without a network, in light and dark.

Colours are CSS variables or classes of the page (commands/report_command.py). Must not know runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.plain_text import escape_html

WIDTH = 960.0
LEFT = 64.0  # for the labels of the vertical axis
RIGHT = 12.0
POINTS_MAX = 1200
COLOURS = 4  # the second line has the first colour

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """Marks a place on the horizontal axis, with a text that is shown next to the pointer.

    `name`: the mark's own in the page. `target`: the name of a part of the page, to link to.
    """

    at: float
    text: str
    name: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """Is a coloured piece of a lane, from `began` to `ended`. `kind`: a class of the page."""

    began: float
    ended: float
    kind: str


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Return round numbers that divide a range into about `count` parts."""
    if not (math.isfinite(least) and math.isfinite(most)) or most <= least:
        return [least]
    raw = (most - least) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= raw * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [k * step for k in range(first, math.floor(most / step + 1e-9) + 1)]


def thin_points(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    """Return at most about `most` points that keep the look: least and greatest of each stretch."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) * 2 / most)
    found: list[Point] = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return found


def draw_line(
    points: Sequence[Point],
    marks: Sequence[Mark],
    *,
    label: str,
    height: float = 240.0,
) -> str:
    """Draw a line through the finite points; the rest leave gaps. `label`: the name of x."""
    return draw_lines({"": points}, marks, label=label, height=height)


def draw_lines(
    lines: Mapping[str, Sequence[Point]],
    marks: Sequence[Mark],
    *,
    label: str,
    height: float = 240.0,
) -> str:
    """Draw several lines by their names; the first one is bold."""
    finite = [p for points in lines.values() for p in points if math.isfinite(p[1])]
    if not finite:
        return "<p>Nothing to draw.</p>"
    xs, ys = [p[0] for p in finite], [p[1] for p in finite]
    place = _Frame(min(xs), max(xs), min(ys), max(ys), height)
    shapes = [_mark(place.x(m.at), height, m) for m in marks if min(xs) <= m.at <= max(xs)]
    for number, (name, points) in enumerate(lines.items()):
        title = f"<title>{escape_html(name)}</title>" if name else ""
        kind = f"line more{number % COLOURS}" if number else "line"
        shapes.append(f'<path class="{kind}" d="{_trace(place, points)}">{title}</path>')
    return _svg(height, [*place.axes(label), *shapes], label)


def _trace(place: _Frame, points: Sequence[Point]) -> str:
    pieces: list[str] = []
    pen = "M"
    for x, y in thin_points(points):
        if not math.isfinite(y):
            pen = "M"
            continue
        pieces.append(f"{pen}{place.x(x):.1f} {place.y(y):.1f}")
        pen = "L"
    return " ".join(pieces)


def draw_bars(bars: Sequence[tuple[str, float, str]], *, label: str, height: float = 180.0) -> str:
    """Draw upright bars, side by side: a name, a height and a text for each. `label`: of x."""
    most = max((bar[1] for bar in bars), default=0.0)
    if most <= 0:
        return "<p>Nothing to draw.</p>"
    place = _Frame(0.0, float(len(bars)), 0.0, most, height)
    shapes = place.axes(label, names=[bar[0] for bar in bars])
    for number, (_, value, text) in enumerate(bars):
        left, right = place.x(number) + 1, place.x(number + 1) - 1
        top = place.y(value)
        shapes.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{max(place.y(0) - top, 0):.1f}"><title>{escape_html(text)}</title></rect>'
        )
    return _svg(height, shapes, label)


def draw_lanes(
    lanes: Mapping[str, Sequence[Band]], marks: Sequence[Mark], wall: float, *, label: str
) -> str:
    """Draw a lane of bands for each name, over the time from 0 to `wall` seconds."""
    row = max(min(18.0, 1600.0 / max(len(lanes), 1)), 2.0)
    height = row * len(lanes) + 40.0
    place = _Frame(0.0, max(wall, 1e-9), 0.0, 1.0, height)
    shapes = place.axes(label, rows=False)
    for number, (name, bands) in enumerate(lanes.items()):
        top = 8.0 + row * number
        if row >= 9:
            shapes.append(_text("name", LEFT - 6, top + row * 0.7, name))
        for kind, began, ended in _merge(bands, wall / WIDTH):
            left, right = place.x(began), place.x(ended)
            shapes.append(
                f'<rect class="{kind}" x="{left:.2f}" y="{top:.1f}" width="{right - left:.2f}" '
                f'height="{row * 0.82:.1f}"><title>{escape_html(name)}: {kind}, '
                f"{ended - began:.2f} s from {began:.2f} s on</title></rect>"
            )
    shapes += [_mark(place.x(mark.at), height - 32, mark) for mark in marks]
    return _svg(height, shapes, label)


def _merge(bands: Sequence[Band], least: float) -> list[tuple[str, float, float]]:
    """Join equal neighbours; of bands narrower than a pixel the one with most time is shown."""
    found: list[tuple[str, float, float]] = []
    for band in bands:
        if found and found[-1][0] == band.kind:
            found[-1] = (band.kind, found[-1][1], band.ended)
        elif found and found[-1][2] - found[-1][1] < least:
            kind, began, ended = found[-1]
            winner = band.kind if band.ended - band.began > ended - began else kind
            found[-1] = (winner, began, band.ended)
        else:
            found.append((band.kind, band.began, band.ended))
    return found


def _mark(x: float, height: float, mark: Mark) -> str:
    name = f' id="{escape_html(mark.name)}"' if mark.name else ""
    shape = (
        f'<g class="mark"{name}><line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height:.1f}"/>'
        f'<circle cx="{x:.1f}" cy="5" r="5"/><title>{escape_html(mark.text)}</title></g>'
    )
    return f'<a href="#{escape_html(mark.target)}">{shape}</a>' if mark.target else shape


def _svg(height: float, shapes: Sequence[str], label: str) -> str:
    body = "\n".join(shapes)
    name = escape_html(label)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{name}">\n{body}\n</svg>'
    )


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape_html(text)}</text>'


class _Frame:
    """Maps values to places in a chart, and draws its axes."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, height: float) -> None:
        self._x0, self._x1 = x0, x1 if x1 > x0 else x0 + 1
        margin = (y1 - y0) * 0.05 or abs(y0) * 0.05 or 1.0
        self._y0, self._y1 = (y0 - margin if y0 else 0.0), y1 + margin
        self._bottom = height - 32.0

    def x(self, value: float) -> float:
        share = (value - self._x0) / (self._x1 - self._x0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._y0) / (self._y1 - self._y0)
        return self._bottom - share * (self._bottom - 8.0)

    def axes(self, label: str, *, names: Sequence[str] = (), rows: bool = True) -> list[str]:
        """Return the lines and numbers of both axes. `names`: instead of numbers below bars."""
        shapes = []
        for tick in nice_ticks(self._y0, self._y1) if rows else ():
            y = self.y(tick)
            shapes.append(
                f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            )
            shapes.append(_text("name", LEFT - 6, y + 4, f"{tick:g}"))
        if names:
            every = math.ceil(len(names) / 12)
            places = [(i + 0.5, name) for i, name in enumerate(names) if i % every == 0]
        else:
            places = [(tick, f"{tick:g}") for tick in nice_ticks(self._x0, self._x1, 8)]
        shapes += [_text("tick", self.x(at), self._bottom + 14, name) for at, name in places]
        return [*shapes, _text("tick", (LEFT + WIDTH - RIGHT) / 2, self._bottom + 29, label)]
