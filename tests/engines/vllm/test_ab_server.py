"""The driver `server` of `statecache ab` on two real servers, with the plugin and without."""

import sys

from engine import require_build

from statecache.ab.bench import Bench
from statecache.ab.server_arm import ServerArm
from statecache_vllm.seams import engine_version
from support.conversations import be_patient, trial_of

FLAGS = "--dtype bfloat16 --enforce-eager --block-size 32 --max-model-len 1024 --max-num-seqs 4"
FLAGS += " --max-num-batched-tokens 256 --num-gpu-blocks-override 200 --seed 0"
FLAGS += " --enable-prompt-tokens-details --mamba-ssm-cache-dtype bfloat16"


VARIABLES = "VLLM_ENABLE_V1_MULTIPROCESSING=1 VLLM_LOGGING_LEVEL=INFO"


def arm(name, model, flags):
    vllm = f"env {VARIABLES} {sys.executable} -m vllm.entrypoints.cli.main"
    return ServerArm(name=name, command=f"{vllm} serve {model} --port {{port}} {FLAGS} {flags}")


def test_two_servers_are_asked_in_turn_and_end(model, tmp_path, monkeypatch):
    """Eight prompts of 192 to 384 tokens, 64 a block.

    With room for everything each turn finds at least the prefix of 128 tokens, and the first two of
    a run nothing of the run before. What is asked at once may miss what the other one computes.
    """
    require_build()
    be_patient(monkeypatch)
    arms = [arm("off", model, ""), arm("on", model, "--kv-cache-plugin statecache")]
    with Bench(trial_of(tmp_path, arms, 2), tmp_path) as bench:
        assert bench.versions == dict.fromkeys(["off", "on"], f"vllm {engine_version()}")
        found = list(bench.runs())
    assert bench.failures == []
    assert [(run.arm, run.seed) for run, _ in found] == [
        ("off", 0), ("on", 0), ("off", 1), ("on", 1)
    ]  # fmt: skip
    for run, answers in found:
        assert (run.requests, run.rejected, run.prompt_tokens) == (8, 0, 2 * (3 + 4 + 5 + 6) * 64)
        assert answers.answered[0].cached_tokens == 0
        assert all(answer.cached_tokens >= 128 for answer in answers.answered[2:])
        # All but the first turns begin with the prompt before and its answer of 4 tokens.
        assert [answer.answered_tokens for answer in answers.answered] == [0, 0, 4, 4, 8, 8, 12, 12]
        for answer in answers.answered:
            assert answer.output_tokens == 4 == sum(tokens for _, tokens in answer.pieces)
            assert len(answer.output_ids) == 4
            assert (
                0 < answer.first_after <= answer.pieces[-1][0] <= answer.ended_at - answer.asked_at
            )
        assert run.times.itl_p50_ms > 0
        check_measured(run, run.hit_tokens)
    assert "block policy reuse" in (tmp_path / "server-on.log").read_text()
    assert "block policy reuse" not in (tmp_path / "server-off.log").read_text()


def check_measured(run, hit_tokens):
    """Each server's counters say what its answers say; the plugin alone knows the rest."""
    counted = run.counters
    assert counted.source == ("statecache" if run.arm == "on" else "vllm")
    assert (counted.requests, counted.prompt_tokens) == (8, run.prompt_tokens)
    assert counted.hit_tokens == hit_tokens
    assert (counted.missed_by_state_tokens is None) == (run.arm == "off")
    assert (run.evicted_states, run.skipped_states) == ((0, 0) if run.arm == "on" else (None, None))
    assert 200 << 20 < run.peak_resident_bytes < 20 << 30
