"""Which active states a pool can keep, and that one of another layout moves nothing."""

from dataclasses import replace

import pytest
import torch

from statecache.checkpoint.formats import FORMATS
from statecache.checkpoint.ops import native_ops, plain_ops
from statecache.checkpoint.pool import (
    ActiveState,
    CheckpointPool,
    SideState,
    estimate_bytes,
)
from support.checkpoint_cases import is_close, make_state, same_bits
from support.pool_states import H, K, L, S, V, exact_rows, make_active, zeros_like


def test_empty_lists():
    active = make_active()
    pool = CheckpointPool(active, 1)
    assert pool.alloc(0) == []
    assert pool.store(active, [], []).refused() == ()
    pool.load([], active, [])
    pool.free([])
    assert pool.available == 1


def test_rows_stored_in_another_order_of_dimensions():
    temporal = make_state((L, S, H, V, K), torch.float32)
    conv = torch.randn(L, S, 3, 10).transpose(2, 3)
    active = ActiveState(temporal, [conv])
    pool = CheckpointPool(active, 1)
    slots = pool.alloc(1)
    pool.store(active, [2], slots)
    back = zeros_like(active)
    pool.load(slots, back, [1])
    assert torch.equal(back.conv[0][:, 1], conv[:, 2])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ActiveState([]), "needs a temporal tensor"),
        (lambda: ActiveState(torch.zeros(0, 2, 1, 8, 8)), "is empty"),
        (lambda: ActiveState(torch.zeros(1, 2, 0, 8, 8)), "is empty"),
        (lambda: ActiveState([torch.zeros(2, 1, 0, 8)]), "is empty"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 16)[..., :8]), "matrix has gaps"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8).transpose(3, 4)), "matrix has gaps"),
        (
            lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 2, 8, 8)[:, :1]]),
            "differ between layers",
        ),
        (
            lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8, device="meta")]),
            "differ between layers",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 2, 3, 4)[..., :2]]),
            "conv.0: a row with strides",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 3, 4)]),
            "conv.0: 3 slots, but the temporal state has 2",
        ),
        (
            lambda: ActiveState(
                torch.zeros(1, 2, 1, 8, 8), side={"x": SideState(torch.zeros(1, 4), 0)}
            ),
            "side.x: 1 slots, but the temporal state has 2",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 2, 4, device="meta")]),
            "conv.0 is on meta, not on cpu",
        ),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8, dtype=torch.float64)), "need 5 dimensions"),
        (lambda: ActiveState([torch.zeros(1, 2, 1, 8, 8)]), "need 4 dimensions"),
        (lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 16)]), "differ"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 12)), "multiples of 8"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(2)]), "conv.0: slots"),
    ],
)
def test_an_active_state_that_cannot_be_kept(make, reason):
    with pytest.raises(ValueError, match=reason):
        CheckpointPool(make(), 1)


def test_bad_modes_and_sizes():
    with pytest.raises(ValueError, match="unknown checkpoint format 'int4': use native or int8"):
        CheckpointPool(make_active(), 1, mode="int4")
    with pytest.raises(ValueError, match="at least 1 slot"):
        CheckpointPool(make_active(), 0)
    for slots in (-1, 0):
        with pytest.raises(ValueError, match="at least 1 slot"):
            estimate_bytes(make_active(), slots)
    for make in (CheckpointPool, estimate_bytes):
        with pytest.raises(TypeError, match="integer"):
            make(make_active(), 1.5)


def test_a_native_pool_needs_heads_without_gaps():
    active = ActiveState(torch.zeros(1, 2, 4, 8, 8)[:, :, ::2])
    CheckpointPool(active, 1)
    with pytest.raises(ValueError, match="a slot's heads has gaps"):
        CheckpointPool(active, 1, mode="native")


def with_gaps(active):
    """The same state, its matrices with gaps between rows."""
    wide = torch.zeros(L, S, H, V, 2 * K, dtype=active.temporal.dtype)
    wide[..., :K] = active.temporal
    return replace(active, temporal=wide[..., :K])


def with_other_slots(active):
    return replace(active, conv=[torch.cat([conv, conv], 1) for conv in active.conv])


def with_rows_transposed(active):
    conv = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in active.conv]
    return replace(active, conv=conv)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_gaps, "has gaps"),
        (with_other_slots, "12 slots, but the temporal state has 6"),
        (with_rows_transposed, "the pool was made for"),
    ],
)
@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("copies", [native_ops(), plain_ops()])
def test_a_layout_that_does_not_fit_is_refused_before_anything_moves(change, reason, mode, copies):
    active = make_active()
    pool = CheckpointPool(active, 2, mode=mode, copies=copies)
    slots = pool.alloc(2)
    pool.store(active, [0, 1], slots)
    other = change(make_active(seed=7))
    with pytest.raises(ValueError, match=reason):
        pool.store(other, [2, 3], slots)
    target = change(zeros_like(active))
    with pytest.raises(ValueError, match=reason):
        pool.load(slots, target, [2, 3])
    assert all((s.tensor == 0).all() for s in target.exact().values())
    back = zeros_like(active)
    pool.load(slots, back, [4, 5])
    for source, to in ((0, 4), (1, 5)):
        assert all(map(same_bits, exact_rows(back, to), exact_rows(active, source)))
        assert is_close(back.temporal[:, to], active.temporal[:, source])


@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_store_that_fails_halfway_leaves_its_slots_empty(by_tensor):
    active = make_active()

    def fail(*_):
        raise RuntimeError("the device is gone")

    plain = plain_ops()
    pool = CheckpointPool(active, 3, copies=replace(plain))
    slots = pool.alloc(3)
    pool.store(active, [0, 1, 2], slots)
    pool._launches.ops = replace(plain, store=fail)
    sources = torch.tensor([3, 4]) if by_tensor else [3, 4]
    with pytest.raises(RuntimeError, match="the device is gone"):
        pool.store(active, sources, slots[:2])
    pool._launches.ops = plain
    for slot in slots[:2]:
        with pytest.raises(ValueError, match="no state is stored in it"):
            pool.load([slot], active, [5])
    pool.load([slots[2]], active, [5])
    pool.free(slots)


def test_dimensions_of_size_one_do_not_matter_to_the_order_of_a_row():
    temporal = make_state((L, S, H, V, K), torch.float32)
    conv = torch.randn(L, S, 1, 7)
    active = ActiveState(temporal, [conv])
    pool = CheckpointPool(active, 1)
    slots = pool.alloc(1)
    pool.store(active, [2], slots)
    odd = torch.zeros(L, S, 7).as_strided((L, S, 1, 7), (S * 7, 7, 1, 1))
    pool.load(slots, ActiveState(temporal, [odd]), [1])
    assert torch.equal(odd[:, 1], conv[:, 2])
