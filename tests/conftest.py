"""Options and fixtures shared by all tests."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from statecache.trace import recorder
from support.waiting import DEADLINE_SECONDS

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


@pytest.fixture(autouse=True, scope="session")
def patient_recorders() -> None:
    """Closing a recorder waits until all is written, also on a busy machine."""
    recorder._CLOSE_SECONDS = DEADLINE_SECONDS


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    """How much of the full amount of random events to run."""
    return 0.1 if request.config.getoption("--quick") else 1.0


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """For what handles signals itself: handlers are as in a new process, and afterwards go back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before:
        signal.signal(number, handler)
