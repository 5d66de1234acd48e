"""An active state of each kind for the tests of the checkpoint pool."""

from dataclasses import replace

import pytest
import torch

from statecache.checkpoint.pool import ActiveState, CheckpointPool, SideState
from support.checkpoint_cases import make_state

# Where the slots of a pool may lie.
PLACES = {
    "device": {},
    "host": {"memory": "host"},
    "host, a ring of one row": {"memory": "host", "ring": 1},
}
L, S, H, V, K = 3, 6, 2, 16, 24  # layers, slots, heads, d_v, d_k


def make_active(dtype=torch.bfloat16, *, apart=False, seed=0):
    temporal = make_state((L, S, H, V, K), dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    conv = torch.randn(L, S, 10, 3, generator=generator).to(torch.bfloat16)
    side = {
        "layered": SideState(torch.randint(0, 9, (2, S, 5), generator=generator), 1),
        "flat": SideState(torch.randint(0, 255, (S, 3), dtype=torch.uint8), 0),
    }
    if apart:
        return ActiveState(list(temporal.unbind()), list(conv.unbind()), side)
    return ActiveState(temporal, [conv], side)


def zeros_like(active):
    temporal = active.temporal
    if isinstance(temporal, torch.Tensor):
        temporal = torch.zeros_like(temporal)
    else:
        temporal = [torch.zeros_like(layer) for layer in temporal]
    conv = [torch.zeros_like(tensor) for tensor in active.conv]
    side = {n: replace(s, tensor=torch.zeros_like(s.tensor)) for n, s in active.side.items()}
    return ActiveState(temporal, conv, side)


def exact_rows(active, slot):
    return [s.tensor.select(s.slot_dim, slot) for s in active.exact().values()]


def lifecycle_pool():
    """Slot 0 stored, 1 allocated, 2 and 3 free."""
    active = make_active()
    pool = CheckpointPool(active, 4)
    pool.alloc(2)
    assert pool.store(active, [0], [0]).refused() == ()
    return active, pool


@pytest.fixture(params=PLACES)
def everywhere(request, monkeypatch):
    """Every pool that a test makes has its slots in one place, then in another."""
    for name, value in PLACES[request.param].items():
        monkeypatch.setitem(CheckpointPool.__init__.__kwdefaults__, name, value)
