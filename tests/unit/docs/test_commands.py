"""Every command in README and docs is run, as it stands, in a folder of its own.

What stands for a file of the reader's (TRACE, config.json, ...) is one made here, and a server's
address that of a small one. The rest is run by another test, or has a reason below not to be.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from statecache.trace.convert import PUBLISHED
from support.model_configs import QWEN3_NEXT
from support.replay_support import COMMAND
from support.trace_sources import conversation, request, write_folder

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("statecache", "pip", "make", "python", "curl", "vllm", "sglang", "tests/", ".venv")

RUN_BY_ANOTHER_TEST = {  # the file, and what it holds if it still does so
    "pip install .": ("tests/packaging/test_install.py", '"install"'),
    "make wheel": ("tests/packaging/test_install.py", '"make", "wheel"'),
    "statecache ab --experiment distinct-prefixes": (
        "tests/unit/ab/test_experiments.py",
        "distinct-prefixes",
    ),
    "statecache ab --experiment engines": ("tests/unit/ab/test_experiments.py", "engines"),
    "python -m sglang.launch_server": ("tests/engines/sglang/server.py", "sglang.launch_server"),
    "vllm serve MODEL": ("tests/engines/vllm/test_quickstart.py", "vllm serve MODEL"),
    "sglang serve MODEL": ("tests/engines/sglang/test_quickstart.py", "sglang serve MODEL"),
    "statecache ab --arm off:url=": ("tests/unit/cli/test_ab_servers.py", "url="),
    "statecache ab PLAN.toml": ("tests/unit/ab/drivers/test_server_metrics.py", "ab-servers.toml"),
    "statecache fit --url": ("tests/unit/tools/test_fit.py", "fit_command(None, url"),
    "statecache ab --experiment sessions": ("tests/unit/ab/test_experiments.py", "sessions"),
    "statecache ab --experiment tuned": ("tests/unit/ab/test_toy_engine.py", "tuned"),
    "statecache doctor --engine-source": (
        "tests/unit/tools/test_engine_source.py",
        '"--engine-source", place',
    ),
    "python tests/bench/default_policy_table.py": (
        "tests/unit/ab/test_default_policy_table.py",
        "default_policy_table.py",
    ),
}
NOT_RUN = {
    "make test": "it is what runs this test",
    "make bench": "minutes of benchmarks, and no test is of time",
    "make golden": "its tests are among those of make test, where the whole traces are",
    "make fuzz": "half an hour; tests/fuzz and ctest run it for seconds",
    "make sanitized": "minutes: it builds the extensions anew",
    "make other-torch": "installs several GB",
    "make wheels": "minutes: it makes an environment for each Python",
    "make versions": "hours: it installs each version of both engines",
    "make soak": "hours; a form of seconds is a test of both engines",
    "make demo": "minutes; its first half is the two commands at the top of README",
    "python tests/bench/learned_table.py": "a minute on recorded traces; tests/golden holds them",
    "python tests/bench/learned_random.py": "half an hour; the policy's rules are tests",
    "python tests/engines/look_at_wheels.py": "downloads wheels of 0.5 GB",
    "pip install '.[": "downloads what is installed here already",
}


def commands() -> list[str]:
    """Return the indented commands; of usage with [choices] what stands outside of them."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        text = re.sub(r"\n +(?=\[?--)", " ", text)  # usage that goes on on the next line
        for line in re.findall(r"^(?: {4}| {7})(\S.*)$", text, re.M):
            command = re.sub(r"\s+\[[^\]]*\]", "", re.split(r"\s+# ", line)[0]).strip()
            if command.startswith(PROGRAMS):
                found.append(command)
    return list(dict.fromkeys(found))


def listed(command: str, among: Iterable[str]) -> str | None:
    return next((start for start in among if command.startswith(start)), None)


RUN_HERE = [c for c in commands() if not listed(c, NOT_RUN) and not listed(c, RUN_BY_ANOTHER_TEST)]


class Server(BaseHTTPRequestHandler):
    """The metrics of a server in which the plugin is active."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(b'statecache_active{engine="vllm",policy="gds"} 1.0\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "agent.jsonl.gz"
    few = ("--sessions", "8", "--turns", "5", "--seed", "0")
    subprocess.run([COMMAND, "generate", "agent", *few, "-o", path], check=True)
    return path


def put_public_traces(folder: Path) -> None:
    """Put small ones where clones of the public repositories would have theirs."""
    (folder / "kv-cache-tester").mkdir()
    talk = conversation([request(0, 512, [1, 2])])
    write_folder(folder / "kv-cache-tester/traces", *[talk] * PUBLISHED.conversations)
    line = b'{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}\n'
    mooncake = folder / "Mooncake/FAST25-release/traces/conversation_trace.jsonl"
    mooncake.parent.mkdir(parents=True)
    mooncake.write_bytes(line * PUBLISHED.requests)


def words_of(command: str, url: str, trace: Path, folder: Path) -> list[str]:
    """Return the command's words, with the files and the address it names put in place."""
    (folder / "config.json").write_text(json.dumps(QWEN3_NEXT))
    seconds = "".join(f"{n},{0.01 + n / 2e4 + n * n / 1e9}\n" for n in (1000, 2000, 4000, 8000))
    (folder / "measured.csv").write_text(seconds)
    for name in ("trace.jsonl.gz", "TRACE", "agent.jsonl.gz", "agent_coding.jsonl.gz"):
        if f"-o {name}" not in command:
            (folder / name).write_bytes(trace.read_bytes())
    if " trace convert " in command:
        put_public_traces(folder)
        command = command.replace("convert SOURCE", "convert kv-cache-tester/traces")
    text = re.sub(r"http://localhost:\d+", url, command)
    text = text.replace("fit FILE.csv", "fit measured.csv").replace("replay FILE", "replay TRACE")
    text = text.replace("file=FILE", "file=TRACE").replace("--trace FILE", "--trace TRACE")
    text = text.replace("--pool-blocks N,N", "--pool-blocks 4096,8192")
    # The engines are in another environment, whose tests play arms by their cache layers.
    text = re.sub(r"--engines core,\w+ --python ENGINES_PYTHON", "--engines core", text)
    words = shlex.split(text.partition(" | ")[0])
    programs = {"statecache": [COMMAND], "python": [sys.executable]}
    return [*programs.get(words[0], [words[0]]), *words[1:]]


@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_runs(command: str, url: str, trace: Path, tmp_path: Path) -> None:
    words = words_of(command, url, trace, tmp_path)
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    # Without an engine in this environment doctor has to say no.
    no_engine = words[1] == "doctor" and "--url" not in words
    assert done.returncode == (1 if no_engine else 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or "-o" in words
    if "-o" in words:
        assert (tmp_path / words[words.index("-o") + 1]).exists()


def test_there_is_a_reason_for_each_that_is_not_run_here() -> None:
    shown = commands()
    for start in (*NOT_RUN, *RUN_BY_ANOTHER_TEST):
        assert any(command.startswith(start) for command in shown), f"no page shows {start}"
    for path, held in RUN_BY_ANOTHER_TEST.values():
        assert held in (ROOT / path).read_text(), path
    programs = {command.split()[0] for command in RUN_HERE}
    assert programs == {"curl", "statecache"}
    assert {c.split()[1] for c in RUN_HERE if c.startswith("statecache")} == {
        "ab",
        "doctor",
        "fit",
        "generate",
        "plan",
        "replay",
        "trace",
    }
