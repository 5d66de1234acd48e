"""`statecache ab` with servers that it launches or attaches to: verdicts, failures and ends."""

import gzip
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statecache.ab.drivers import server_client
from statecache.ab.drivers.server import Server
from statecache.ab.plans import read_plan
from statecache.ab.server_results import Answers
from statecache.cli.ab import ab_command
from statecache.errors import SettingsError
from support.ab_processes import gone
from support.ab_servers import ASKING, PROGRAM, WORK, attached, plan, result_of
from support.replay_support import assert_one_line, run
from support.stand_in_server import standing_in
from support.waiting import Clock


@pytest.mark.usefixtures("own_handlers")
def test_a_slower_server_is_found_and_arms_on_one_server_share_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 59 ms and more, on a clock that the servers alone set.

    B and its twin ask one server: had they the same tokens, the twin would hit more.

    Each of the last 11 requests of a run (the first is warm-up) of 16 tokens finds the prefix of 8
    if it was asked before, from the fifth on: 8 * 8 of 11 * 16 tokens.
    """
    clock = Clock()
    monkeypatch.setattr(server_client, "time", clock)
    with (
        standing_in(first_ms=60, between_ms=1, clock=clock) as slow,
        standing_in(first_ms=1, between_ms=1, clock=clock) as fast,
    ):
        urls = {"a": slow.url, "b": fast.url, "twin": fast.url}
        ab_command(
            arm=[attached(name, url)[1] for name, url in urls.items()],
            workload=WORK,
            servers=ASKING[3],
            repeats=9,
            output=tmp_path / "out",
        )
    result = result_of(tmp_path / "out")
    assert [(summary["arm"], summary["seed"]) for summary in result["runs"]] == [
        (arm, seed) for seed in range(9) for arm in ("a", "b", "twin")
    ]
    verdicts = {
        (comparison["arm"], comparison["measure"]): comparison["verdict"]
        for comparison in result["comparisons"]
    }
    assert {name for _, name in verdicts} == {
        *("token_hit_rate", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms"),
        *("itl_p99_ms", "output_tokens_per_second", "request_errors"),
    }
    for arm in ("b", "twin"):
        assert verdicts[arm, "ttft_p50_ms"] == "better"
        assert verdicts[arm, "token_hit_rate"] == "exactly equal"
        assert verdicts[arm, "request_errors"] == "exactly equal"
    for summary in result["runs"]:
        assert (summary["warm_up"], summary["requests"], summary["rejected"]) == (1, 11, 0)
        assert (summary["hit_tokens"], summary["prompt_tokens"]) == (64, 176)
        assert (summary["times"]["ttft_p50_ms"] >= 60) == (summary["arm"] == "a")
    assert result["engines"] == dict.fromkeys(("a", "b", "twin"), "tests 9.9")
    raw = gzip.decompress((tmp_path / "out" / "requests.jsonl.gz").read_bytes()).splitlines()
    assert len(raw) == 9 * 3 * 12
    first = json.loads(raw[0])
    assert (first["arm"], first["prompt_tokens"], first["cached_tokens"]) == ("a", 16, 0)
    assert first["ttft_ms"] >= 60
    assert "Time to first token, distinct-prefixes" in (tmp_path / "out/report.html").read_text()


def test_a_server_is_compared_with_the_replay_by_what_both_have(tmp_path: Path) -> None:
    """With room for all, the replay hits the whole prefix, as the server does, but no blocks more.

    Each of 12 prompts ends in a block of its own, so both find what was asked before: the prefix.
    """
    work = "shared-prefix:count=4,rounds=3,loop=closed,at_once=1"
    core = ("--arm", "core:policy=lru,slots=100,chunk=512")
    with standing_in() as server:
        more = ("--workload", work, "--servers", "tokens_a_block=8", "--repeats", 6)
        done = run("ab", *core, *attached("live", server.url), *more, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (comparison,) = result_of(tmp_path / "out")["comparisons"]
    assert (comparison["measure"], comparison["verdict"]) == ("token_hit_rate", "exactly equal")
    assert comparison["arm_mean"] > 0


@pytest.mark.parametrize("more", ["", ",one_at_a_time=true"])
def test_a_server_that_dies_is_left_out_and_none_is_left_behind(more: str, tmp_path: Path) -> None:
    """It dies in its tenth request of the workload, before another one knew its answer."""
    pids = tmp_path / "pids"
    launched = f"{PROGRAM} --pids {pids}"
    file = plan(tmp_path, a=launched, bad=f"{launched} --mode dies", b=launched)
    work = WORK.replace("at_once=2", "at_once=1")
    asking = ("--workload", work, "--servers", f"tokens_a_block=8{more}", "--repeats", 1)
    done = run("ab", file, *asking, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (failure,) = result_of(tmp_path / "out")["failures"]
    log = tmp_path / "out" / "server-bad.log"
    assert failure["arm"] == "bad"
    # The ninth, or one after it where the machine is slow to end the process.
    assert re.match(r"request (9|1\d) failed: ", failure["reason"])
    assert failure["reason"].endswith(f"the server ended with status 7; {log}: the last | words")
    assert f"distinct-prefixes, arm bad left out: {failure['reason']}" in done.stderr
    assert [summary["arm"] for summary in result_of(tmp_path / "out")["runs"]] == ["a", "b"]
    assert {comparison["arm"] for comparison in result_of(tmp_path / "out")["comparisons"]} == {"b"}
    assert len(pids.read_text().split()) == (6 if more else 3)
    assert gone(pids)


class HastyServer(Server):
    """Gives the arm `bad` 0.3 s for an answer, once it is ready; the others have all the time."""

    def play(self, *given: Any, **more: Any) -> Answers:
        if self._arm.name == "bad":
            self._settings = msgspec.structs.replace(self._settings, request_seconds=0.3)
        return super().play(*given, **more)


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize(
    ("mode", "reason"),
    [("hangs", "no answer within 0.3 s"), ("fails", 'status 500: {"error": "out of luck"}')],
)
def test_a_server_that_hangs_or_fails_is_left_out(
    mode: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "hangs":
        monkeypatch.setattr("statecache.ab.drivers.servers.Server", HastyServer)
    file = plan(tmp_path, a=PROGRAM, bad=f"{PROGRAM} --mode {mode}", b=PROGRAM)
    asked = {"workload": WORK, "servers": "tokens_a_block=8", "repeats": 1}
    ab_command(file, **asked, output=tmp_path / "out")
    (failure,) = result_of(tmp_path / "out")["failures"]
    assert failure["arm"] == "bad"
    assert f"failed: {reason}; {tmp_path / 'out' / 'server-bad.log'}: " in failure["reason"]
    assert [summary["arm"] for summary in result_of(tmp_path / "out")["runs"]] == ["a", "b"]


def test_what_cannot_be_reached_or_started_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        nobody = f"http://127.0.0.1:{port}"
        done = run("ab", *attached("a", nobody), *attached("b", nobody), cwd=tmp_path)
        assert_one_line(done, f"arm a: {nobody} cannot be reached (ConnectError: [Errno 111]")
        assert list(tmp_path.iterdir()) == []
        taken.listen()
        used = ("--arm", f"c:url={nobody},command=vllm serve")
        done = run("ab", *used, *attached("b", nobody), cwd=tmp_path)
        assert_one_line(done, f"arm c: port {port} is in use")
    secret = nobody.replace("//", "//user:pass@word@")
    done = run("ab", *attached("a", secret), *attached("b", nobody), cwd=tmp_path)
    assert_one_line(
        done, f"arm a: {nobody.replace('//', '//***@')} cannot be reached (ConnectError"
    )
    odd = ("--arm", "a:url=http://\u00ad:1")
    done = run("ab", *odd, *attached("b", nobody), cwd=tmp_path)
    assert_one_line(done, "arm a: url: Invalid IDNA hostname: '\\xad'")
    zero = plan(tmp_path, a="vllm \\u0000 {port}", b="x {port}")
    assert_one_line(run("ab", zero, cwd=tmp_path), "arm a: cannot start vllm (embedded null byte)")
    missing = plan(tmp_path, a="/nowhere/vllm serve {port}", b="x {port}")
    assert_one_line(run("ab", missing, cwd=tmp_path), "arm a: cannot start /nowhere/vllm (No such")
    stops = plan(tmp_path, a="/bin/sh -c 'echo no such model; exit 3' {port}", b="x {port}")
    done = run("ab", stops, "-o", "out", cwd=tmp_path)
    assert_one_line(
        done, "arm a: it did not start; the server ended with status 3; out/server-a.log: no such m"
    )
    (tmp_path / "blocked" / "server-a.log").mkdir(parents=True)
    done = run("ab", stops, "-o", "blocked", cwd=tmp_path)
    assert_one_line(done, "arm a: blocked/server-a.log cannot be written (Is a directory)")
    other = plan(tmp_path, a=f"{sys.executable} -m http.server {{port}}", b="x {port}")
    assert_one_line(run("ab", other, "-o", "out", cwd=tmp_path), "arm a: status 404: ")
    slow = plan(tmp_path, a="sleep 1000 {port}", b="x {port}")
    slow.write_text(slow.read_text().replace("[[arms]]", "[[arms]]\nstart_seconds = 0.5"))
    done = run("ab", slow, "-o", "out", cwd=tmp_path)
    assert_one_line(done, "arm a: not ready in 0.5 s; out/server-a.log: empty")


def test_a_server_that_does_not_suit_is_one_line(tmp_path: Path) -> None:
    with standing_in() as server:
        two = (*attached("a", server.url), *attached("b", server.url))
        done = run("ab", *two, cwd=tmp_path)
        assert "arm a: requests take up to " in done.stderr.splitlines()[-1]
        assert done.returncode == 2
        unknown = ("--arm", f"a:url={server.url}", "--arm", f"b:url={server.url}")
        done = run("ab", *unknown, *ASKING, cwd=tmp_path)
        assert_one_line(done, "arm a: how many tokens stand-in knows is not known here: give voc")
        other = ("--arm", f"a:url={server.url},model=gpt", *attached("b", server.url))
        done = run("ab", *other, *ASKING, cwd=tmp_path)
        assert_one_line(done, "arm a: the server has no model 'gpt': use stand-in")
    with standing_in("fails") as server:
        server.prompts += [[], []]  # its first requests fail too
        two = (*attached("a", server.url), *attached("b", server.url))
        done = run("ab", *two, *ASKING, cwd=tmp_path)
        assert_one_line(done, "arm a: the first request failed: status 500: ")


URL = "b:url=http://127.0.0.1:1"
BAD: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "nothing": (["a:driver=server"], {}, "arm a: a server needs a url or a command"),
    "port": (["a:command=vllm serve"], {}, "arm a: command has no {port}"),
    "quote": (["a:command='{port}"], {}, "arm a: command cannot be read (No closing quotat"),
    "url": (["a:url=localhost:8000"], {}, "arm a: url 'localhost:8000' is not like http://"),
    "bad port": (["a:url=http://h:x"], {}, "arm a: url 'http://h:x' is not like http://"),
    "user": (["a:url=http://u:p@q@h:x"], {}, "arm a: url 'http://***@h:x' is not like http://"),
    "field": ([f"{URL},slots=3"], {}, "arm b: unknown key 'slots': use name, driver"),
    "vocabulary": ([f"{URL},vocabulary=9"], {}, "arm b: vocabulary 9 must be 64 or more"),
    "key": ([f"{URL},key_variable=sk-1"], {}, "arm b: key_variable is no name of an environment"),
    "two keys": (
        ["b:url=http://u@h:1,key_variable=X"],
        {},
        "arm b: give a key_variable or a user in url, not both",
    ),
    "seconds": ([f"{URL},start_seconds=0"], {}, "arm b: start_seconds 0 must be above 0"),
    "no server": (["a:", "b:"], {"speed": 2}, "are for servers, and no arm is one"),
    "settings": (["a:", URL], {"servers": "x"}, "--servers: 'x' is not key=value"),
    "its field": (["a:", URL], {"servers": "x=1"}, "--servers: unknown key 'x': use speed, tok"),
    "speed": (["a:", URL], {"speed": 0}, "servers: speed 0 must be above 0"),
    "closed": (
        ["a:", URL],
        {"speed": 2, "workload": "agent:loop=closed"},
        "--speed: a closed loop has no times: set loop=open",
    ),
    "mixed": (
        ["a:", URL],
        {"workload": "distinct-prefixes"},
        "workload: distinct-prefixes is the same at each seed, so only servers can repeat it",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_asked_is_said_before(kind: str) -> None:
    arms, more, problem = BAD[kind]
    given = dict.fromkeys(("workload", "repeats", "seed", "warm_up", "python", "servers", "speed"))
    with pytest.raises(SettingsError) as caught:
        read_plan(None, arms, **{**given, **more})
    assert problem in str(caught.value)


def test_an_open_loop_without_times_is_one_line(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [1]})
    (tmp_path / "t.jsonl").write_text(f"{line}\n{line}\n")
    arms = ("--arm", URL, "--arm", URL.replace("b:", "a:"))
    done = run("ab", *arms, "--workload", "trace:file=t.jsonl", cwd=tmp_path)
    assert_one_line(done, "workload: an open loop needs timestamps, and all are the same")
