"""VLLM on a CPU: its switches must be set before it is imported."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("vllm") is not None

# tests/engines/install.sh makes the environment these tests run in.
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

sys.path.append(str(HERE))  # last: nothing here may hide a module of the engine

# The engine's own warnings are not ours to fix; any other warning is an error.
if INSTALLED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import engine  # noqa: F401
        import tiny_models

        from statecache_vllm import seams


def pytest_report_header():
    return None if INSTALLED else "tests/engines/vllm: not collected, vLLM is not installed here"


# Many engines or whole servers: left out by `--quick`.
LONG = (
    "test_ab_server.py",
    "test_accuracy.py",
    "test_ranks.py",
    "test_server.py",
    "test_server_faults.py",
)


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason="--quick")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::Warning"))
            if item.path.name in LONG and config.getoption("--quick"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def lines_from_warnings_on(caplog, monkeypatch):
    """The plugin's lines reach pytest from warnings on, whether or not an engine ran before.

    The first engine of a process would give the plugin's logger the handlers, the level and the
    propagation of vLLM's; test_server.py looks at those.
    """
    monkeypatch.setattr(seams, "share_log", lambda: None)
    caplog.set_level("WARNING", logger="statecache")


@pytest.fixture(scope="session", params=["qwen3_next", "granite"])
def any_model(request, tmp_path_factory):
    """A model and the block size to run it with."""
    folder = tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return folder, tiny_models.BLOCKS[request.param]


@pytest.fixture(scope="session")
def drafting(tmp_path_factory):
    """A model that brings a drafter."""
    folder = tmp_path_factory.mktemp("drafting")
    from support.mtp_head import add_drafter

    return add_drafter(tiny_models.make_tiny_model("qwen3_next", folder))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_models.make_tiny_model("qwen3_next", tmp_path_factory.mktemp("model"))
