"""The picture: what it labels, and the formats it takes."""

from pathlib import Path

import pytest

from replay_support import replay_prompts
from statecache.errors import SettingsError
from statecache.plot import check_plot, draw_hit_rates

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


@pytest.mark.parametrize("name", ["x", "x.docx", ".png"])
def test_a_format_it_cannot_draw_is_named(name: str) -> None:
    with pytest.raises(SettingsError, match="must end in one of"):
        check_plot(Path(name))
