"""Options and fixtures shared by all tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="a tenth of the random events, no planted mutations"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    skip = pytest.mark.skip(reason="--quick")
    for item in items:
        if item.path.parent.name == "mutation":
            item.add_marker(skip)


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    """How much of the full amount of random events to run."""
    return 0.1 if request.config.getoption("--quick") else 1.0
