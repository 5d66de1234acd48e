"""How many states the int8 pool holds, and what that leaves for the rest."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from cache_layer import STATE_BYTES, Traffic, plugin
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

GIB = 1 << 30
STATE, AT_REST = STATE_BYTES["running"], STATE_BYTES["at rest"]  # 2,816 and 1,920
INT8 = {"policy": "gds", "int8": True}


class Configurator(KVCacheConfigurator):
    """SGLang's own, with what it asks of a model to divide memory between states and KV."""

    def __init__(self, params, side_bytes: int = 0, drafts: bool = False):
        self.mambaish_config = SimpleNamespace(mamba2_cache_params=params)
        self.extra_mamba_cache_bytes_per_req = side_bytes
        self.hybrid_gdn_config = self.hybrid_kda_config = None
        self.spec_algorithm = (
            SpeculativeAlgorithm.NONE if not drafts else SpeculativeAlgorithm.EAGLE
        )
        self.attn_dp_size = self.pp_size = 1

    def fused_entry_bytes(self, sub_pool_name: str) -> None:
        """There is no draft model."""


def left_of(traffic: Traffic, rest: int, **options) -> int:
    """Bytes that SGLang leaves for KV of `rest`."""
    made = Configurator(traffic.state_params, **options)
    return round(made._handle_max_mamba_cache(rest / GIB) * GIB)


def state_slots(slots: int | None):
    """--max-mamba-cache-size, for a while."""
    return get_schedule().override(max_mamba_cache_size=slots)


def test_the_pool_of_so_many_slots_is_taken_off():
    with plugin(**INT8, int8_slots=100):
        traffic = Traffic("rust", slots=64)
        with state_slots(64):
            assert left_of(traffic, 1_000_000) == 1_000_000 - 65 * STATE - 101 * AT_REST
            side = 48
            assert left_of(traffic, 1_000_000, side_bytes=side) == (
                1_000_000 - 65 * (STATE + side) - 101 * (AT_REST + side)
            )


def test_without_a_number_the_pool_takes_as_many_bytes_as_sglangs_own():
    """65 x 2,816 bytes hold 95 states of 1,920 bytes, one of them reserved."""
    with plugin(**INT8):
        traffic = Traffic("rust", slots=64)
        with state_slots(64):
            assert left_of(traffic, 1_000_000) == 1_000_000 - 2 * 65 * STATE
    assert traffic.slots == 94
    assert (94 + 1) * AT_REST <= 65 * STATE < (94 + 2) * AT_REST
    assert traffic.requests.mamba_ckpt_pool.mem_usage_bytes() == 95 * AT_REST


def test_without_any_number_both_pools_share_what_the_ratio_gives():
    """The ratio of states to KV is 0.9: of 1,400,000 bytes each pool gets 450,000, KV 500,000."""
    with plugin(**INT8):
        traffic = Traffic("rust", slots=64)
        with state_slots(None):
            assert get_schedule().mamba_full_memory_ratio == 0.9
            left = left_of(traffic, 1_400_000)
            slots = get_schedule().max_mamba_cache_size
    assert slots == 450_000 // STATE - 1
    assert left == 1_400_000 - 450_000 - (slots + 1) * STATE


@contextmanager
def a_drafter(requests: int):
    """States and KV share alike, 4 tokens are verified, so many requests run; 3 slots for each."""
    schedule = {"mamba_full_memory_ratio": 1.0, "max_running_requests": requests}
    with (
        get_schedule().override(**schedule),
        get_spec().override(speculative_num_draft_tokens=4),
        state_slots(None),
    ):
        yield


# Of 28 states' bytes the pool gets 4. SGLang halves the 24 that are left: 4 slots, one of them
# reserved, for one request; it and the reserved row have 4 states each for their drafts. Of 62 the
# pool gets 10: then 10 slots, so 3 requests, and 16 states for drafts, of 26.
@pytest.mark.parametrize(("rest", "slots", "requests"), [(28, 4, 1), (62, 10, 3)])
def test_the_states_of_drafts_are_part_of_what_is_shared(rest, slots, requests):
    with plugin(**INT8):
        traffic = Traffic("rust", slots=slots - 1)
        with a_drafter(requests=48):
            left = left_of(traffic, rest * STATE, drafts=True)
            assert get_schedule().max_mamba_cache_size == slots - 1
    assert left == (rest - 2 * slots - (requests + 1) * 4) * STATE
    assert left == (rest - slots) // 2 * STATE
    assert traffic.requests.mamba_ckpt_pool.mem_usage_bytes() <= slots * STATE


def test_a_number_of_slots_leaves_the_states_of_drafts_to_sglang():
    with plugin(**INT8):
        traffic = Traffic("rust", slots=64)
        with a_drafter(requests=10), state_slots(64):
            left = left_of(traffic, 1_000_000, drafts=True)
    assert left == 1_000_000 - 2 * 65 * STATE - (10 + 1) * 4 * STATE


@pytest.mark.parametrize(
    ("given", "what", "needed"),
    [({"checkpoint_slots": 100}, "-slots 100", 101 * AT_REST), ({}, "s int8", 65 * STATE)],
)
def test_when_nothing_is_left_the_server_stops_with_the_numbers(given, what, needed):
    with plugin(**INT8, **given):
        traffic = Traffic("rust", slots=64)
        with state_slots(64), pytest.raises(SystemExit) as stopped:
            left_of(traffic, needed)
        assert str(stopped.value) == (
            f"statecache: --statecache-checkpoint{what} needs {needed:,} bytes,"
            f" {needed:,} are left for states and KV"
        )
