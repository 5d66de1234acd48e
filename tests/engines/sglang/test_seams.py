"""The seams of the installed SGLang, all of them or nothing, and what switching off leaves."""

import json
import subprocess
import sys
import textwrap

import pytest
from cache_layer import CORES, Traffic, plugin
from server import environment
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.unified_cache import tree_core_registry

from statecache.engine.seams import Seam, is_broken, probe
from statecache.engine.settings import Settings
from statecache.errors import SeamError
from statecache_sglang import seam_table, seams
from statecache_sglang.install import install
from statecache_sglang.patches import HOOKS, PATCHES
from statecache_sglang.seam_table import RECORDING_SEAMS, SEAMS, TESTED, VIEWS
from statecache_sglang.unsupported import REFUSED

ON = {"kv_cache_plugin": "statecache"}


def places() -> tuple[object, ...]:
    return (
        unified_radix_cache.COMPONENT_REGISTRY.copy(),
        unified_radix_cache.select_tree_core_backend,
        PrefillAdder.add_one_req,
        tree_core_registry.registered_tree_core_backends(),
    )


def test_every_seam_of_the_installed_version_is_in_place():
    assert seams.engine_version() in TESTED
    states = dict(probe((*SEAMS, *RECORDING_SEAMS), VIEWS))
    assert not [name for name, state in states.items() if is_broken(state)]
    if seams.engine_version() == TESTED[-1]:
        assert set(states.values()) == {"ok"}


def test_every_change_is_of_a_seam_that_is_probed_and_says_why_and_until_when():
    """`Engine` is not loaded in a scheduler: what the plugin does to it is a hook."""
    probed = {seam.target for seam in (*SEAMS, *RECORDING_SEAMS)}
    targets = [patch.target for patch in (*PATCHES, *HOOKS)]
    assert set(targets) - probed == {"sglang.srt.entrypoints.engine:Engine.server_args_class"}
    assert len(set(targets)) == len(targets)
    assert all(row.why and row.upstream and row.remove_when for row in (*PATCHES, *HOOKS))


def test_what_is_installed_can_be_taken_back():
    before = places()
    with plugin(policy="gds"):
        assert all(now is not was for now, was in zip(places()[1:], before[1:], strict=True))
        assert places()[3] == ["python", "rust", "statecache"]
    assert places() == before


@pytest.mark.parametrize(
    ("seam", "state"),
    [
        (Seam("sglang.srt.nowhere", "x"), "missing"),
        (Seam("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache.nothing"), "missing"),
        (
            Seam(
                "sglang.srt.mem_cache.unified_radix_cache",
                "UnifiedRadixCache.dec_lock_ref",
                ("self", "node"),
            ),
            "moved (takes self, node_id, params, skip_swa)",
        ),
        (
            Seam(
                "sglang.srt.mem_cache.unified_cache.components",
                "MambaComponent",
                base="SWAComponent",
            ),
            "moved (no longer a SWAComponent)",
        ),
    ],
)
def test_a_seam_that_changed_is_noticed_and_nothing_is_installed(monkeypatch, seam, state):
    before = places()
    monkeypatch.setattr(seam_table, "SEAMS", (*SEAMS, seam))
    with pytest.raises(SeamError, match="does not fit") as caught:
        install(Settings.from_given(ON, {}))
    assert str(caught.value).endswith(f"{seam.module}.{seam.path}: {state}")
    assert "\n" not in str(caught.value)
    assert places() == before


def test_another_plugin_with_the_same_name_is_not_overwritten():
    before = places()
    with plugin(policy="gds"), pytest.raises(SeamError, match="already registered"):
        install(Settings.from_given(ON, {}))
    assert places() == before


def test_an_untested_version_warns_and_works_and_with_strict_stops(monkeypatch, caplog):
    """6 slots: of 8 states the index drops 2. On a real server: test_faults.py."""
    monkeypatch.setattr(seams, "version", lambda _name: "0.5.99")
    with plugin(policy="gds"):
        assert f"SGLang 0.5.99 was not tested (tested: {', '.join(TESTED)})" in caplog.text
        for core in CORES:
            traffic = Traffic(core, slots=6)
            for number in range(8):
                traffic.run([number] * 10)
            assert traffic.hit([7] * 10) == 10
            assert traffic.core.scheduler_side.counts.numbers["evictions|policy"] == 2
            traffic.check()
    with pytest.raises(SeamError, match=r"0\.5\.99 was not tested"):
        install(Settings.from_given({**ON, "strict": True}, {}))


def in_a_fresh_process(
    code: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_the_flag_only_the_flags_themselves_are_there():
    code = """
        import json, sys
        import sglang.srt.managers.scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.mem_cache import unified_radix_cache as cache
        load_plugins()
        ours = [t for t, hooks in HookRegistry._hooks.items()
                for _, _, source in hooks if source.plugin_name == "statecache"]
        print(json.dumps([
            sorted(m for m in sys.modules if m.startswith("statecache")),
            sorted(t.rsplit(".", 2)[1:] for t in ours),
            [c.__name__ for c in cache.COMPONENT_REGISTRY.values()],
            cache.select_tree_core_backend.__module__,
        ]))
    """
    done = in_a_fresh_process(code)
    assert done.returncode == 0, done.stderr
    modules, hooked, components, select = json.loads(done.stdout.splitlines()[-1])
    assert modules == [
        "statecache_sglang",
        "statecache_sglang.adapter",
        "statecache_sglang.engine_paths",
        "statecache_sglang.seams",
        "statecache_sglang.seams.server_args",
    ]
    assert hooked == [["ServerArgs", n] for n in ("add_cli_args", "from_cli_args", "resolve_once")]
    assert components == ["FullComponent", "MambaComponent", "SWAComponent"]
    assert select == "sglang.srt.mem_cache.unified_cache.tree_core_registry"


def test_arguments_of_engine_mean_what_the_flags_mean():
    """The model is missing, so `Engine` stops right after it has read its arguments."""
    code = """
        import json, os
        from sglang.srt.entrypoints.engine import Engine
        try:
            Engine(model_path="/nowhere", kv_cache_plugin="statecache", statecache_policy="lru")
        except OSError:
            pass
        from sglang.srt.mem_cache import unified_radix_cache as cache
        print(json.dumps([os.environ["STATECACHE_CONFIG"],
                          sorted(c.__name__ for c in cache.COMPONENT_REGISTRY.values())]))
    """
    done = in_a_fresh_process(code)
    assert done.returncode == 0, done.stderr
    config, components = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(config) == {"kv_cache_plugin": "statecache", "policy": "lru"}
    assert "IndexedMambaComponent" in components


def test_settings_of_a_later_engine_take_the_place_of_the_earlier_ones():
    """What the user put into the variable stays; a record built without settings keeps all."""
    code = """
        import os
        from statecache_sglang.adapter import switch
        on = {"kv_cache_plugin": "statecache"}
        for given in ({**on, "int8": True, "int8_slots": 8}, {}, {**on, "policy": "lru"}, {}):
            switch(given)
            print(os.environ["STATECACHE_CONFIG"])
    """
    for carried, also in (("", ""), ('{"cost":"1,2"}', ',"cost":"1.0,2.0"')):
        done = in_a_fresh_process(code, STATECACHE_CONFIG=carried)
        assert done.returncode == 0, done.stderr
        first = (
            '{"kv_cache_plugin":"statecache"' + also + ',"checkpoints":"int8","checkpoint_slots":8}'
        )
        second = '{"kv_cache_plugin":"statecache","policy":"lru"' + also + "}"
        assert done.stdout.splitlines()[-4:] == [first, first, second, second]


def test_a_scheduler_process_installs_from_the_environment():
    code = """
        import sglang.srt.managers.scheduler
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.mem_cache import unified_radix_cache as cache
        print(sorted(c.__name__ for c in cache.COMPONENT_REGISTRY.values()))
    """
    done = in_a_fresh_process(code, STATECACHE_CONFIG='{"kv_cache_plugin":"statecache"}')
    assert done.returncode == 0, done.stderr
    assert "IndexedMambaComponent" in done.stdout
    refused = in_a_fresh_process(code, STATECACHE_CONFIG='{"kv_cache_plugin":"other"}')
    assert refused.returncode == 2
    assert "statecache: --kv-cache-plugin cannot be 'other'" in refused.stderr


def test_a_record_of_server_args_takes_the_settings_from_the_environment_alone():
    """`ServerArgs(...)` knows no foreign fields, so there the variable is the way in."""
    code = """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.server_args import ServerArgs
        try:
            ServerArgs(model_path="dummy", kv_cache_plugin="statecache")
        except TypeError as error:
            print(error)
        args = ServerArgs(model_path="dummy")
        try:
            args.resolve_once()
        except OSError:
            pass  # there is no such model, and that comes last
        from sglang.srt.mem_cache import unified_radix_cache as cache
        print(args.enable_int8_mamba_checkpoint)
        print(sorted(c.__name__ for c in cache.COMPONENT_REGISTRY.values()))
    """
    config = '{"kv_cache_plugin":"statecache","int8":true}'
    done = in_a_fresh_process(code, STATECACHE_CONFIG=config)
    assert done.returncode == 0, done.stderr
    refused, int8, components = done.stdout.splitlines()[-3:]
    assert "kv_cache_plugin" in refused
    assert int8 == "True"
    assert "IndexedMambaComponent" in components


def not_supported() -> dict[str, object]:
    numbers = {"pp_size": 2, "dp_size": 2}
    words = {
        "radix_cache_backend": "flexkv",
        "disaggregation_mode": "prefill",
        "hicache_storage_backend": "file",
        "hicache_host_memory_mode": "buffer_only",
    }
    return {field: {**numbers, **words}.get(field, True) for field in REFUSED}


def test_what_is_not_supported_stops_with_one_line():
    """Each on its own, by a real `ServerArgs`; what SGLang refuses itself comes first."""
    code = """
        import json, sys
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.server_args import ServerArgs
        asked = json.loads(sys.argv[1])
        lines = {}
        for field, value in asked.items():
            try:
                ServerArgs(model_path="dummy", **{field: value}).resolve_once()
            except SystemExit as stop:
                lines[field] = [stop.code, str(stop)]
        print(json.dumps(lines))
    """
    config = '{"kv_cache_plugin":"statecache"}'
    done = in_a_fresh_process(code, json.dumps(not_supported()), STATECACHE_CONFIG=config)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout.splitlines()[-1])
    assert set(lines) == set(REFUSED)
    for field, (_, name) in REFUSED.items():
        expected = f"statecache: {name} is not supported with --kv-cache-plugin statecache"
        assert lines[field] == [2, expected]


def test_a_setting_of_the_other_engine_stops_with_one_line():
    config = '{"kv_cache_plugin":"statecache","block_order":"stock"}'
    code = """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.server_args import ServerArgs
        ServerArgs(model_path="dummy").resolve_once()
    """
    done = in_a_fresh_process(code, STATECACHE_CONFIG=config)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "statecache: --statecache-block-policy is for vllm only"
    )
