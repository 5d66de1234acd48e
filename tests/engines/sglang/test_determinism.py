"""Four processes with different hash seeds evict the same slots in the same order."""

from pathlib import Path

from cache_layer import CORES
from server import environment

from support.hash_seeds import output_under_any_seed

SCRIPT = Path(__file__).with_name("eviction_log.py")


def test_eviction_logs_are_identical_whatever_the_hash_seed():
    """Both cores: 1,000 requests in batches of one tick, and 300 operations."""
    command = ("-W", "ignore", SCRIPT, *CORES)
    lines = output_under_any_seed(*command, environment=environment())
    second = lines.index(CORES[1])
    assert lines[0] == CORES[0]
    assert min(second, len(lines) - second) > 300
