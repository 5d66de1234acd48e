"""Hit rate over slots, as a picture. Needs matplotlib: the `plot` extra."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from statecache.replay import ReplayRow

__all__ = ["check_plot", "draw_hit_rates"]

_COLORS = {"lru": "#c44e52", "gds": "#2f6db3", "clairvoyant": "#4d4d4d"}
_DASHES = {"dense": "-", "ends": "--"}


def check_plot(path: Path) -> None:
    """Raise `SettingsError` unless a plot can be drawn in the format that `path` names."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError(
            "--plot: matplotlib is not installed: pip install 'statecache[plot]'"
        ) from error
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise SettingsError(f"--plot: {path.name!r} must end in one of .{', .'.join(known)}")


def draw_hit_rates(rows: Sequence[ReplayRow], title: str, file_format: str) -> bytes:
    """Return the picture: one line a policy and admission, the ceiling dotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    shown = [row for row in rows if row.prompt_tokens]
    for policy, admission in dict.fromkeys((row.policy, row.admission) for row in shown):
        line = sorted(
            (row.slots, row.hit_tokens / row.prompt_tokens)
            for row in shown
            if (row.policy, row.admission) == (policy, admission)
        )
        axes.plot(
            [slots for slots, _ in line],
            [rate for _, rate in line],
            _DASHES[admission],
            color=_COLORS[policy],
            marker="o",
            markersize=4,
            label=f"{policy}, {admission}",
        )
    for ceiling in {row.resident_tokens / row.prompt_tokens for row in shown}:
        axes.axhline(ceiling, color="#888888", linestyle=":", label=f"ceiling {ceiling:.4f}")
    _dress(axes, sorted({row.slots for row in rows}), title)
    picture = io.BytesIO()
    figure.savefig(picture, format=file_format, metadata=None)
    return picture.getvalue()


def _dress(axes: Axes, slots: list[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    labelled = [n for i, n in enumerate(slots) if i == 0 or n >= 1.35 * slots[i - 1]]
    axes.set_xticks(labelled, [f"{n:,}" for n in labelled])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("state slots")
    axes.set_ylabel("token hit rate")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
