"""A block policy alone: vLLM has no KV connector, and everything else is as with one."""

import pickle
import random
import types

import pytest
from engine import require_build, run
from prometheus_client import REGISTRY
from scheduled import Drafter, Run, traffic, words
from test_scheduler import allocated
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from statecache_vllm import seams, unconnected

POOL = {"checkpoints": "native", "checkpoint_slots": 4}
HASHED_AHEAD = "num_hash_lookahead_tokens"


def connected(model, monkeypatch, **more):
    """The same block policy behind a connector that vLLM knows of."""
    with monkeypatch.context() as patched:
        patched.setattr(
            unconnected,
            "carry",
            lambda config, given: setattr(config, "kv_transfer_config", seams.connect(given)),
        )
        patched.setattr("statecache_vllm.install.unconnected", unconnected)
        made = Run(model, **more)
    assert made.config.kv_transfer_config is not None
    return made


@pytest.mark.parametrize(("plugin", "connector"), [({}, False), (POOL, True)])
def test_only_a_checkpoint_pool_brings_a_connector(model, plugin, connector):
    made = Run(model, blocks=60, plugin=plugin)
    assert (made.config.kv_transfer_config is not None) == connector
    assert (unconnected.settings_of(made.config) is None) == connector
    made.add(words(random.Random(1), 40))
    assert (made.schedule().kv_connector_metadata is not None) == connector


@pytest.mark.parametrize("policy", ["reuse", "stock"])
def test_decisions_and_numbers_are_those_behind_a_connector(model, monkeypatch, policy, share):
    given = {"blocks": 70, "plugin": {"block_policy": policy}}
    alone, behind = Run(model, **given), connected(model, monkeypatch, **given)
    steps = int(1000 * share)
    assert allocated(alone, 1, steps) == allocated(behind, 1, steps)
    assert alone.cached == behind.cached
    assert alone.chunk_ends == behind.chunk_ends
    found, expected = (each.scheduler_side.report._sample() for each in (alone, behind))
    assert found == expected
    assert found["hit_tokens"] > 0
    assert found["anomalies"] == 0
    alone.check()


@pytest.mark.parametrize(
    ("drafter", "plugin", "as_vllms"),
    [
        (None, {}, True),
        (Drafter(), {}, True),
        (Drafter("ngram"), {}, True),
        (Drafter(), POOL, False),
    ],
)
def test_vllm_hashes_as_far_ahead_as_by_itself(drafting, drafter, plugin, as_vllms):
    """Where it hashes ahead at all, from 0.33 on, a checkpoint pool ends that."""
    of = [Run(drafting, blocks=60, plugin=p, drafter=drafter).config for p in (None, plugin)]
    vllms, ours = (getattr(config, HASHED_AHEAD, 0) for config in of)
    assert ours == (vllms if as_vllms else 0)
    if hasattr(of[0], HASHED_AHEAD):
        assert (vllms > 0) == (drafter == Drafter())


def test_a_process_that_the_settings_come_to_has_the_patches(model):
    config = Run(model, blocks=60, plugin={"block_policy": "stock"}).config
    sent = pickle.dumps(config.additional_config)
    unconnected._PATCHES.remove()
    assert not unconnected._PATCHES.installed
    arrived = pickle.loads(sent)
    assert unconnected._PATCHES.installed
    given = unconnected.settings_of(types.SimpleNamespace(additional_config=arrived))
    assert given == {"kv_cache_plugin": "statecache", "block_policy": "stock"}


def test_vllms_loggers_take_the_numbers_and_log_none(model, caplog):
    """Both of them get what a scheduler of this or of another process sends."""
    config = Run(model, blocks=60, plugin={}).config
    stats = SchedulerStats(kv_connector_stats={"requests": 2.0})
    caplog.set_level("INFO")
    for logger in (LoggingStatLogger(config), PrometheusStatLogger(config)):
        logger.record(stats, None)
        logger.log()
    assert "KV Transfer" not in caplog.text
    labels = {"engine": "vllm", "model_name": str(model), "rank": "0"}
    assert REGISTRY.get_sample_value("statecache_requests_total", labels) == 2
    assert KVConnectorLogging(None).observe({}) is None


def test_a_reset_of_the_connector_is_none_that_fails(model):
    made = Run(model, blocks=60, plugin={})
    prompt = words(random.Random(2), 40)
    assert [made.ask(prompt), made.ask(prompt)] == [0, 32]
    made.scheduler.log_stats = True
    assert made.scheduler.reset_prefix_cache(reset_connector=True)
    made.scheduler.log_stats = False
    assert made.ask(prompt) == 0


def test_a_scheduler_without_us_is_left_alone(model):
    Run(model, blocks=60, plugin={})
    assert Run(model, blocks=60).scheduler.connector is None


def test_an_additional_config_that_cannot_be_added_to_is_refused(model):
    class Opaque:
        def compute_hash(self):
            return "opaque"

    engine_args = EngineArgs(model=str(model), block_size=32, additional_config=Opaque())
    engine_args.statecache_flags = {"kv_cache_plugin": "statecache"}
    with pytest.raises(SystemExit, match="an additional_config that is no dictionary is not supp"):
        engine_args.create_engine_config()


def test_traffic_under_a_drafter_that_is_hashed_for_loses_no_block(drafting, share):
    made = Run(drafting, blocks=90, plugin={}, drafter=Drafter())
    for _ in traffic(made, 3, int(600 * share)):
        pass
    made.check()
    assert made.scheduler_side.faults.anomalies == 0
    assert made.shadow.resumed > 0


def test_a_model_answers_as_by_itself(model):
    """In a real engine, whose workers have no connector either."""
    require_build()
    prompt = words(random.Random(3), 200)
    answers = []
    for plugin in (None, {}):
        with run(model, plugin=plugin) as engine:
            answers.append(engine.ask([prompt, prompt]))
            assert engine.llm.llm_engine.vllm_config.kv_transfer_config is None
    assert answers[0] == answers[1]
    assert answers[0][1][0] > 0
