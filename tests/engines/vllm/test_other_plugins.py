"""Another plugin around the same methods of vLLM, put there before or after this one.

Theirs is called in every case and nothing else changes; where the adapter takes the place of a
class or a method as a whole, start-up stops with one line, or vLLM's own comes back. One method
is left out: under a dry run `KVCacheManager.remove_skipped_blocks` does nothing, as without a
connector nothing calls it.
"""

import functools
import importlib
import inspect

import pytest
from engine import document
from scheduled import Run, traffic
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

from statecache_vllm import adapter, prefill_chunks
from statecache_vllm.seam_table import REPLACED, SEAMS

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
PLUGINS = {"reuse": {}, "reuse and pool": POOL}
AROUND = [
    *((BlockPool, name) for name in ("touch", "reset_prefix_cache", "evict_blocks")),
    *((BlockPool, name) for name in ("get_new_blocks", "free_blocks", "cache_full_blocks")),
    *((KVCacheManager, name) for name in ("get_computed_blocks", "allocate_slots", "free")),
]
TAKEN = [seam for seam in SEAMS if seam.replaced]


def put_theirs(monkeypatch, owner, name) -> list:
    """Wrap a method as another plugin would; returns what grows with every call."""
    seen, inner = [], getattr(owner, name)

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        seen.append(name)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, theirs)
    return seen


def played(run: Run) -> tuple:
    """What came of 200 steps, a block evicted by name, and a reset."""
    steps = []
    for _ in traffic(run, 4, 200):
        run.check()
        steps.append(run.pool.get_num_free_blocks())
    left = [block.block_id for block in run.pool.free_block_queue.get_all_free_blocks()]
    cached = next(block for block in run.pool.blocks if block.block_hash)
    run.scheduler.kv_cache_manager.evict_blocks({cached.block_id})
    run.check()
    assert run.scheduler.kv_cache_manager.reset_prefix_cache()
    run.check()
    assert run.pool.get_num_free_blocks() == len(run.pool.blocks) - 1
    return run.shadow.resumed, steps, left


@pytest.fixture(scope="module", params=PLUGINS)
def alone(request, model):
    plugin = PLUGINS[request.param]
    return plugin, played(Run(model, blocks=70, plugin=plugin))


@pytest.mark.parametrize(("owner", "name"), AROUND)
def test_what_is_put_around_a_method_later_is_called_and_changes_nothing(
    monkeypatch, model, alone, owner, name
):
    plugin, expected = alone
    run = Run(model, blocks=70, plugin=plugin)
    seen = put_theirs(monkeypatch, owner, name)
    assert played(run) == expected
    assert seen
    assert run.scheduler_side.faults.anomalies == 0


@pytest.mark.parametrize(("owner", "name"), AROUND[1:])
def test_what_was_put_around_a_method_before_is_called_and_changes_nothing(
    monkeypatch, model, alone, owner, name
):
    plugin, expected = alone
    seen = put_theirs(monkeypatch, owner, name)
    run = Run(model, blocks=70, plugin=plugin)
    assert played(run) == expected
    assert seen


def test_the_lookup_of_every_group_is_called_by_ours_too(monkeypatch, model):
    seen = put_theirs(monkeypatch, HybridKVCacheCoordinator, "find_longest_cache_hit_per_group")
    run = Run(model, blocks=70, plugin=POOL)
    played(run)
    assert run.scheduler_side.checkpoints.counts.restored
    assert seen


@pytest.mark.parametrize("seam", TAKEN, ids=lambda seam: seam.path)
def test_what_the_adapter_takes_the_place_of_must_be_vllms_own(monkeypatch, model, seam):
    """Counting alone uses no name that vLLM's own does not: only the place tells."""
    owner = getattr(importlib.import_module(seam.module), seam.path.partition(".")[0])
    inner, calls = getattr(owner, seam.path.partition(".")[2]), 0

    @functools.wraps(inner)
    def theirs(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(owner, inner.__name__, theirs)
    adapter.register()
    engine_args = EngineArgs(
        model=str(model), block_size=32, additional_config={"kv_cache_plugin": "statecache"}
    )
    with pytest.raises(SystemExit) as stopped:
        engine_args.create_engine_config()
    line = str(stopped.value)
    assert f"{seam.module}.{seam.path}: moved (another plugin changed it: " in line
    assert f"{__name__}.test_what_the_adapter" in line
    assert "\n" not in line


@pytest.mark.parametrize("seam", [seam for seam in REPLACED if seam.replaced], ids=lambda s: s.path)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_is_put_into_a_class_that_was_replaced_brings_vllms_own_back(
    monkeypatch, caplog, model, plugin, seam
):
    run = Run(model, blocks=70, plugin=PLUGINS[plugin])
    for _ in traffic(run, 3, 20):
        pass
    owner = {cls.__name__: cls for cls in (BlockHashToBlockMap, FreeKVCacheBlockQueue)}
    path, _, name = seam.path.partition(".")
    seen = put_theirs(monkeypatch, owner[path], name)
    played(run)
    assert isinstance(run.pool.free_block_queue, FreeKVCacheBlockQueue)
    assert isinstance(run.pool.cached_block_hash_to_block, BlockHashToBlockMap)
    assert run.scheduler_side.faults.anomalies == 1
    lines = {record.message for record in caplog.records if record.levelname == "ERROR"}
    assert lines == {
        f"statecache: another plugin changed {seam.path}; vLLM goes on by itself in its place"
    }
    if name in ("popleft_n", "append_n", "get_one_block", "insert", "pop"):
        assert seen


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_plugin_around_the_split_of_prompts_is_called_too(
    monkeypatch, request, model, order
):
    """Chunks end every 64 tokens by ours; the other one sees each of them."""
    name = "_mamba_block_aligned_split"
    prefill_chunks._END_PREFILL_CHUNK.remove()  # an engine before this one may have put it there
    request.addfinalizer(prefill_chunks._END_PREFILL_CHUNK.remove)
    own = inspect.unwrap(getattr(Scheduler, name))
    monkeypatch.setattr(Scheduler, name, own)
    if order == "before":
        seen = put_theirs(monkeypatch, Scheduler, name)
    run = Run(model, blocks=100, plugin={"checkpoint_interval": 64})
    if order == "after":
        seen = put_theirs(monkeypatch, Scheduler, name)
    run.ask(document(1, 300))
    assert run.chunk_ends["r1"][:4] == [64, 128, 192, 256]
    assert len(seen) >= 5
