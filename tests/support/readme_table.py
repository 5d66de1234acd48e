"""The tables of README.md, as numbers."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def table_after(heading: str) -> list[list[float]]:
    """Return the rows of numbers of the first table after `heading`."""
    rows = README.partition(heading)[2].partition("\n|---")[2].partition("\n\n")[0].splitlines()
    return [[float(cell.replace(",", "")) for cell in re.findall(r"[\d.,]+", r)] for r in rows[1:]]
