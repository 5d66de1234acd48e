"""Caches the index cannot lead: the server stops with one line.

`UnifiedRadixCache.__init__` asks `select_tree_core_backend`; so do these tests, without pools.
"""

import dataclasses
import types

import pytest
from cache_layer import CORES, FULL, MAMBA, Traffic, plugin
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import MambaComponent

from statecache.engine.settings import Settings
from statecache_sglang.unsupported import REFUSED, REFUSED_WITH_INT8, refuse

SWA = ComponentType.SWA
INT8 = {"checkpoints": "int8", "checkpoint_slots": 8}
INT8_AND_HOST = (
    "statecache: --enable-hierarchical-cache is not supported with --statecache-checkpoints int8"
)


class OtherStates(MambaComponent):
    """A component that a build of SGLang puts in the place of its own, as the one for MLX does."""


REFUSED_CACHES = {
    "a cache of FULL, SWA, MAMBA": {"tree_components": (FULL, SWA, MAMBA)},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "a cache with components of its own (MLX)": {
        "component_registry_override": {MAMBA: OtherStates},
        "tree_core_backend": "python",
    },
}


@pytest.mark.parametrize("name", REFUSED_CACHES)
def test_a_cache_the_index_cannot_lead_stops_the_server(name):
    params = dataclasses.replace(Traffic("python").params, **REFUSED_CACHES[name])
    with plugin(policy="gds"), pytest.raises(SystemExit) as stopped:
        unified_radix_cache.select_tree_core_backend(params)
    assert str(stopped.value) == (
        f"statecache: {name} is not supported with --kv-cache-plugin statecache"
    )


@pytest.mark.parametrize("core", CORES)
def test_host_copies_of_int8_states_are_refused_by_the_cores_too(core):
    with plugin(policy="gds", int8=True, int8_slots=8):
        traffic = Traffic(core)
    with pytest.raises(SystemExit) as stopped:
        traffic.core.set_hicache_enabled()
    assert str(stopped.value) == INT8_AND_HOST
    assert not traffic.core.enable_hicache


def arguments(**given):
    """The arguments of a server that asks for nothing else."""
    fields = dict.fromkeys([*REFUSED, *REFUSED_WITH_INT8, "enable_hierarchical_cache"])
    fields["disaggregation_mode"] = "null"
    return types.SimpleNamespace(**fields | given)


@pytest.mark.parametrize("field", REFUSED_WITH_INT8)
def test_what_has_no_states_that_int8_could_store_is_refused_with_it_alone(field):
    flag = "--" + field.replace("_", "-")
    asked = arguments(**{field: True, "speculative_algorithm": "EAGLE"})
    refuse(asked, Settings.from_given({"kv_cache_plugin": "statecache"}, {}))
    with pytest.raises(SystemExit) as stopped:
        refuse(asked, Settings.from_given({"kv_cache_plugin": "statecache", **INT8}, {}))
    assert str(stopped.value).startswith(f"statecache: {flag} (")
    assert str(stopped.value).endswith(") is not supported with --statecache-checkpoints int8")


def test_what_was_not_tried_with_native_states_is_refused_with_them_too():
    asked = arguments(enable_linear_replayssm_spec=True, speculative_algorithm="EAGLE")
    with pytest.raises(SystemExit) as stopped:
        refuse(asked, Settings.from_given({"kv_cache_plugin": "statecache"}, {}))
    assert str(stopped.value) == (
        "statecache: --enable-linear-replayssm-spec (not tried: a verify step keeps no state of"
        " each draft) is not supported with --kv-cache-plugin statecache"
    )


def clone(pool, params):
    """The pool of a draft head that has states of its own, as SGLang makes one of the target's."""
    return pool.clone_with_new_mamba(
        mamba_size=8,
        mamba_spec_state_size=8,
        cache_params=params,
        device="cpu",
        enable_mamba_extra_buffer=False,
        draft_model_idx=0,
    )


def test_a_draft_head_gets_no_int8_pool():
    """SGLang turns several draft heads on by itself for some models."""
    with plugin(policy="gds", **INT8):
        traffic = Traffic("rust")
        with pytest.raises(SystemExit) as stopped:
            clone(traffic.requests, traffic.state_params)
    assert str(stopped.value) == (
        "statecache: --enable-multi-layer-eagle (draft heads copy a cached state by its slot among"
        " the running) is not supported with --statecache-checkpoints int8"
    )
    with plugin(policy="gds"):
        traffic = Traffic("rust")
        head = clone(traffic.requests, traffic.state_params)
    assert head.mamba_pool is not traffic.requests.mamba_pool
    assert head.mamba_ckpt_pool is None


def test_a_server_with_a_host_tier_and_int8_states_stops():
    asked = types.SimpleNamespace(enable_hierarchical_cache=True)
    with pytest.raises(SystemExit) as stopped:
        refuse(asked, Settings.from_given({"kv_cache_plugin": "statecache", "int8": True}, {}))
    assert str(stopped.value) == INT8_AND_HOST


def test_a_model_without_states_is_left_alone(caplog):
    params = dataclasses.replace(Traffic("python").params, tree_components=(FULL,))
    with plugin(policy="gds"):
        cache = unified_radix_cache.UnifiedRadixCache(params=params)
    assert type(cache.tree_core).__name__ == "UnifiedTreeCore"
    assert "caches no recurrent states; nothing was changed" in caplog.text
