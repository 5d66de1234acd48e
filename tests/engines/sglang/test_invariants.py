"""SGLang's own idle check, which the plugin extends: active + cached + free = total."""

import pytest
from cache_layer import CORES, Traffic, plugin
from scheduled import admit, finish
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
from sglang.srt.observability.scheduler_stage_metrics import SchedulerStageMetricsRecorder

SLOTS, CHECKPOINTS = 16, 8
POOLS = {"active": {}, "int8": {"int8": True, "int8_slots": CHECKPOINTS}}


class Batch:
    """What SGLang's checker asks of a batch."""

    def __init__(self, reqs: list):
        self.reqs = reqs


def checker_of(traffic: Traffic, running: list) -> SchedulerInvariantChecker:
    """SGLang's checker and observer over a cache, as `Scheduler` makes them."""
    shared = {
        "tree_cache": traffic.cache,
        "token_to_kv_pool_allocator": traffic.allocator,
        "req_to_token_pool": traffic.requests,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": True,
        "full_tokens_per_layer": None,
        "swa_tokens_per_layer": None,
        "max_total_num_tokens": traffic.kv_tokens,
    }
    observer = SchedulerPoolStatsObserver(
        session_controller=None, hisparse_coordinator=None, enable_hisparse=False, **shared
    )
    return SchedulerInvariantChecker(
        disaggregation_mode=DisaggregationMode.NULL,
        page_size=1,
        pool_stats_observer=observer,
        get_last_batch=lambda: None,
        get_running_batch=lambda: Batch(running),
        scheduler_stage_metrics=SchedulerStageMetricsRecorder(enabled=False),
        **shared,
    )


def state_check(traffic: Traffic, running: list | None = None) -> tuple[bool, str]:
    checker = checker_of(traffic, running or [])
    return checker._check_mamba_pool(checker.pool_stats_observer.get_pool_stats())


def after_some_requests(core: str) -> Traffic:
    """Five cached states, nothing running."""
    traffic = Traffic(core, slots=SLOTS)
    for number in range(5):
        tokens = [number] * 10
        finish(traffic, admit(traffic, tokens), len(tokens))
    return traffic


@pytest.mark.parametrize("core", CORES)
def test_an_idle_cache_adds_up(core):
    with plugin(policy="gds"):
        traffic = after_some_requests(core)
        leaked, message = state_check(traffic)
        assert message.endswith("[statecache states] total=16, active=0, cached=5, free=11")
        assert not leaked
        checker = checker_of(traffic, [])
        leaked, messages = checker._check_all_pools(checker.pool_stats_observer.get_pool_stats())
        assert not leaked
        assert messages[-1] == message


@pytest.mark.parametrize("core", CORES)
def test_an_idle_cache_adds_up_in_both_pools(core):
    with plugin(policy="gds", **POOLS["int8"]):
        leaked, message = state_check(after_some_requests(core))
        assert not leaked
        assert message.splitlines()[-2:] == [
            "[statecache states] total=16, active=0, cached=0, free=16",
            "[statecache int8 states] total=8, active=0, cached=5, free=3",
        ]


@pytest.mark.parametrize("core", CORES)
def test_a_running_request_counts_by_what_it_holds(core):
    with plugin(policy="gds"):
        traffic = after_some_requests(core)
        running = admit(traffic, [9] * 10)
        ours = state_check(traffic, [running])[1].splitlines()[-1]
        assert ours == "[statecache states] total=16, active=1, cached=5, free=10"


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("pool", POOLS)
def test_a_lost_slot_is_found(core, pool):
    with plugin(policy="gds", **POOLS[pool]):
        traffic = after_some_requests(core)
        assert traffic.state_pool.alloc(1) is not None
        leaked, message = state_check(traffic)
        assert leaked
        assert f"cached=5, free={traffic.slots - 6}" in message.splitlines()[-1]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("pool", POOLS)
def test_an_index_that_lost_a_state_is_silenced(core, pool):
    """SGLang's counters are right here, and no slot is lost: the server must not be stopped."""
    with plugin(policy="gds", **POOLS[pool]):
        traffic = after_some_requests(core)
        side = traffic.core.scheduler_side
        side.registry.drop(side.registry.states()[0])
        leaked, message = state_check(traffic)
        assert not leaked
        assert f"cached=4, free={traffic.slots - 5}" in message.splitlines()[-1]
        assert (side.faults.active, side.faults.anomalies) == (False, 1)
        assert "statecache" not in state_check(traffic)[1]


def test_where_the_index_is_silent_the_check_is_sglangs_alone():
    with plugin(policy="gds"):
        traffic = after_some_requests("rust")
        traffic.core.scheduler_side.faults.active = False
        leaked, message = state_check(traffic)
        assert not leaked
        assert "statecache" not in message
