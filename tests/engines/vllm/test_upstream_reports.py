"""Each report for vLLM has a reproduction that runs without the plugin and shows what it says."""

import pytest

from statecache_vllm.seams import engine_version
from support.upstream_reports import fenced, printed, reports


@pytest.mark.skipif(not engine_version().startswith("0.32."), reason="reported of vLLM 0.32")
@pytest.mark.parametrize("name", reports("vllm"))
def test_vllm_alone_does_what_is_reported(name, tmp_path):
    assert printed(name, tmp_path, VLLM_PLUGINS="") == fenced(name, "text")
