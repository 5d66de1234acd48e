"""The driver `server` of `statecache ab` on two real servers, with the plugin and without."""

import shlex

import server
from tiny_model import make_tiny_model

from statecache.ab.bench import Bench
from statecache.ab.server_arm import ServerArm
from support.conversations import be_patient, trial_of

KEY = "k3y-of-the-test"
VARIABLES = ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")


def arm(name, model, *flags):
    variables = [f"{variable}={server.environment()[variable]}" for variable in VARIABLES]
    flags = ("--enable-cache-report", "--enable-metrics", "--api-key", KEY, *flags)
    words = ["env", *variables, *server.command(server.LAUNCH, model, *flags)]
    return ServerArm(
        name=name, command=f"{shlex.join(words)} --port {{port}}", key_variable="SGLANG_TEST_KEY"
    )


def test_two_servers_with_a_key_are_asked_in_turn(tmp_path, monkeypatch):
    """Eight prompts of 192 to 384 tokens, 64 a block; a turn goes on from the answer before it.

    With room for everything each turn but the first ones finds the whole prompt before it.
    """
    be_patient(monkeypatch)
    monkeypatch.setenv("SGLANG_TEST_KEY", KEY)
    model = make_tiny_model(tmp_path / "model")
    arms = [arm("off", model), arm("on", model, "--kv-cache-plugin", "statecache")]
    with Bench(trial_of(tmp_path, arms, 1), tmp_path) as bench:
        found = list(bench.runs())
    assert bench.failures == []
    assert [run.arm for run, _ in found] == ["off", "on"]
    for run, answers in found:
        assert (run.requests, run.rejected, run.prompt_tokens) == (8, 0, 2 * (3 + 4 + 5 + 6) * 64)
        assert [answer.answered_tokens for answer in answers.answered] == [0, 0, 4, 4, 8, 8, 12, 12]
        for at, answer in enumerate(answers.answered[2:], 2):
            assert answer.cached_tokens >= 64 * (3 + (at - 2) // 2)
        assert all(len(answer.output_ids) == 4 for answer in answers.answered)
        counted = run.counters
        assert counted.source == ("statecache" if run.arm == "on" else "sglang")
        assert counted.hit_tokens == run.hit_tokens
        assert (run.evicted_states, run.skipped_states) == (
            (0, 0) if run.arm == "on" else (None, None)
        )
    written = [path.read_text() for path in tmp_path.glob("server-*.log")]
    assert sum("statecache: policy" in text for text in written) == 1
