"""Charts as SVG, to stand inside a page: drawn by matplotlib, which the extra `ab` brings.

The same values give the same bytes. Words stay text: the page gives them its font and colour, so
they can be read on white and on black.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

__all__ = ["LINES", "line_chart", "share_chart"]

# Apart for the colour-blind, on white and on black.
LINES = ("#4477aa", "#ee6677", "#228833", "#b8a000", "#66ccee", "#aa3377", "#888888", "#dd7711")
_WIDTH, _HEIGHT = 480, 300  # points; about a phone: text keeps its size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 52
_HALF_A_LABEL = 28  # at the right end
_RULES = "#8888884d"  # seen on white and on black
_SETTINGS: Any = {
    "font.size": 13,
    "svg.fonttype": "none",
    "svg.hashsalt": "statecache",
    "text.parse_math": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def line_chart(
    lines: Sequence[Sequence[Sequence[float] | None]], labels: Sequence[str], axis: str
) -> str:
    """Draw one line for each of `lines`; it has for each label its values, or None.

    A point is their mean, and a bar reaches from the lowest to the highest.
    """
    with _chart(axis, _RIGHT) as (axes, drawing):
        highest = max((max(values) for line in lines for values in line if values), default=0.0)
        ticks = _linear_ticks(highest)
        axes.set_ylim(0, ticks[-1])
        axes.set_yticks(ticks, [f"{tick:,.6g}" for tick in ticks])
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xticks(range(len(labels)), labels)
        axes.grid(axis="y", color=_RULES, clip_on=False)
        for number, line in enumerate(lines):
            # Bars of several lines stand side by side, 7 points apart.
            shift = 7 * (number - (len(lines) - 1) / 2) * len(labels) / (_WIDTH - _LEFT - _RIGHT)
            _draw_line(axes, line, LINES[number % len(LINES)], shift)
    return drawing[0]


def share_chart(lines: Sequence[Sequence[float]], axis: str) -> str:
    """Draw for each of `lines`, values at 0, 1, ... 100 %, which share is at most how much.

    The axis of values is logarithmic; what is not above 0 is drawn at its left end.
    """
    above = [value for line in lines for value in line if value > 0]
    ticks = _logarithmic_ticks(min(above, default=1.0), max(above, default=10.0))
    with _chart(axis, _HALF_A_LABEL) as (axes, drawing):
        axes.set_xscale("log")
        axes.set_xlim(ticks[0], ticks[-1])
        axes.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        axes.grid(color=_RULES, clip_on=False)
        for number, line in enumerate(lines):
            shares = [place / (len(line) - 1) for place in range(len(line))]
            values = [max(value, ticks[0]) for value in line]
            axes.plot(values, shares, color=LINES[number % len(LINES)], linewidth=2, clip_on=False)
    return drawing[0]


def _draw_line(
    axes: Axes, line: Sequence[Sequence[float] | None], colour: str, shift: float
) -> None:
    places = [place + shift for place, values in enumerate(line) if values]
    known = [values for values in line if values]
    means = [math.fsum(values) / len(values) for values in known]
    lowest, highest = list(map(min, known)), list(map(max, known))
    style: dict[str, Any] = {"color": colour, "linewidth": 2, "clip_on": False}
    axes.vlines(places, lowest, highest, alpha=0.5, **style)
    axes.plot(places, means, marker="o", markersize=7, markeredgewidth=0, **style)


@contextmanager
def _chart(axis: str, right: int) -> Iterator[tuple[Axes, list[str]]]:
    """Give axes to draw on; behind the block the list has the drawing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its font cache is its own affair
    drawing: list[str] = []
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that its own font does not have
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), facecolor="none")
        width, height = _WIDTH - _LEFT - right, _HEIGHT - _TOP - _BOTTOM
        box = (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, width / _WIDTH, height / _HEIGHT)
        axes = figure.add_axes(box, facecolor="none", frameon=False)
        axes.tick_params("y", length=0, pad=8)
        axes.tick_params("x", length=0, pad=12)  # below the first label of the other axis
        yield axes, drawing
        axes.set_xlabel(axis, labelpad=6)
        drawing.append(_svg_of(figure, axis))


def _svg_of(figure: Any, title: str) -> str:
    """Return the figure as an element of a page, without what a file of its own would need."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=_NO_METADATA)
    content = re.split(r"<svg[^>]*>", written.getvalue(), maxsplit=1)[1]
    content = re.sub(r"<style[^>]*>.*?</style>", "", content)  # that would be one of the page
    content = re.sub(r'<g id="[^"]*"', "<g", content)  # another chart has the same
    content = re.sub(r"font-family: [^;]*; ", "", content)
    content = re.sub(r"\s*\n\s*", "\n", content)
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    return head + content.strip()


def _linear_ticks(highest: float) -> list[float]:
    """Return where the rules are: 0 and up to five more, of which the last is above `highest`."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, highest if highest > 0 else 1.0)
    return [float(tick) for tick in found]


def _logarithmic_ticks(low: float, high: float) -> list[float]:
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
