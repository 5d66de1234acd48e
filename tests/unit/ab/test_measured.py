"""What is measured of a server beside its answers: counters of `/metrics`, and memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statecache.ab.arms import Arm
from statecache.ab.drivers.server_metrics import counters_between, read_counters
from statecache.ab.drivers.server_process import MemoryWatch, tree_bytes
from statecache.ab.report.result import overstated_lines
from statecache.ab.results import MEASURES, Counters, Played, Run, Served
from statecache.ab.server_results import Answered, Answers
from statecache.ab.statistics import Pair, compare
from statecache.errors import SettingsError
from support.ab_servers import server_run
from support.waiting import wait_until

RATE, MISSED = MEASURES[0], MEASURES[1]
PLUGIN = """\
# TYPE statecache_requests_total counter
statecache_requests_total{engine="vllm",model_name="m",rank="0"} 5.0
statecache_requests_total{engine="vllm",model_name="m",rank="1"} 2.0
statecache_requests_created{engine="vllm",model_name="m",rank="0"} 1.7e9
statecache_prompt_tokens_total{engine="vllm",model_name="m",rank="0"} 1000.0
statecache_hit_tokens_total{engine="vllm",model_name="m",rank="0"} 600.0
statecache_missed_by_state_tokens_total{engine="vllm",model_name="m",rank="0"} 100.0
statecache_evictions_total{engine="vllm",model_name="m",rank="0",reason="policy"} 4.0
statecache_evictions_total{engine="vllm",model_name="m",rank="0",reason="kv_gone"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 9e3
process_resident_memory_bytes 5.0
"""


def test_counters_are_summed_over_their_labels() -> None:
    assert read_counters(PLUGIN) == {
        "statecache_requests_total": 7,
        "statecache_prompt_tokens_total": 1000,
        "statecache_hit_tokens_total": 600,
        "statecache_missed_by_state_tokens_total": 100,
        "statecache_evictions_total": 7,
        "vllm:prompt_tokens_total": 9000,
    }


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-1", "1e300", "many"])
def test_what_is_no_count_is_left_out(odd: str) -> None:
    text = f"vllm:prompt_tokens_total {odd}\nvllm:prompt_tokens_cached_total 5\n"
    assert read_counters(text) == {"vllm:prompt_tokens_cached_total": 5}


def test_ranks_of_sglang_that_count_the_same_are_counted_once() -> None:
    text = "".join(
        f'statecache_evictions_total{{engine="sglang",rank="{rank}",reason="policy"}} 4.0\n'
        f'sglang:cached_tokens_total{{model_name="m",tp_rank="{rank}"}} 30.0\n'
        for rank in (0, 1)
    )
    assert read_counters(text) == {
        "statecache_evictions_total": 4,
        "sglang:cached_tokens_total": 30,
    }


def test_a_run_has_the_differences_and_what_is_missing_is_not_zero() -> None:
    """Evictions began in the run, skips were never there."""
    before = {
        "statecache_requests_total": 2.0,
        "statecache_prompt_tokens_total": 100.0,
        "statecache_hit_tokens_total": 10.0,
        "vllm:prompt_tokens_total": 100.0,
    }
    after = read_counters(PLUGIN)
    assert counters_between(before, after, 900) == Counters(
        source="statecache",
        requests=5,
        prompt_tokens=900,
        hit_tokens=590,
        missed_by_state_tokens=100,
        evicted_states=7,
        skipped_states=None,
    )


def test_counters_that_say_nothing_of_the_run_are_none() -> None:
    """Fewer tokens than were answered; a server that began anew; nothing there at all."""
    before = {"sglang:prompt_tokens_total": 100.0, "sglang:cached_tokens_total": 50.0}
    after = {"sglang:prompt_tokens_total": 300.0, "sglang:cached_tokens_total": 60.0}
    found = counters_between(before, after, 200)
    assert found == Counters(source="sglang", prompt_tokens=200, hit_tokens=10)
    assert counters_between(before, after, 201) is None
    assert counters_between(before, {**after, "sglang:cached_tokens_total": 40.0}, 200) is None
    assert counters_between({}, after, 0) is None
    assert counters_between(before, {}, 0) is None


def test_the_pool_of_kv_is_what_sglang_says() -> None:
    text = 'sglang:kv_cache_memory_usage_gb{tp_rank="0"} 1.5\nsglang:prompt_tokens_total{} 8\n'
    read = read_counters(text)
    found = counters_between(read, read, 0)
    assert found is not None
    assert (found.kv_pool_bytes, found.prompt_tokens, found.hit_tokens) == (3 << 29, 0, None)


def a_run(arm: str, cached: int | None, counters: Counters | None = None) -> Run:
    """Two requests of 100 tokens."""
    answer = Answered(
        prompt_tokens=100,
        cached_tokens=cached,
        output_tokens=1,
        asked_at=0,
        ended_at=1,
        pieces=[(0.5, 1)],
    )
    return server_run("c", arm, 0, Answers([answer, answer], counters), 0)


COUNTED = Counters(
    source="statecache",
    requests=4,
    prompt_tokens=400,
    hit_tokens=300,
    missed_by_state_tokens=60,
    evicted_states=9,
    skipped_states=0,
)


def test_counters_fill_what_answers_do_not_say() -> None:
    """Missed by state a request, 60 / 4; the hit rate only where answers do not report hits."""
    run = a_run("a", 50, COUNTED)
    assert (RATE.of(run), MISSED.of(run)) == (0.5, 15)
    assert (run.evicted_states, run.skipped_states) == (9, 0)
    silent = a_run("a", None, COUNTED)
    assert (RATE.of(silent), silent.hit_tokens) == (0.75, None)
    nothing = a_run("a", None)
    assert (RATE.of(nothing), MISSED.of(nothing), nothing.evicted_states) == (None, None, None)
    engine = a_run("a", None, Counters(source="vllm", prompt_tokens=400, hit_tokens=100))
    assert (RATE.of(engine), MISSED.of(engine)) == (0.25, None)


@pytest.mark.parametrize("over", [-1, 0, 1, 20, 100])
def test_a_hit_rate_is_never_above_one_and_what_was_said_beyond_is_told(over: int) -> None:
    """Two requests of 100 tokens; the other server has counters alone, of four such requests."""
    run = a_run("a", 100 + over)
    assert RATE.of(run) == min(100 + over, 100) / 100
    assert run.overstated_hit_tokens == 2 * max(over, 0)
    before = dict.fromkeys(("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"), 50.0)
    after = {"vllm:prompt_tokens_total": 450.0, "vllm:prompt_tokens_cached_total": 450.0 + over}
    counters = counters_between(before, after, 200)
    assert counters is not None
    assert (counters.hit_tokens, counters.overstated_hit_tokens) == (
        400 + min(over, 0),
        max(over, 0),
    )
    counted = a_run("b", None, counters)
    assert RATE.of(counted) == (400 + min(over, 0)) / 400
    lines = [
        f"c, arm {arm}: the server says that it reused {tokens} tokens more than it was asked:"
        " they are not counted"
        for arm, tokens in (("a", 2 * over), ("b", over))
    ]
    assert overstated_lines([run, counted]) == (lines if over > 0 else [])


def test_one_request_beyond_its_prompt_lends_nothing_to_another() -> None:
    """120 of 100 tokens and 0 of 100: half of all, not three fifths."""
    told = [
        Answered(
            prompt_tokens=100,
            cached_tokens=cached,
            output_tokens=1,
            asked_at=0,
            ended_at=1,
            pieces=[(0.5, 1)],
        )
        for cached in (120, 0)
    ]
    run = server_run("c", "a", 0, Answers(told), 0)
    assert (RATE.of(run), run.overstated_hit_tokens) == (0.5, 20)


def test_what_was_counted_is_not_compared_with_what_was_answered() -> None:
    """One has the warm-up in it, the other has not."""
    runs = [a_run("a", 50, COUNTED), a_run("b", None, COUNTED), a_run("c", None, COUNTED)]
    found = compare([Pair("c", "a", "b"), Pair("c", "b", "c")], runs)
    rates = [
        (comparison.baseline, comparison.arm)
        for comparison in found
        if comparison.measure == "token_hit_rate"
    ]
    missed = [
        (comparison.baseline, comparison.arm)
        for comparison in found
        if comparison.measure == "missed_by_state_tokens"
    ]
    assert rates == [("b", "c")]
    assert missed == [("a", "b"), ("b", "c")]


def test_a_run_without_a_success_says_that_all_failed() -> None:
    failed = Answered(
        prompt_tokens=8,
        cached_tokens=None,
        output_tokens=0,
        asked_at=0,
        ended_at=1,
        pieces=[],
        error="no",
    )
    run = server_run("c", "a", 0, Answers([failed] * 3), 1)
    assert (run.requests, run.rejected) == (0, 2)
    assert run.times is not None
    assert (run.times.request_errors, run.times.output_tokens_per_second) == (1, 0)
    assert (run.times.ttft_p50_ms, run.times.ttft_quantiles_ms) == (None, [])


def test_slots_take_what_a_state_of_the_model_takes() -> None:
    """Twelve slots of 1.5 MiB, those of running requests too, in either pool."""
    for pool in ("native", "int8"):
        arm = Arm(name="a", slots=12, running=1, pool=pool, state_mib=1.5)
        played = Played([Served(512, 0, 0)], 0, 0)
        assert played.total("c", arm, 0, 0).state_slot_bytes == 18 << 20
    assert Arm(name="a").state_slot_bytes is None
    with pytest.raises(SettingsError, match=r"^arm a: 1\d+ slots of 1e\+06 MiB are too many bytes"):
        Arm(name="a", slots=10**14, state_mib=1e6)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_memory_is_that_of_the_process_and_its_children_at_its_highest(tmp_path: Path) -> None:
    """A child takes 96 MiB and gives them back once they were seen; it has its own session."""
    script = tmp_path / "child.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid()))\n"
        "taken = b'x' * (96 << 20)\n"
        "pathlib.Path(sys.argv[1], 'full').touch()\n"
        "while not pathlib.Path(sys.argv[1], 'seen').exists(): time.sleep(0.02)\n"
        "del taken\n"
        "pathlib.Path(sys.argv[1], 'empty').touch()\n"
        "time.sleep(1000)\n"
    )
    start = f"exec {sys.executable} {script} {tmp_path}"
    parent = subprocess.Popen(
        ["/bin/sh", "-c", f"setsid -w sh -c '{start}'; :"], start_new_session=True
    )
    watch = MemoryWatch(parent.pid)
    try:
        watch.start()
        wait_until((tmp_path / "full").exists)
        full = tree_bytes(parent.pid)
        assert full is not None
        wait_until(lambda: (watch._most or 0) > full - (1 << 20))
        (tmp_path / "seen").touch()
        wait_until((tmp_path / "empty").exists)
        most = watch.stop()
        now = tree_bytes(parent.pid)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        parent.kill()
        parent.wait()
    assert most is not None
    assert now is not None
    assert most - now > 80 << 20
    assert 96 << 20 < most < 400 << 20
    assert tree_bytes(parent.pid) is None
