"""The seams of the installed vLLM, all of them or nothing, flags, and what is refused."""

import argparse
import json
import os
import subprocess
import sys
import textwrap
import types

import pytest
import vllm.config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from statecache.engine.seams import Seam, probe
from statecache.engine.settings import Settings
from statecache.engine.views import members_of
from statecache.errors import SeamError, SettingsError
from statecache_vllm import adapter, seam_table, seams, unconnected, unsupported, views
from statecache_vllm.install import check_seams
from statecache_vllm.seam_table import SEAMS, TESTED, VIEWS
from statecache_vllm.unsupported import REFUSED

ON = {"kv_cache_plugin": "statecache"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()


def test_every_seam_of_the_installed_version_is_in_place():
    assert seams.engine_version() in TESTED
    assert {state for _, state in probe(SEAMS, VIEWS)} == {"ok"}


@pytest.mark.parametrize(
    ("seam", "state"),
    [
        (Seam("vllm.nowhere", "x"), "missing"),
        (Seam("vllm.v1.core.block_pool", "BlockPool.nothing"), "missing"),
        (
            Seam("vllm.v1.core.block_pool", "BlockPool.touch", ("self", "request", "blocks")),
            "moved (takes self, blocks)",
        ),
        (
            Seam("vllm.v1.kv_cache_interface", "MambaSpec", base="AttentionSpec"),
            "moved (no longer a AttentionSpec)",
        ),
        (
            Seam("vllm.v1.core.block_pool", "BlockHashToBlockMap", public=("insert", "pop")),
            "moved (has contain, get_one_block, too)",
        ),
        (
            Seam(
                "vllm.v1.core.block_pool",
                "BlockPool.touch",
                code=("ref_cnt", "is_null", "free_block_queue", "remove"),
            ),
            "moved (uses metrics_collector, on_block_accessed, too)",
        ),
        (
            Seam("builtins", "dict.get", code=()),
            "moved (uses what cannot be read, too)",
        ),
    ],
)
def test_a_seam_that_changed_stops_with_one_line(monkeypatch, model, seam, state):
    monkeypatch.setattr(seam_table, "SEAMS", (*SEAMS, seam))
    engine_args = EngineArgs(model=str(model), additional_config=ON)
    with pytest.raises(SystemExit) as stopped:
        engine_args.create_engine_config()
    line = str(stopped.value)
    assert line.startswith(
        f"statecache: vLLM {seams.engine_version()} does not fit (a tested version): of "
    )
    assert line.endswith(f"{seam.module}.{seam.path}: {state}")
    assert "\n" not in line
    assert engine_args.kv_transfer_config is None
    assert engine_args.worker_cls == "auto"


def test_an_untested_version_warns_and_with_strict_stops(monkeypatch, caplog):
    monkeypatch.setattr(seams, "version", lambda _name: "0.99.1+cpu")
    with caplog.at_level("WARNING", logger="statecache"):
        check_seams(Settings.from_given(ON, {}))
    assert f"vLLM 0.99.1 was not tested (tested: {', '.join(TESTED)})" in caplog.text
    with pytest.raises(SeamError, match=r"0\.99\.1 was not tested"):
        check_seams(Settings.from_given({**ON, "strict": True}, {}))


def parsed(*words):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))


def given_to_processes(engine_args):
    config = engine_args.create_engine_config()
    assert config.kv_transfer_config is None
    return unconnected.settings_of(config)


def test_flags_reach_every_process(model):
    words = ["--kv-cache-plugin", "statecache", "--statecache-wait-for-head", "off"]
    words += ["--statecache-cost", "2,0.5", "--statecache-block-policy", "stock"]
    engine_args = parsed("--model", str(model), "--block-size", "32", *words)
    assert given_to_processes(engine_args) == {
        "kv_cache_plugin": "statecache",
        "wait_for_head": "off",
        "cost": "2.0,0.5",
        "block_policy": "stock",
    }


def test_additional_config_means_what_the_flags_mean(model):
    config = {**ON, "statecache_wait_for_head": "off", "other": 1}
    engine_args = EngineArgs(model=str(model), block_size=32, additional_config=config)
    assert given_to_processes(engine_args) == {
        "kv_cache_plugin": "statecache",
        "wait_for_head": "off",
    }
    assert engine_args.additional_config == config


def test_the_environment_means_what_the_flags_mean(monkeypatch, model):
    monkeypatch.setenv(
        "STATECACHE_CONFIG", '{"kv_cache_plugin":"statecache","wait_for_head":"off"}'
    )
    engine_args = EngineArgs(model=str(model), block_size=32)
    assert given_to_processes(engine_args) == {
        "kv_cache_plugin": "statecache",
        "wait_for_head": "off",
    }


def test_without_the_flag_the_configuration_is_vllms_own(model):
    config = EngineArgs(model=str(model), block_size=32).create_engine_config()
    assert config.kv_transfer_config is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.cache_config.prefix_cache_retention_interval == 0


def test_a_pool_brings_its_worker(model):
    config = {**ON, "statecache_checkpoints": "native"}
    engine_args = EngineArgs(model=str(model), block_size=32, additional_config=config)
    made = engine_args.create_engine_config()
    worker = made.parallel_config.worker_cls
    assert worker == "statecache_vllm.worker_side.CpuCheckpointWorker"
    assert made.kv_transfer_config.kv_connector == "StateCacheConnector"
    assert engine_args.worker_cls == "auto"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"kv_cache_plugin": "other"}, "--kv-cache-plugin cannot be 'other': use statecache"),
        ({**ON, "statecache_policy": "x"}, "--statecache-policy cannot be 'x'"),
        ({**ON, "statecache_block_policy": "gds"}, "--statecache-block-policy cannot be 'gds'"),
        ({"statecache_policy": "lru"}, "--statecache-policy needs --kv-cache-plugin statecache"),
        ({**ON, "statecache_checkpoint_interval": -1}, "--statecache-checkpoint-interval cannot"),
        ({**ON, "statecache_checkpoint_interval": 33}, "must be a multiple of the block size, 32"),
    ],
)
def test_a_bad_setting_stops_with_one_line(model, config, line):
    with pytest.raises(SystemExit, match="statecache: ") as stopped:
        EngineArgs(model=str(model), block_size=32, additional_config=config).create_engine_config()
    assert line in str(stopped.value)
    assert "\n" not in str(stopped.value)


NOT_SUPPORTED = {
    "kv_transfer_config": object(),
    "ec_transfer_config": object(),
    "kv_offloading_size": 1.0,
    "scheduler_cls": "other.Scheduler",
    **dict.fromkeys(["enable_sleep_mode", "disable_hybrid_kv_cache_manager"], True),
    "enable_return_routed_experts": True,
    **{field: 2 for field in REFUSED if field.endswith("parallel_size")},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_stops_with_one_line(model, field):
    engine_args = EngineArgs(model=str(model), additional_config=ON)
    setattr(engine_args, field, NOT_SUPPORTED[field])
    with pytest.raises(SystemExit) as stopped:
        engine_args.create_engine_config()
    expected = f"{REFUSED[field][1]} is not supported with --kv-cache-plugin statecache"
    assert str(stopped.value) == f"statecache: {expected}"


@pytest.mark.parametrize(
    ("flags", "environment", "name"),
    [
        ({}, {"VLLM_DP_SIZE": "2"}, "data parallelism"),
    ],
)
def test_what_is_asked_for_in_another_way_is_refused_too(
    monkeypatch, model, flags, environment, name
):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    engine_args = EngineArgs(model=str(model), block_size=32, additional_config=ON, **flags)
    with pytest.raises(SystemExit, match=f"statecache: {name} .* is not supported with"):
        engine_args.create_engine_config()


@pytest.mark.parametrize(
    ("method", "hybrid", "name"),
    [
        ("extract_hidden_states", False, "the speculative method extract_hidden_states"),
        ("draft_model", True, r"a draft model with recurrent states \(a rejected draft would"),
        ("draft_model", False, None),
        ("mtp", True, None),  # vLLM says of an MTP head what it says of its model
        *((name, False, None) for name in ("ngram", "eagle", "eagle3", "dflash", "dspark")),
    ],
)
def test_which_drafters_are_refused(method, hybrid, name):
    draft = types.SimpleNamespace(method=method, draft_model_config=types.SimpleNamespace())
    draft.draft_model_config.is_hybrid = hybrid
    config = types.SimpleNamespace(
        speculative_config=draft,
        parallel_config=types.SimpleNamespace(data_parallel_size=1),
        aux_output_config=types.SimpleNamespace(enabled=False),
    )
    if name is None:
        unsupported.refuse_config(config)
        return
    with pytest.raises(SettingsError, match=f"{name} .*is not supported with"):
        unsupported.refuse_config(config)


@pytest.mark.parametrize(
    ("place", "renamed"),
    [
        ("SpeculativeConfig.method", "kind"),
        ("SpeculativeConfig.draft_model_config", "drafter"),
        ("AuxOutputConfig.enabled", "is_on"),
        ("ParallelConfig.data_parallel_size", "data_ranks"),
    ],
)
def test_what_tells_a_refusal_is_a_seam_that_stops_when_it_was_renamed(monkeypatch, place, renamed):
    owner, name = place.split(".")
    others = members_of(getattr(views, owner))
    others.remove(name)
    monkeypatch.setattr(vllm.config, owner, type(owner, (), dict.fromkeys([*others, renamed])))
    with pytest.raises(SeamError, match="does not fit") as caught:
        check_seams(Settings.from_given(ON, {}))
    assert str(caught.value).endswith(f"vllm.config.{place}: missing")
    assert "\n" not in str(caught.value)


def test_a_server_without_a_drafter_is_not_refused_for_one():
    unsupported.refuse_config(
        types.SimpleNamespace(
            speculative_config=None,
            parallel_config=types.SimpleNamespace(data_parallel_size=1),
            aux_output_config=types.SimpleNamespace(enabled=False),
        )
    )


def test_ngram_and_mtp_go_with_the_plugin(drafting):
    for given in (
        {"spec_method": "ngram", "spec_tokens": 2},
        {"spec_method": "mtp", "spec_tokens": 1},
    ):
        config = EngineArgs(
            model=str(drafting), block_size=32, additional_config=ON, **given
        ).create_engine_config()
        assert unconnected.settings_of(config) is not None
        assert config.num_speculative_tokens > 0


@pytest.mark.parametrize(
    ("connector", "takes_groups"),
    [
        *((f"{name}Connector", True) for name in ("Offloading", "SimpleCPUOffload", "DecodeBench")),
        ("ExampleHiddenStatesConnector", True),
        *(
            (name, False)
            for name in ("ExampleConnector", "LMCacheConnectorV1", "FlexKVConnectorV1")
        ),
    ],
)
def test_which_other_connectors_a_hybrid_model_would_take(connector, takes_groups):
    """What `refusals` says of composing: of these only the first two move KV, through CUDA."""
    assert supports_hma(KVConnectorFactory.get_connector_class_by_name(connector)) == takes_groups


def test_nothing_is_refused_by_default(model):
    unsupported.refuse(EngineArgs(model=str(model)), pool=True)
    with pytest.raises(SettingsError, match="nothing would be cached"):
        unsupported.refuse(EngineArgs(model=str(model), enable_prefix_caching=False), pool=False)
    with pytest.raises(SettingsError, match="--worker-cls beside a checkpoint pool"):
        unsupported.refuse(EngineArgs(model=str(model), worker_cls="mine.Worker"), pool=True)
    unsupported.refuse(EngineArgs(model=str(model), worker_cls="mine.Worker"), pool=False)


def test_a_key_is_a_hash_and_its_group():
    """The adapter tells groups by the four bytes that `key_of` puts behind a hash."""
    key = make_block_hash_with_group_id(b"0123", 7)
    assert key == b"0123" + seams.key_of(b"", 7)
    assert (key[-4:], key[:-4]) == (seams.key_of(b"", 7), b"0123")
    assert seams.plain_hash(key) == b"0123"


def test_loading_the_plugin_loads_nothing_else():
    code = """
        import json, sys
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        print(json.dumps([
            sorted(m for m in sys.modules if m.startswith("statecache")),
            Scheduler._mamba_block_aligned_split.__module__,
            "wrapped" in str(Scheduler._mamba_block_aligned_split),
        ]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    modules, module, wrapped = json.loads(done.stdout.splitlines()[-1])
    assert modules == [f"statecache_vllm{m}" for m in ("", ".adapter", ".engine_paths", ".seams")]
    assert (module, wrapped) == ("vllm.v1.core.sched.scheduler", False)


def test_flags_of_the_other_engine_are_not_offered():
    parser = argparse.ArgumentParser()
    adapter._add_flags(parser)
    assert "--statecache-block-policy" in parser.format_help()
