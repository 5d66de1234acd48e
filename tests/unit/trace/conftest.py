"""What the tests of recordings share."""

import pytest


@pytest.fixture(params=["plain", "gzip"])
def path(request, tmp_path):
    """Where to record: a file that is written as it is, and one that is packed."""
    return tmp_path / ("traffic.jsonl" if request.param == "plain" else "traffic.jsonl.gz")
