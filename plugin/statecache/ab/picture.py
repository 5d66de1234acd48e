"""Line charts as SVG, to stand inside a page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LINES", "line_chart"]

# Apart for the colour-blind, on white and on black.
LINES = ("#4477aa", "#ee6677", "#228833", "#b8a000", "#66ccee", "#aa3377", "#888888", "#dd7711")
_WIDTH, _HEIGHT = 480, 300  # about a phone: text keeps its size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 52


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
    parts = []
    for tick in range(round(top / step) + 1):
        y = _y(tick * step, top)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * step:,.6g}</text>'
        )
    for place, label in enumerate(labels):
        parts.append(
            f'<text x="{_x(place, len(labels)):.1f}" y="{_HEIGHT - _BOTTOM + 20}"'
            f' text-anchor="middle">{escape(label)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(axis)}</text>'
    )
    return parts


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
