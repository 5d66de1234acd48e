"""What may go wrong around the plugin: SGLang goes on, or start-up stops with one clear line.

The index that fails is in test_failing_index.py, a seam that moved and a version that nobody tried
in test_seams.py, a pool that SGLang has no bytes left for in test_int8_budget.py.
"""

import contextlib
import signal
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest
from cache_layer import CORES, Traffic, plugin
from host_layer import HostTraffic
from scheduled import admit, finish
from server import running
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test_int8 import STATES, int8_traffic
from test_seams import in_a_fresh_process
from tiny_model import make_tiny_model

from statecache.checkpoint_pool import CheckpointPool
from statecache.trace import read_trace
from statecache_sglang import reporting
from statecache_sglang.seams import AroundPatch

ON = {"STATECACHE_CONFIG": '{"kv_cache_plugin":"statecache"}'}

# Before anything of the plugin is imported, as in a Python the extension was not built for.
BROKEN = """
    import sys
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "statecache._index":
                raise ImportError("PROBLEM", name=name)
    sys.meta_path.insert(0, Broken())
"""
PROBLEMS = {
    "missing": "No module named 'statecache._index'",
    "of another Python": "_index.cpython-313-x86_64-linux-gnu.so: undefined symbol: PyX",
}
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


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_an_extension_that_does_not_load_stops_a_server_that_asks_for_it_alone(problem):
    code = textwrap.dedent(BROKEN.replace("PROBLEM", problem)) + textwrap.dedent(PARSE)
    asked = in_a_fresh_process(code, **ON)
    assert asked.returncode == 1
    line = asked.stderr.splitlines()[-1]
    assert line.startswith("statecache: statecache was installed without its native index")
    assert line.endswith(f"reinstall it with pip ({problem})")
    assert "Traceback" not in asked.stderr
    alone = in_a_fresh_process(code)
    assert alone.stdout.splitlines()[-1] == "as far as the model"


def test_loaded_twice_the_flags_are_there_once():
    code = """
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
    """
    done = in_a_fresh_process(code)
    assert done.returncode == 0, done.stderr
    # Once in the usage line, once in the list.
    assert done.stdout.splitlines()[-2:] == ["2", "['python', 'rust', 'statecache']"]


def around_with(seen: list[str], name: str):
    def around(original, *args, **kwargs):
        seen.append(name)
        return original(*args, **kwargs)

    return around


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
    monkeypatch.setattr(owner, name, own)  # back to it in the end
    other = AroundPatch(owner, name, around_with(seen, "other"))
    stack = contextlib.ExitStack()
    if order == "before":
        other.install()
        theirs = getattr(owner, name)
        stack.enter_context(plugin(policy="gds"))
        assert getattr(owner, name) is not theirs
    else:
        stack.enter_context(plugin(policy="gds"))
        other = AroundPatch(owner, name, around_with(seen, "other"))
        other.install()
        theirs = getattr(owner, name)
    with stack:
        called(owner, name)
        assert seen == ["other"]
    assert getattr(owner, name) is theirs
    called(owner, name)
    assert seen == ["other"] * 2
    other.remove()
    if order == "before":
        assert getattr(owner, name) is own


def called(owner, name) -> None:
    """Call it as far as a pool without states, which the plugin hands straight to SGLang's."""
    with contextlib.suppress(AttributeError):
        if name == "add_one_req":
            cache = SimpleNamespace(req_to_token_pool=object(), disable=False)
            getattr(owner, name)(SimpleNamespace(tree_cache=cache), None, False, None)
        else:
            getattr(owner, name)(SimpleNamespace(supports_mamba=lambda: False), None)


def test_a_wrapper_that_was_taken_off_under_another_one_does_nothing_more():
    class Owner:
        def method(self):
            return []

    ours = AroundPatch(Owner, "method", lambda original, self: ["ours", *original(self)])
    ours.install()
    theirs = AroundPatch(Owner, "method", lambda original, self: ["theirs", *original(self)])
    theirs.install()
    assert Owner().method() == ["theirs", "ours"]
    ours.remove()
    assert Owner().method() == ["theirs"]
    ours.install()  # a later engine of this process


@pytest.mark.parametrize("core", CORES)
def test_a_store_that_fails_caches_nothing_and_loses_no_slot(core, monkeypatch, caplog):
    """Every third one, from the second request on; the others are cached and hit."""
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    store, calls = CheckpointPool.store, iter(range(100))

    def failing(*args):
        if next(calls) % 3 == 1:
            raise RuntimeError("planted")
        return store(*args)

    monkeypatch.setattr(CheckpointPool, "store", failing)
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
    assert traffic.core.advisor.active
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
        led.core.advisor = None  # as a cache of SGLang's own
        own = SimpleNamespace(attach=lambda **_: (True, "attached"))
        monkeypatch.setattr(led.cache, "_storage_attachment", own)
        assert led.cache.attach_storage_backend(storage_backend="file") == (True, "attached")


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended
        return ""


def test_a_killed_scheduler_ends_the_server_and_leaves_nothing_behind(tmp_path_factory, tmp_path):
    """SIGKILL in the middle of a long answer: the server ends, the recording is sound."""
    model, path = make_tiny_model(tmp_path_factory.mktemp("faults-model")), tmp_path / "traffic.gz"
    flags = ["--kv-cache-plugin", "statecache", "--statecache-record", str(path)]
    log = tmp_path / "log"
    with running(model, log, *flags) as server:
        tokens = [4 + at % 250 for at in range(700)]
        server.generate(tokens, new=2)
        server.generate([*tokens, 7, 8], new=2)
        time.sleep(1.5)  # the recorder writes within a second
        family = psutil.Process().children(recursive=True)
        (scheduler,) = [one for one in family if "::scheduler" in name_of(one)]
        scheduler.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert len(gone) >= 3
    assert [r.input_length for r in read_trace(str(path)).requests] == [700, 702]
    crashed = [line for line in log.read_text().splitlines() if "crashed with exit code" in line]
    assert len(crashed) == 1
    assert "scheduler_0" in crashed[0]
