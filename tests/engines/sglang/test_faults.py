"""What may go wrong around the plugin: SGLang goes on, or start-up stops with one clear line.

The index that fails is in test_failing_index.py, a seam that moved and a version that nobody tried
in test_seams.py, a pool that SGLang has no bytes left for in test_int8_budget.py.
"""

import contextlib
import functools
import http.client
import json
import shutil
import signal
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cache_layer import CORES, Traffic, plugin
from host_layer import HostTraffic
from planted_faults import failing_store
from scheduled import admit, finish
from server import STANDINS, Server, refused, running
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_int8 import STATES, int8_traffic
from test_seams import in_a_fresh_process
from tiny_model import make_tiny_model

import statecache
from statecache.checkpoint.pool import CheckpointPool
from statecache.trace.format import read_trace
from statecache_sglang import reporting
from statecache_sglang.seam_table import TESTED
from support.exposition import wait_for
from support.waiting import DEADLINE_SECONDS, wait_for_lines

ON = {"STATECACHE_CONFIG": '{"kv_cache_plugin":"statecache"}'}

PARSE = """
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang.srt.server_args import ServerArgs
    args = ServerArgs(model_path="dummy")
    try:
        args.resolve_once()
    except OSError:
        pass  # there is no such model
    print("as far as the model")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("faults-model"))


def of_another_python(extension: Path) -> None:
    extension.rename(extension.with_name("_index.cpython-39-x86_64-linux-gnu.so"))


# What is done to the native index, and what Python says of it then.
PROBLEMS = {
    "missing": (Path.unlink, "No module named 'statecache._index'"),
    "of another Python": (of_another_python, "No module named 'statecache._index'"),
    "broken": (lambda file: file.write_bytes(b"no library"), "_index."),
}


def with_index(folder: Path, problem: str) -> dict[str, str]:
    """An installation whose native index has a problem, as variables for a process."""
    copy = folder / "statecache"
    installed = Path(statecache.__file__).parent
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (extension,) = copy.glob("_index.*.so")
    PROBLEMS[problem][0](extension)
    return {"PYTHONPATH": f"{STANDINS}:{folder}"}


def assert_refused(line: str, problem: str) -> None:
    assert line.startswith("statecache: statecache was installed without its native index")
    said = line.partition("reinstall it with pip (")[2]
    assert PROBLEMS[problem][1] in said
    assert said.endswith(")")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_extension_that_does_not_load_stops_who_asks_for_it_alone(tmp_path, problem):
    there = with_index(tmp_path, problem)
    asked = in_a_fresh_process(PARSE, **ON, **there)
    assert asked.returncode == 2
    assert_refused(asked.stderr.splitlines()[-1], problem)
    assert "Traceback" not in asked.stderr
    alone = in_a_fresh_process(PARSE, **there)
    assert alone.stdout.splitlines()[-1] == "as far as the model"


def test_an_extension_that_does_not_load_stops_a_server(model, tmp_path):
    there = with_index(tmp_path, "broken")
    written = refused(model, "--kv-cache-plugin", "statecache", **there)
    assert_refused(written.splitlines()[-1], "broken")
    assert "Traceback" not in written


def test_loaded_twice_the_flags_are_there_once_and_all_is_counted_once():
    """6 slots: of 8 states the index drops 2; then two slots are left and one request comes."""
    code = """
        import sys
        import argparse
        from sglang.srt.plugins import load_plugins
        load_plugins()
        import statecache_sglang
        statecache_sglang.register()
        from sglang.srt.plugins.hook_registry import HookRegistry
        HookRegistry.apply_hooks()
        from sglang.srt.server_args import ServerArgs
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        print(parser.format_help().count("--statecache-policy NAME"))
        from statecache_sglang.adapter import switch
        for _ in range(2):
            switch({"kv_cache_plugin": "statecache"})
        from sglang.srt.mem_cache.unified_cache import tree_core_registry
        print(tree_core_registry.registered_tree_core_backends())
        sys.path.append(sys.argv[1])
        from cache_layer import Traffic
        from scheduled import adder, ask, request
        from statecache_sglang.reporting import sample
        for core in ("python", "rust"):
            traffic = Traffic(core, slots=6)
            for number in range(8):
                traffic.run([number] * 10)
            traffic.evict(states=2)
            req = request([7] * 10 + [8])
            req.init_next_round_input(traffic.cache)
            ask(adder(traffic), req)
            traffic.sane()
            found = sample(traffic.cache)
            asked = "evictions|policy", "requests", "prompt_tokens", "hit_tokens", "anomalies"
            print([int(found[name]) for name in asked])
    """
    done = in_a_fresh_process(code, str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    # Once in the usage line, once in the list.
    flags, cores, *counted = done.stdout.splitlines()[-4:]
    assert (flags, cores) == ("2", "['python', 'rust', 'statecache']")
    assert counted == ["[4, 1, 11, 10, 0]"] * 2


def wrap(monkeypatch, owner, name: str, seen: list[str]) -> None:
    """Put another plugin's wrapper around a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        seen.append("other")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(PrefillAdder, "add_one_req"), (UnifiedRadixCache, "init_load_back")],
)
def test_another_plugin_around_the_same_method_is_called_too_and_stays(
    monkeypatch, order, owner, name
):
    seen: list[str] = []
    own = getattr(owner, name)
    stack = contextlib.ExitStack()
    if order == "before":
        wrap(monkeypatch, owner, name, seen)
        theirs = getattr(owner, name)
        stack.enter_context(plugin(policy="gds"))
        assert getattr(owner, name) is not theirs
    else:
        stack.enter_context(plugin(policy="gds"))
        wrap(monkeypatch, owner, name, seen)
        theirs = getattr(owner, name)
    with stack:
        called(owner, name)
        assert seen == ["other"]
    assert getattr(owner, name) is theirs
    called(owner, name)
    assert seen == ["other"] * 2
    assert own is not theirs


def called(owner, name) -> None:
    """Call it as far as a pool without states, which the plugin hands straight to SGLang's."""
    with contextlib.suppress(AttributeError):
        if name == "add_one_req":
            cache = SimpleNamespace(req_to_token_pool=object(), disable=False)
            getattr(owner, name)(SimpleNamespace(tree_cache=cache), None, False, None)
        else:
            getattr(owner, name)(SimpleNamespace(supports_mamba=lambda: False), None)


@pytest.mark.parametrize("core", CORES)
def test_a_store_that_fails_caches_nothing_and_loses_no_slot(core, monkeypatch, caplog):
    """Every third one, from the second request on; the others are cached and hit."""
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    monkeypatch.setattr(CheckpointPool, "store", failing_store(CheckpointPool.store))
    kept = []
    for number in range(12):
        tokens = [number] * 10
        finish(traffic, admit(traffic, tokens), len(tokens))
        kept.append(traffic.hit([*tokens, 99]) == 10)
        cached = len(traffic.state_slots())
        assert cached + pool.available_size() == STATES
        assert traffic.requests.mamba_allocator.available_size() == 4
        traffic.core.sanity_check([], [])
    assert kept == [number % 3 != 1 for number in range(12)]
    assert (pool.failed, pool.stored) == (4, 8)
    assert traffic.core.scheduler_side.faults.active
    assert reporting.sample(traffic.cache)["anomalies"] == 4
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "could not be stored; it is not cached" in line.message


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp]\ncan't allocate"), "can't allocate"),
        (MemoryError("no more"), "no more"),
    ],
)
def test_memory_that_the_pool_does_not_get_stops_the_start_with_one_line(monkeypatch, error, said):
    monkeypatch.setattr(CheckpointPool, "__init__", lambda *_args, **_more: raise_it(error))
    with pytest.raises(SystemExit) as stopped:
        int8_traffic("rust", slots=4)
    line = str(stopped.value)
    assert line.startswith(f"statecache: no memory for an int8 checkpoint pool of {STATES} states:")
    assert said in line
    assert "\n" not in line


def test_a_pool_that_is_larger_than_the_memory_stops_the_start_with_one_line():
    with (
        plugin(policy="gds", int8=True, int8_slots=10**9),
        pytest.raises(SystemExit, match=r"^statecache: no memory .* bytes on cpu, .* are free"),
    ):
        Traffic("rust", slots=4)


def raise_it(error: Exception):
    raise error


@pytest.mark.parametrize("core", CORES)
def test_a_storage_backend_cannot_be_attached_to_a_cache_the_index_leads(core, monkeypatch):
    """`/attach_hicache_storage` of a running server; without the plugin SGLang's own answer."""
    with plugin(policy="gds"):
        led = HostTraffic(core, "write_through", ratio=0.5, slots=16, kv_tokens=900)
        answer = led.cache.attach_storage_backend(storage_backend="file")
        assert answer == (
            False,
            "statecache: a storage backend is not supported with --kv-cache-plugin statecache",
        )
        led.core.scheduler_side = None  # as a cache of SGLang's own
        own = SimpleNamespace(attach=lambda **_: (True, "attached"))
        monkeypatch.setattr(led.cache, "_storage_attachment", own)
        assert led.cache.attach_storage_backend(storage_backend="file") == (True, "attached")


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended
        return ""


def ask_for_long(server: Server, begun: threading.Event, seen: list) -> threading.Thread:
    """Ask for an answer that takes minutes, as a stream; the lines its client gets are `seen`."""
    sampling = {"max_new_tokens": 3_000, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [9] * 50, "sampling_params": sampling, "stream": True}
    url = f"http://127.0.0.1:{server.port}/generate"
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)

    def ask() -> None:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(asked, timeout=DEADLINE_SECONDS) as answer,
        ):
            for line in answer:
                seen.append(line)
                begun.set()

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def shared_memory_of(family: list[psutil.Process]) -> set[Path]:
    maps = {Path(part.path) for process in family for part in process.memory_maps()}
    return {path for path in maps if path.is_relative_to("/dev/shm")}


def test_a_killed_scheduler_ends_the_server_and_leaves_nothing_behind(model, tmp_path):
    """SIGKILL in the middle of a long answer: the server ends, and starts again beside it.

    To save servers the first one has the plugin loaded twice, which must not show, and the second
    one has a version of SGLang that nobody tried.
    """
    path = tmp_path / "traffic.gz"
    flags = ["--kv-cache-plugin", "statecache", "--statecache-record", str(path)]
    flags.append("--enable-metrics")
    tokens = [4 + at % 250 for at in range(700)]
    log, begun, seen = tmp_path / "log", threading.Event(), []
    with running(model, log, *flags, PLANTED_FAULTS="twice") as server:
        before = [server.generate(tokens, new=2), server.generate([*tokens, 7, 8], new=2)]
        url = f"http://127.0.0.1:{server.port}"
        found = wait_for(url, lambda found: found["requests_total", ""] == 2)
        assert found["requests_total", ""] == 2
        assert found["prompt_tokens_total", ""] == 700 + 702
        assert found["hit_tokens_total", ""] == before[1]["cached"] == 700
        wait_for_lines(path, 2)
        client = ask_for_long(server, begun, seen)
        assert begun.wait(DEADLINE_SECONDS)
        ours = psutil.Process().children()
        (launcher,) = [child for child in ours if str(server.port) in child.cmdline()]
        family = [launcher, *launcher.children(recursive=True)]
        (scheduler,) = [process for process in family if "::scheduler" in name_of(process)]
        shared = shared_memory_of(family)
        scheduler.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(family, timeout=DEADLINE_SECONDS)
        client.join(DEADLINE_SECONDS)
        assert not alive
        assert len(gone) >= 3
    assert not client.is_alive()
    assert b"data: [DONE]" not in b"".join(seen)
    assert launcher.returncode == -signal.SIGKILL  # as SGLang ends itself
    for segment in filter(Path.exists, shared):  # SGLang's own, as without the plugin
        assert segment.name.startswith("sglang_loads_")
        segment.unlink()
    assert [r.input_length for r in read_trace(str(path)).requests] == [700, 702]
    crashed = [line for line in log.read_text().splitlines() if "crashed with exit code" in line]
    assert len(crashed) == 1
    assert "scheduler_0" in crashed[0]

    log = tmp_path / "second-log"
    with running(model, log, *flags, PLANTED_FAULTS="version") as server:
        again = [server.generate(tokens, new=2), server.generate([*tokens, 7, 8], new=2)]
        url = f"http://127.0.0.1:{server.port}"
        found = wait_for(url, lambda found: found["requests_total", ""] == 2)
        assert (found["active", "learned"], found["anomalies_total", ""]) == (1, 0)
        wait_for_lines(tmp_path / "traffic.2.gz", 2)
    assert again == before
    assert f"SGLang 0.5.99 was not tested (tested: {', '.join(TESTED)})" in log.read_text()
    for record in (path, tmp_path / "traffic.2.gz"):
        assert [r.input_length for r in read_trace(str(record)).requests] == [700, 702]
