"""`statecache ab` with servers: answers in prompts, counters, memory, keys, plans shown."""

import gzip
import itertools
import os
import re
from pathlib import Path

from statecache.ab.plans import read_plan
from support.ab_servers import ASKING, PROGRAM, attached, plan, result_of
from support.replay_support import assert_one_line, run
from support.stand_in_server import StandIn, answer_to, standing_in

CHAT = "agent:sessions=2,turns=3,loop=closed,at_once=1"
CHATTING = ("--workload", CHAT, "--servers", "tokens_a_block=8,output_tokens=5", "--repeats", 1)


def prompts_of(server: StandIn) -> list[list[int]]:
    return server.prompts[2:]  # the first two show that all is well


def test_answers_stand_in_the_next_prompts_of_both_arms(tmp_path: Path) -> None:
    """Five tokens of an answer in the block of 8 that follows the prompt; lengths stay."""
    with standing_in() as a, standing_in() as b:
        two = (*attached("a", a.url), *attached("b", b.url))
        done = run("ab", *two, *CHATTING, "-o", "with", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        fed, lengths = prompts_of(a), a.outputs[2:]
        assert prompts_of(b) == fed
    follows = [
        (before, after, answer_to(before, length))
        for (before, after), length in zip(itertools.pairwise(fed), lengths, strict=False)
        if after[: len(before)] == before and len(after) > len(before)
    ]
    assert follows
    for before, after, answer in follows:
        assert after[len(before) : len(before) + len(answer)] == answer
    runs = result_of(tmp_path / "with")["runs"]
    assert [summary["answered_tokens"] > 0 for summary in runs] == [True, True]
    with standing_in() as a, standing_in("mute") as b:
        two = (*attached("a", a.url), *attached("b", b.url))
        done = run("ab", *two, *CHATTING, "-o", "without", cwd=tmp_path)
        assert "agent: no answers in the next prompts: b tells no ids\n" in done.stderr
        plain = prompts_of(a)
        assert prompts_of(b) == plain
    assert [len(prompt) for prompt in plain] == [len(prompt) for prompt in fed]
    assert plain != fed
    assert [summary["answered_tokens"] for summary in result_of(tmp_path / "without")["runs"]] == [
        0,
        0,
    ]


def test_a_server_that_refuses_to_tell_ids_is_asked_without(tmp_path: Path) -> None:
    with standing_in("strict") as a, standing_in() as b:
        two = (*attached("a", a.url), *attached("b", b.url))
        done = run("ab", *two, *CHATTING, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "agent: no answers in the next prompts: a tells no ids\n" in done.stderr
    assert {summary["rejected"] for summary in result_of(tmp_path / "out")["runs"]} == {0}


def test_counters_and_memory_of_a_run(tmp_path: Path) -> None:
    """Twelve requests of 16 tokens; a is launched, and counts 2 missed tokens and 3 skips each."""
    with standing_in("secret", metrics="vllm") as b:
        file = plan(tmp_path, a=f"{PROGRAM} --metrics statecache", b=b.url)
        done = run("ab", file, *ASKING, "--repeats", 1, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    launched, other = result_of(tmp_path / "out")["runs"]
    assert launched["counters"] == {
        "source": "statecache",
        "requests": 12,
        "prompt_tokens": 192,
        "hit_tokens": 64,
        "missed_by_state_tokens": 24,
        "evicted_states": None,
        "skipped_states": 36,
        "overstated_hit_tokens": 0,
        "kv_pool_bytes": None,
    }
    assert (launched["evicted_states"], launched["skipped_states"]) == (None, 36)
    assert launched["hit_tokens"] == 64
    assert 5 << 20 < launched["peak_resident_bytes"] < 1 << 30
    assert (other["hit_tokens"], other["peak_resident_bytes"]) == (None, None)
    assert other["counters"]["source"] == "vllm"
    assert other["counters"]["hit_tokens"] == 64
    assert other["counters"]["missed_by_state_tokens"] is None
    measures = {comparison["measure"] for comparison in result_of(tmp_path / "out")["comparisons"]}
    assert not measures & {"token_hit_rate", "missed_by_state_tokens", "peak_resident_mib"}


def test_counters_that_come_late_are_waited_for(tmp_path: Path) -> None:
    """Twelve requests of 16 tokens. At first nothing is counted, and after them as before."""
    with standing_in("behind", metrics="sglang") as a, standing_in(metrics="sglang") as b:
        two = (*attached("a", a.url), *attached("b", b.url))
        done = run("ab", *two, *ASKING, "--repeats", 1, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for summary in result_of(tmp_path / "out")["runs"]:
        found = summary["counters"]
        assert (found["source"], found["requests"]) == ("sglang", 12)
        assert (found["prompt_tokens"], found["hit_tokens"]) == (192, 64)


def test_all_requests_that_fail_are_an_error_rate_of_one(tmp_path: Path) -> None:
    """Four requests; the first, which is the warm-up, is answered."""
    work = "distinct-prefixes:count=4,rounds=1,prefix_tokens=512,own_tokens=512,loop=closed"
    asking = ("--servers", "tokens_a_block=8", "--warm-up", 0.25, "--repeats", 1)
    with standing_in() as a, standing_in("fails later") as b:
        two = (*attached("a", a.url), *attached("b", b.url))
        done = run("ab", *two, "--workload", f"{work},at_once=1", *asking, "-o", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {
        comparison["measure"]: comparison for comparison in result_of(tmp_path / "o")["comparisons"]
    }
    assert (found["request_errors"]["baseline_mean"], found["request_errors"]["arm_mean"]) == (0, 1)
    assert found["output_tokens_per_second"]["arm_mean"] == 0
    assert "ttft_p50_ms" not in found
    assert (tmp_path / "o" / "report.html").read_text().count("<h2>Time to first token, dist") == 1


KEY = "sk-very.secret+1"


def test_a_key_is_sent_and_never_shown(tmp_path: Path) -> None:
    """One server lets in who has it, another none, and shows in its log what it was given."""
    file = plan(tmp_path, a=PROGRAM, shut=f"{PROGRAM} --mode closed", b=PROGRAM)
    file.write_text(file.read_text().replace("[[arms]]", '[[arms]]\nkey_variable = "MY_KEY"'))
    given = {**os.environ, "MY_KEY": KEY, "STAND_IN_KEY": KEY}
    done = run("ab", file, *ASKING, "--repeats", 1, "-o", tmp_path / "out", env=given)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("statecache: arm shut: ")
    assert "status 401" in last
    assert last.endswith("not let in with Bearer ***")
    assert KEY not in done.stderr
    file.write_text(file.read_text().replace(" --mode closed", ""))
    done = run("ab", file, *ASKING, "--repeats", 1, "-o", tmp_path / "out", env=given)
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path / "out")
    assert [summary["rejected"] for summary in result["runs"]] == [0, 0, 0]
    assert result["settings"]["cells"][0]["arms"][0]["key_variable"] == "MY_KEY"
    for path in (tmp_path / "out").iterdir():
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        assert path.name == "server-shut.log" or KEY.encode() not in content
    assert KEY not in done.stderr + done.stdout
    wrong = {**given, "MY_KEY": "other"}
    done = run("ab", file, *ASKING, "--repeats", 1, "-o", tmp_path / "out", env=wrong)
    assert_one_line(done, "arm a: ")
    assert "other" not in done.stderr
    for value, problem in (("", "is not set"), ("a b", "has characters that no key has")):
        done = run("ab", file, *ASKING, env={**given, "MY_KEY": value}, cwd=tmp_path)
        assert_one_line(done, f"arm a: the environment variable MY_KEY {problem}")


def test_plans_that_are_shown_can_be_read(tmp_path: Path) -> None:
    """The file in docs, and each block of TOML in README."""
    root = Path(__file__).parents[4]
    blocks = re.findall(r"^```toml\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)
    assert blocks
    for content in ((root / "docs" / "ab-servers.toml").read_text(), *blocks):
        file = tmp_path / "shown.toml"
        file.write_text(content)
        trial = read_plan(file, [], *[None] * 7)
        (cell,) = trial.cells
        assert [len(arm.words(1)) > 5 for arm in cell.arms] == [True, True]
        assert (cell.workload.loop, trial.repeats) == ("closed", 11)
