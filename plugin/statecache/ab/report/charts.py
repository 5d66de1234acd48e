"""Charts as SVG, to stand inside a page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LINES", "line_chart", "share_chart"]

# Apart for the colour-blind, on white and on black.
LINES = ("#4477aa", "#ee6677", "#228833", "#b8a000", "#66ccee", "#aa3377", "#888888", "#dd7711")
_WIDTH, _HEIGHT = 480, 300  # about a phone: text keeps its size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 52
_LAST_LABEL = 28  # half of a label at the right end


def line_chart(
    lines: Sequence[Sequence[Sequence[float] | None]], labels: Sequence[str], axis: str
) -> str:
    """Draw one line for each of `lines`; it has for each label its values, or None.

    A point is their mean, and a bar reaches from the lowest to the highest.
    """
    highest = max((max(values) for line in lines for values in line if values), default=0.0)
    top, step = _scale(highest)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(axis)}">',
        *_frame(labels, axis, top, step),
    ]
    for number, line in enumerate(lines):
        parts += _line(line, len(labels), top, number, len(lines))
    return "".join([*parts, "</svg>"])


def share_chart(lines: Sequence[Sequence[float]], axis: str) -> str:
    """Draw for each of `lines`, values at 0, 1, ... 100 %, which share is at most how much.

    The axis of values is logarithmic; what is not above 0 is drawn at its left end.
    """
    above = [value for line in lines for value in line if value > 0]
    low, high = (min(above), max(above)) if above else (1.0, 10.0)
    ticks = _powers(low, high)
    left, right = math.log10(ticks[0]), math.log10(ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(axis)}">',
        *_rules(1.0, 0.25, percent=True),
    ]
    for tick in ticks:
        x = _at(math.log10(tick), left, right)
        parts.append(
            f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="currentColor" opacity=".15"/>'
        )
        parts.append(_label(x, f"{tick:,.6g}"))
    parts.append(_axis(axis))
    for number, line in enumerate(lines):
        points = " ".join(
            f"{_at(math.log10(max(value, ticks[0])), left, right):.1f},"
            f"{_y(share / (len(line) - 1), 1.0):.1f}"
            for share, value in enumerate(line)
        )
        color = LINES[number % len(LINES)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return "".join([*parts, "</svg>"])


def _powers(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from below `low` to above `high`, 8 of them at most."""
    steps = [
        n * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
        for n in (1, 2, 5)
    ]
    first = max(place for place, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(place for place, step in enumerate(steps) if step >= high * (1 - 1e-9))
    if last - first < 8:
        return steps[first : max(last, first + 1) + 1]
    return steps[first - first % 3 : last + 3 : 3]  # the powers of ten alone


def _at(value: float, left: float, right: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _LAST_LABEL) * (value - left) / (right - left)


def _line(
    line: Sequence[Sequence[float] | None], places: int, top: float, number: int, of: int
) -> list[str]:
    color = LINES[number % len(LINES)]
    shift = 5 * (number - (of - 1) / 2)  # so that bars of several lines stand side by side
    points, parts = [], []
    for place, values in enumerate(line):
        if not values:
            continue
        x = _x(place, places) + shift
        low, high = (_y(edge(values), top) for edge in (min, max))
        y = _y(math.fsum(values) / len(values), top)
        points.append(f"{x:.1f},{y:.1f}")
        parts.append(
            f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{color}" stroke-width="2"'
            f' opacity=".5"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
        )
    path = f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"'
    return [f'{path} stroke-width="2"/>', *parts]


def _frame(labels: Sequence[str], axis: str, top: float, step: float) -> list[str]:
    places = len(labels)
    names = [_label(_x(place, places), label) for place, label in enumerate(labels)]
    return [*_rules(top, step), *names, _axis(axis)]


def _rules(top: float, step: float, *, percent: bool = False) -> list[str]:
    parts = []
    for tick in range(round(top / step) + 1):
        y = _y(tick * step, top)
        said = f"{tick * step:.0%}" if percent else f"{tick * step:,.6g}"
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'
        )
    return parts


def _label(x: float, text: str) -> str:
    y = _HEIGHT - _BOTTOM + 20
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _axis(name: str) -> str:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>'


def _scale(highest: float) -> tuple[float, float]:
    """Return where the axis ends, and its step: 1, 2 or 5 times a power of ten."""
    if not highest > 0:
        return 1.0, 0.2
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(n * power for n in (1, 2, 5, 10) if n * power * 5 >= highest)
    return step * math.ceil(highest / step - 1e-9), step


def _x(place: int, places: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / places


def _y(value: float, top: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)
