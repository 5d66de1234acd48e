"""Each report for SGLang has a reproduction that runs without the plugin and shows what it says."""

from pathlib import Path

import pytest

from support.upstream_reports import fenced, printed, reports

STANDINS = Path(__file__).parent / "standins"


@pytest.mark.parametrize("name", reports("sglang"))
def test_sglang_alone_does_what_is_reported(name, tmp_path):
    found = printed(name, tmp_path, SGLANG_PLUGINS="none", PYTHONPATH=str(STANDINS))
    assert found == fenced(name, "text")
