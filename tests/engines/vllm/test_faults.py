"""What may go wrong around the plugin: vLLM goes on, or start-up stops with one clear line.

What fails inside the plugin (queue, map, book, a store) is in test_guard.py, a seam that moved and
a version that nobody tried in test_seams.py, other plugins in test_other_plugins.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request

import psutil
import pytest
import test_server
from engine import document
from test_server import serve
from test_worker import store_over

from statecache.checkpoint_pool import CheckpointPool
from statecache.trace import read_trace
from statecache_vllm.connector import StateCacheConnector, StepCommands, Stored
from statecache_vllm.guard import Guard

BROKEN = """
    import sys
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "MODULE":
                raise ImportError("PROBLEM", name=name)
    sys.meta_path.insert(0, Broken())
"""
CONFIGURE = """
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
    args.create_engine_config()
    print("configured")
"""


def in_a_fresh_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )


@pytest.mark.parametrize("module", ["statecache._index", "statecache._blocks"])
def test_an_extension_that_does_not_load_stops_a_server_that_asks_for_it_alone(model, module):
    broken = BROKEN.replace("MODULE", module).replace("PROBLEM", "undefined symbol: PyX")
    code = textwrap.dedent(broken) + textwrap.dedent(CONFIGURE)
    words = ["--model", str(model), "--block-size", "32"]
    asked = in_a_fresh_process(code, *words, "--kv-cache-plugin", "statecache")
    assert asked.returncode == 1
    line = asked.stderr.splitlines()[-1]
    assert line == (
        f"statecache: {module} does not load: reinstall statecache with pip in this Python"
        " (undefined symbol: PyX)"
    )
    assert "Traceback" not in asked.stderr
    alone = in_a_fresh_process(code, *words)
    assert alone.stdout.splitlines()[-1] == "configured", alone.stderr


def test_loaded_twice_the_flags_are_there_once(model):
    twice = "import sys, statecache_vllm\nstatecache_vllm.register()\nstatecache_vllm.register()\n"
    code = (
        twice + textwrap.dedent(CONFIGURE) + "print(parser.format_help().count('statecache-pol'))"
    )
    words = ["--model", str(model), "--block-size", "32", "--kv-cache-plugin", "statecache"]
    done = in_a_fresh_process(code, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2] == "configured"
    assert int(done.stdout.splitlines()[-1]) <= 2  # in the usage line, if at all, and in the list


def test_an_int8_store_that_fails_is_reported_once_and_ends_the_stores(monkeypatch, caplog):
    """In the worker: the pool of the copies raises; the scheduler hears of it and stores no more.

    What becomes of the requests then is in test_guard.py, on a real engine.
    """
    store, _ = store_over(monkeypatch, shared=False, checkpoints="int8", checkpoint_slots=4)
    worker = StateCacheConnector.__new__(StateCacheConnector)
    worker._store, worker._failed, worker.guard = store, False, Guard()
    worker._connector_metadata = StepCommands([], [(10, 3, (1, 2, 3))])
    monkeypatch.setattr(CheckpointPool, "store", lambda *_: 1 / 0)
    for _ in range(3):
        worker.wait_for_save()
        assert worker.build_connector_worker_meta() == Stored((), (), failed=True)
    assert worker.guard.anomalies == 1
    assert len({id(r) for r in caplog.records if r.levelname == "ERROR"}) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't allocate\nmemory"), MemoryError("no more")])
def test_memory_that_the_pool_does_not_get_stops_the_start_with_one_line(monkeypatch, error):
    def refuse(*_args, **_more):
        raise error

    monkeypatch.setattr(CheckpointPool, "__init__", refuse)
    with pytest.raises(SystemExit) as stopped:
        store_over(monkeypatch, shared=False, checkpoint_slots=4)
    line = str(stopped.value)
    assert line.startswith("statecache: no memory for 4 native checkpoints: ")
    assert line.endswith(": lower --statecache-checkpoint-slots")
    assert "\n" not in line


def test_a_pool_that_is_larger_than_the_memory_stops_the_start_with_one_line(monkeypatch):
    with pytest.raises(SystemExit, match=r"^statecache: no memory .* bytes on cpu, .* are free"):
        store_over(monkeypatch, shared=False, checkpoint_slots=10**9)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).lower()
    except psutil.Error:  # it ended
        return ""


def test_a_killed_engine_core_ends_the_server_and_leaves_nothing_behind(
    model, tmp_path, monkeypatch
):
    """SIGKILL between two requests: the server ends, the recording is sound."""
    monkeypatch.setattr(test_server, "PORT", free_port())
    path, log = tmp_path / "traffic.gz", tmp_path / "log"
    flags = ["--kv-cache-plugin", "statecache", "--statecache-record", str(path)]
    with serve(model, log, *flags):
        for number in (1, 2):
            test_server.ask(model, document(number, 600))
        time.sleep(1.5)  # the recorder writes within a second
        family = psutil.Process().children(recursive=True)
        (core,) = [one for one in family if name_of(one).startswith("vllm::enginecore")]
        core.send_signal(signal.SIGKILL)
        with pytest.raises((urllib.error.URLError, OSError, json.JSONDecodeError)):
            test_server.ask(model, document(3, 900))
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    assert len(read_trace(str(path)).requests) == 2
    assert "died unexpectedly" in log.read_text() or "EngineDeadError" in log.read_text()
