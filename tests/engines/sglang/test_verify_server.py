"""Real servers on a CPU: no state of them is what it should be, and every answer is right."""

from pathlib import Path
from typing import Any

import pytest
from server import running
from tiny_model import make_tiny_model

from support.exposition import wait_for

CHECKED = "--kv-cache-plugin statecache --statecache-checkpoints int8 --statecache-verify 1"
SLOTS = ("--statecache-checkpoint-slots", "24", "--enable-metrics")


def prompts() -> list[list[int]]:
    """Chats that grow, with forks: each shares a prefix with an earlier one."""
    base = [4 + (7 * at) % 250 for at in range(60)]
    return [
        base,
        [*base, *[9] * 40],
        [*base, *[9] * 40, *[5, 6, 7] * 20],
        [*base[:45], *[8] * 30],
        base * 5,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("verify-model"))


def ask(model: Path, log: Path, *flags: str, **how: Any) -> tuple[list[dict], dict]:
    """Every prompt twice, and then the numbers of the plugin."""
    with running(model, log, *flags, **how) as server:
        found = [server.generate(tokens) for tokens in [*prompts(), *prompts()]]
        metrics = {}
        if "--enable-metrics" in flags:
            url = f"http://127.0.0.1:{server.port}"
            metrics = wait_for(url, lambda read: read["requests_total", ""] == len(found))
    return found, metrics


def test_wrong_states_are_never_an_answer(model, tmp_path, forked):
    """Each of the ten is computed from its first token on, as by SGLang alone without a cache."""
    alone, _ = ask(model, tmp_path / "alone.log", "--disable-radix-cache", **forked)
    log = tmp_path / "planted.log"
    found, metrics = ask(model, log, *CHECKED.split(), *SLOTS, PLANTED_FAULTS="states")
    assert [answer["tokens"] for answer in found] == [answer["tokens"] for answer in alone]
    assert [answer["logprobs"] for answer in found] == [answer["logprobs"] for answer in alone]
    assert [answer["cached"] for answer in found] == [0] * 10
    kinds = ("prefix", "depth", "bytes")
    mismatches = {kind: metrics["restore_mismatches_total", kind] for kind in kinds}
    assert min(mismatches.values()) >= 1
    assert metrics["anomalies_total", ""] == sum(mismatches.values())
    assert metrics["active", "learned"] == 1
    assert log.read_text().count("is not what was to be restored") == 1
