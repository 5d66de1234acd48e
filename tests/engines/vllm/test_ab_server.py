"""The driver `server` of `statecache ab` on two real servers, with the plugin and without."""

import sys
from pathlib import Path

from statecache.ab.bench import Bench, Cell, Trial
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.workloads import Workload

WORKLOAD = Workload(kind="shared-prefix", count=3, rounds=4, loop="closed", at_once=2)
FLAGS = "--dtype bfloat16 --enforce-eager --block-size 32 --max-model-len 1024 --max-num-seqs 4"
FLAGS += " --max-num-batched-tokens 256 --num-gpu-blocks-override 200 --seed 0"
FLAGS += " --enable-prompt-tokens-details"


VARIABLES = "VLLM_ENABLE_V1_MULTIPROCESSING=1 VLLM_LOGGING_LEVEL=INFO"


def arm(name, model, flags):
    vllm = f"env {VARIABLES} {sys.executable} {Path(sys.executable).with_name('vllm')}"
    return ServerArm(name=name, command=f"{vllm} serve {model} --port {{port}} {FLAGS} {flags}")


def test_two_servers_are_asked_in_turn_and_end(model, tmp_path):
    """Twelve prompts of three blocks of 64 tokens, each of which ends in tokens of its own.

    With room for everything each run finds the 128 tokens of a prefix that it asked before, and
    nothing of the run before. What is asked at once may miss what the other one computes.
    """
    arms = [arm("off", model, ""), arm("on", model, "--kv-cache-plugin statecache")]
    trial = Trial(
        name="t",
        cells=[Cell(name="c", workload=WORKLOAD, arms=arms)],
        repeats=2,
        warm_up=0,
        servers=ServerSettings(tokens_a_block=64, output_tokens=4, salt=7),
    )
    bench = Bench(trial, tmp_path)
    try:
        assert bench.versions == {"off": "vllm 0.32.0", "on": "vllm 0.32.0"}
        found = list(bench.runs())
    finally:
        bench.close()
    assert bench.failures == []
    assert [(run.arm, run.seed) for run, _ in found] == [
        ("off", 0), ("on", 0), ("off", 1), ("on", 1)
    ]  # fmt: skip
    for run, answers in found:
        assert (run.requests, run.rejected, run.prompt_tokens) == (12, 0, 12 * 192)
        assert answers.answered[0].cached_tokens == 0
        assert {one.cached_tokens for one in answers.answered} == {0, 128}
        assert run.hit_tokens >= 128 * (12 - 3 - 3)
        for one in answers.answered:
            assert one.output_tokens == 4 == sum(tokens for _, tokens in one.pieces)
            assert 0 < one.first_after <= one.pieces[-1][0] <= one.ended_at - one.asked_at
        assert run.times.itl_p50_ms > 0
    assert "block order reuse" in (tmp_path / "server-on.log").read_text()
    assert "block order reuse" not in (tmp_path / "server-off.log").read_text()
