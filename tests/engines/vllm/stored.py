"""A worker's store of checkpoints over tensors of its own, and the copies it is told to make."""

import types

import torch
from scheduled import GROUPS, _groups

from statecache.checkpoint.proof import Prefix
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.checkpoints import CheckpointCopy

BLOCKS = 8


def given(**more):
    return {"kv_cache_plugin": "statecache", "checkpoints": "native", **more}


def copy(state, slot, blocks, **prefix):
    """A copy of a state whose prefix is its number, 64 tokens long, unless another is given."""
    return CheckpointCopy(state, slot, blocks, Prefix(**{"key": state, "depth": 64, **prefix}))


def told(store):
    """Return what a store of checkpoints tells in the step after: states, and those refused."""
    store.begin_step()
    report = store.report()
    return None if report is None else (report.states, report.refused)


def store_over(monkeypatch, *, shared, **more):
    """A store of four states, and the tensors of each group, all of them the same if `shared`."""

    def layer():
        return [torch.randn(BLOCKS, 3, 512).bfloat16(), torch.randn(BLOCKS, 4, 64, 64)]

    same = layer()
    tensors = {f"state.{group}": same if shared else layer() for group in range(GROUPS)}
    monkeypatch.setattr(seams, "state_tensors", lambda _, names: [tensors[n] for n in names])
    settings = Settings.from_given(given(**more), {})
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks_override=None))
    kv = types.SimpleNamespace(kv_cache_groups=_groups(16), num_blocks=BLOCKS)
    return worker.CheckpointStore(settings, config, kv), list(tensors.values())
