"""Hit rates over slots, and a fit, as pictures. Needs matplotlib: the `plot` extra."""

from __future__ import annotations

import io
import logging
import math
import warnings
from typing import TYPE_CHECKING

from statecache.errors import SettingsError
from statecache.index import policies

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from statecache.replay.state_slots import ReplayRow
    from statecache.tools.fit import Fit

__all__ = ["check_plot", "draw_fit", "draw_hit_rates"]

_FORMATS = ("pdf", "png", "svg")
# Of the policies, by their place in the table; further ones begin again.
_COLORS = (
    "#c44e52",
    "#2f6db3",
    "#4c9f50",
    "#4d4d4d",
    "#8172b2",
    "#ccb974",
    "#64b5cd",
    "#dd8452",
)
_DASHES = {"dense": "-", "ends": "--", "aligned": ":"}


def check_plot(path: Path) -> None:
    """Raise `SettingsError` unless a plot can be drawn in the format that `path` names."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its font cache is its own affair
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            "--plot: matplotlib is not installed: pip install 'statecache[plot]'"
        ) from error
    if path.suffix[1:].lower() not in _FORMATS:
        raise SettingsError(f"--plot: {path.name!r} must end in one of .{', .'.join(_FORMATS)}")


def draw_hit_rates(rows: Sequence[ReplayRow], title: str, file_format: str) -> bytes:
    """Return the picture: one line a policy and admission, the ceiling dotted.

    Raises `SettingsError` if all requests were rejected: there is no rate to draw.
    """
    shown = [row for row in rows if row.prompt_tokens]
    if not shown:
        raise SettingsError("--plot: no request fits the KV pool: give a larger --kv-tokens")
    return _picture(_figure(shown, title), file_format)


def draw_fit(fit: Fit, title: str, file_format: str) -> bytes:
    """Return the picture of a fit: measured points, the curve, and its two parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    longest = fit.points[-1].tokens
    lengths = [longest * step / 200 for step in range(201)]
    curve = [fit.seconds(n) for n in lengths]
    label = f"fit, error {fit.error:.1%}"
    axes.plot(lengths, curve, color=_COLORS[1], label=label)
    straight = [fit.overhead_seconds + fit.linear * n for n in lengths]
    axes.plot(lengths, straight, ":", color="#888888", label="without the quadratic part")
    measured = [point.seconds for point in fit.points]
    tokens = [point.tokens for point in fit.points]
    axes.plot(tokens, measured, "o", color=_COLORS[0], markersize=5, label="measured")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}: --statecache-cost {fit.flag}", fontsize=10, parse_math=False)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return _picture(figure, file_format)


def _picture(figure: Figure, file_format: str) -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a title that the font lacks a letter of
        figure.savefig(picture, format=file_format, metadata=None)
    return picture.getvalue()


def _figure(rows: Sequence[ReplayRow], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for policy, admission in dict.fromkeys((row.policy, row.admission) for row in rows):
        line = sorted(
            (row.slots, row.hit_tokens / row.prompt_tokens)
            for row in rows
            if (row.policy, row.admission) == (policy, admission)
        )
        axes.plot(
            [slots for slots, _ in line],
            [rate for _, rate in line],
            _DASHES[admission],
            color=_color_of(policy),
            marker="o",
            markersize=4,
            label=f"{policy}, {admission}",
        )
    for ceiling in {row.resident_tokens / row.prompt_tokens for row in rows}:
        axes.axhline(ceiling, color="#888888", linestyle=":", label=f"ceiling {ceiling:.4f}")
    _dress(axes, sorted({row.slots for row in rows}), title)
    return figure


def _color_of(policy: str) -> str:
    at = [spec.name for spec in policies.POLICIES].index(policy)
    return _COLORS[at % len(_COLORS)]


def _dress(axes: Axes, slots: list[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    labelled = _apart(slots)
    axes.set_xticks(labelled, [f"{n:,}" for n in labelled])
    axes.minorticks_off()
    axes.set_xlabel("state slots")
    axes.set_ylabel("token hit rate")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _apart(slots: list[int]) -> list[int]:
    """Return those of the sorted `slots` whose labels do not touch on a logarithmic axis."""
    gap = math.log(slots[-1] / slots[0]) / 8
    chosen = slots[:1]
    for n in slots[1:]:
        if math.log(n / chosen[-1]) >= gap:
            chosen.append(n)
    return chosen
