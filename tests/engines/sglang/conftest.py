"""SGLang on a CPU: the stand-ins must be importable before SGLang is."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("sglang") is not None

# tests/engines/install.sh makes the environment these tests run in.
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

sys.path.insert(0, str(HERE / "standins"))
sys.path.append(str(HERE))  # last: nothing here may hide a module of the engine
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# The engine's own warnings are not ours to fix; any other warning is an error.
if INSTALLED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cache_layer  # noqa: F401
        import sglang.srt.managers.scheduler  # noqa: F401


@pytest.fixture(scope="session")
def forked():
    """How `server.running` starts a server in a tenth of the time that a user's command takes."""
    from forked_servers import Servers

    with Servers() as servers:
        yield {"start": (), "process_of": servers.start}


def pytest_report_header():
    return (
        None if INSTALLED else "tests/engines/sglang: not collected, SGLang is not installed here"
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents:
            for package in ("torch", "sglang"):
                item.add_marker(pytest.mark.filterwarnings(rf"ignore::Warning:{package}\..*"))
