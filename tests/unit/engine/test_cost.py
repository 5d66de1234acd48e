"""The cost model as a text, and its one default."""

import pytest

from statecache import CostModel, ReferenceCost
from statecache.engine.cost import cost_text, default_cost, parse_cost, scaled_cost
from statecache.engine.settings import Settings
from statecache.errors import SettingsError


def coefficients(model: CostModel) -> tuple[float, float]:
    return model.linear, model.quadratic


def test_there_is_one_default() -> None:
    native = coefficients(default_cost())
    assert native == (ReferenceCost().linear, ReferenceCost().quadratic)
    assert coefficients(Settings.from_given({}, {}).cost_model()) == native


def test_the_default_reads_as_documented() -> None:
    assert cost_text(default_cost()) == "1.862e-5,3.33e-6"


@pytest.mark.parametrize("pair", [(1e-300, 0.1), (0.1 + 0.2, 0.0), (1e20, 3.33e-06), (5e-324, 1.0)])
def test_a_text_gives_back_the_same_model(pair: tuple[float, float]) -> None:
    assert coefficients(parse_cost("--cost", cost_text(CostModel(*pair)))) == pair


def test_a_block_of_tokens_costs_what_its_tokens_do() -> None:
    """Blocks of 4 tokens: from 3 to 5 blocks is from 12 to 20 tokens."""
    model = CostModel(0.5, 1e5)
    assert coefficients(scaled_cost(model, 4)) == (2.0, 16e5)
    assert scaled_cost(model, 4).cost(3, 5) == model.cost(12, 20) == 4 + 128


def test_what_is_no_cost_is_one_line() -> None:
    with pytest.raises(SettingsError, match=r"^--cost cannot be '1': use two numbers, LINEAR,QU"):
        parse_cost("--cost", "1")
