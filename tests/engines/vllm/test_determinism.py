"""Four processes with different hash seeds hand out the same blocks and slots in the same order."""

import os
from pathlib import Path

from support.hash_seeds import output_under_any_seed

SCRIPT = Path(__file__).with_name("eviction_log.py")
KINDS = ("stock", "reuse", "pool")


def test_block_and_slot_logs_are_identical_whatever_the_hash_seed(model):
    """Each block policy and the checkpoint pool; 1,000 requests, eight a step, and more."""
    lines = output_under_any_seed(
        *("-W", "ignore", SCRIPT, model, *KINDS),
        environment={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    starts = [lines.index(kind) for kind in KINDS]
    parts = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    assert min(map(len, parts)) > 1_000
    assert len({tuple(part[1:]) for part in parts}) == 3
