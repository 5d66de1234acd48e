"""SGLang on a CPU: the stand-ins must be importable before SGLang is."""

import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE / "standins"))
sys.path.append(str(HERE))  # last: nothing here may hide a module of the engine
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# The engine's own warnings are not ours to fix: errors everywhere else.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import cache_layer  # noqa: F401


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents:
            for package in ("torch", "sglang"):
                item.add_marker(pytest.mark.filterwarnings(rf"ignore::Warning:{package}\..*"))
