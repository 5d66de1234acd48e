"""The cost model as a text, "LINEAR,QUADRATIC", as flags, arms and results have it.

Its default is that of the native index. That is imported where it is used: without it a server
must still start, and the doctor run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from statecache import CostModel

__all__ = ["cost_text", "default_cost", "parse_cost", "scaled_cost"]


def default_cost() -> CostModel:
    """Return the cost model that is used where none is given."""
    from statecache import CostModel

    return CostModel()


def parse_cost(flag: str, text: str) -> CostModel:
    """Return the cost model that `text`, "LINEAR,QUADRATIC", describes. `flag` is for the error."""
    from statecache import CostModel

    linear, _, quadratic = text.partition(",")
    try:
        coefficients = float(linear), float(quadratic)
    except ValueError:
        advice = "use two numbers, LINEAR,QUADRATIC"
    else:
        try:
            return CostModel(*coefficients)
        except ValueError as error:
            advice = str(error)
    raise SettingsError(escape_control_chars(f"{flag} cannot be '{text}': {advice}"))


def cost_text(model: CostModel) -> str:
    """Return the text of a cost model, from which `parse_cost` makes exactly the same one."""
    return f"{model.linear!r},{model.quadratic!r}".replace("e-0", "e-")


def scaled_cost(model: CostModel, by: float) -> CostModel:
    """Return the cost model for tokens that each stand for `by` tokens of `model`."""
    from statecache import CostModel

    return CostModel(model.linear * by, model.quadratic * by**2)
