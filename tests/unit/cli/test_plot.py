"""The picture: what it labels, and the formats it takes."""

from itertools import pairwise
from pathlib import Path

import pytest

from statecache.cli.plot import _figure, check_plot, draw_hit_rates
from statecache.errors import SettingsError
from support.replay_support import replay_prompts

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")


def test_each_policy_and_admission_has_a_line_and_the_ceiling_its_own() -> None:
    prompts = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6]]
    rows = [
        replay_prompts(prompts, policy, slots, admission)
        for policy in ("lru", "gds")
        for admission in ("dense", "ends")
        for slots in (1, 2)
    ]
    drawn = draw_hit_rates(rows, "Replay of a trace", "svg").decode()
    # 10 blocks of prompt, 4 of them resident.
    for label in ("Replay of a trace", "state slots", "token hit rate", "ceiling 0.4000"):
        assert f"<!-- {label} -->" in drawn
    for line in ("lru, dense", "lru, ends", "gds, dense", "gds, ends"):
        assert drawn.count(f"<!-- {line} -->") == 1


def test_a_png_is_a_png() -> None:
    rows = [replay_prompts([[1, 2]], "lru", 1)]
    assert draw_hit_rates(rows, "t", "png").startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("name", ["x", "x.docx", "x.pgf", ".png"])
def test_a_format_it_cannot_draw_is_named(name: str) -> None:
    with pytest.raises(SettingsError, match="must end in one of"):
        check_plot(Path(name))


def test_a_title_is_taken_as_it_is() -> None:
    rows = [replay_prompts([[1, 2]], "lru", 1)]
    assert "<!-- $x_{$ 日本 -->" in draw_hit_rates(rows, "$x_{$ 日本", "svg").decode()


def test_a_replay_that_served_nothing_has_no_picture() -> None:
    rows = [replay_prompts([[1, 2]], "lru", 1, kv_blocks=1)]
    with pytest.raises(SettingsError, match="--plot: no request fits the KV pool"):
        draw_hit_rates(rows, "t", "svg")


@pytest.mark.parametrize(
    "slots",
    [
        (10, 12, 14, 100, 120, 1_000, 10_000, 20_000, 50_000, 90_000, 100_000),
        tuple(range(1, 40)),
        (100_000, 100_001, 100_002),
        (64, 128, 256, 1024),
        (7,),
    ],
)
def test_labels_of_slots_do_not_touch(slots: tuple[int, ...]) -> None:
    figure = _figure([replay_prompts([[1, 2]], "lru", n) for n in slots], "t")
    figure.draw_without_rendering()
    axis = figure.axes[0].xaxis
    boxes = [label.get_window_extent() for label in axis.get_ticklabels(which="both")]
    assert all(left.x1 + 2 < right.x0 for left, right in pairwise(boxes))
    if len(slots) == 4:
        shown = [label.get_text() for label in axis.get_ticklabels()]
        assert shown == ["64", "128", "256", "1,024"]
