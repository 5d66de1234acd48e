"""The native copies refuse arguments that do not fit, before anything is copied."""

import pytest
import torch

from statecache.checkpoint.ops import native_ops
from support.checkpoint_cases import move, pool_tensors, store, vector


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"targets": [torch.zeros(3, 4)]}, "as many sources as targets"),
        ({"slot_dims": [0]}, "as many sources as targets"),
        ({"targets": [torch.zeros(3, 4), torch.zeros(4, 4)]}, "differ in slots"),
        ({"sources": [torch.ones(3, 4), torch.ones(2, 4)]}, "differ in slots"),
        ({"targets": [torch.zeros(3, 4), torch.zeros(3, 5)]}, "rows differ in shape"),
        ({"report": torch.zeros(1, dtype=torch.int32)}, "one entry a listed slot"),
    ],
)
def test_rows_that_do_not_go_together_are_refused_before_any_moves(change, reason):
    good = {
        "sources": [torch.ones(3, 4), torch.ones(3, 4)],
        "targets": [torch.zeros(3, 4), torch.zeros(3, 4)],
        "source_slots": vector([0, 1]),
        "target_slots": vector([1, 2]),
        "slot_dims": [0, 0],
        "report": torch.zeros(2, dtype=torch.int32),
    }
    arguments = good | change
    with pytest.raises(RuntimeError, match=reason):
        native_ops().move(*arguments.values())
    assert all(target.abs().sum() == 0 for target in arguments["targets"])


def test_arguments_that_do_not_fit_are_refused():
    active = torch.ones(1, 2, 1, 8, 8)
    quantized, scale = pool_tensors(1, 2, 1, 8, 8, torch.float32)
    copies = native_ops()
    for bad_active, bad_quantized, bad_scale, reason in [
        (active.double(), quantized, scale, "float32, float16 or bfloat16"),
        (active.bfloat16(), quantized, scale, "scales do not fit"),
        (active, quantized[:, :, :, :, :4], scale, "do not fit the active"),
        (active.transpose(3, 4), quantized, scale, "without gaps"),
        (torch.ones(1, 2, 1, 8, 12), quantized, scale, "multiples of 8"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            store(copies, [bad_active], (bad_quantized, bad_scale), [0], [0])
    with pytest.raises(RuntimeError, match="no state tensor"):
        copies.load(quantized, scale, [], torch.tensor([0]), torch.tensor([0]))


def argument_sets():
    """Return good arguments of the copies by name, and the report that a store makes of them."""
    quantized, scale = pool_tensors(2, 3, 1, 8, 8, torch.float32)
    return {
        "active": [torch.ones(2, 3, 1, 8, 8)],
        "quantized": quantized,
        "scale": scale,
        "report": torch.zeros(2, dtype=torch.int32),
        "active_slots": vector([0, 1]),
        "slots": vector([1, 2]),
    }


BAD_STORES = [
    ({"report": torch.zeros(1, dtype=torch.int32)}, "one entry a listed slot"),
    ({"report": torch.zeros(3, dtype=torch.int32)}, "one entry a listed slot"),
    ({"report": torch.zeros(2, dtype=torch.int64)}, "one entry a listed slot"),
    ({"report": torch.zeros(4, dtype=torch.int32)[::2]}, "one entry a listed slot"),
    ({"slots": vector([1])}, "two int64 vectors of one length"),
    ({"slots": vector([1, 2, 0])}, "two int64 vectors of one length"),
    ({"slots": vector([1, 2]).int()}, "two int64 vectors of one length"),
    ({"slots": vector([1, 0, 2, 0])[::2]}, "two int64 vectors of one length"),
    ({"active_slots": vector([1])}, "two int64 vectors of one length"),
    ({"quantized": torch.zeros(1, 3, 1, 8, 8, dtype=torch.int8)}, "do not fit the active"),
    ({"quantized": torch.zeros(3, 3, 1, 8, 8, dtype=torch.int8)}, "do not fit the active"),
    ({"quantized": torch.zeros(2, 3, 2, 8, 8, dtype=torch.int8)}, "do not fit the active"),
    ({"quantized": torch.zeros(2, 3, 1, 8, 16, dtype=torch.int8)[..., ::2]}, "do not fit the act"),
    ({"scale": torch.zeros(1, 3, 1, 1, 8)}, "scales do not fit"),
    ({"scale": torch.zeros(2, 2, 1, 1, 8)}, "scales do not fit"),
    ({"scale": torch.zeros(2, 3, 1, 1, 16)[..., ::2]}, "scales do not fit"),
    ({"active": [torch.ones(2, 3, 1, 8, 16)[..., :8]]}, "without gaps"),
    ({"active": [torch.ones(3, 1, 8, 8), torch.ones(2, 1, 8, 8)]}, "layers differ"),
    ({"active": [torch.ones(3, 1, 8, 8), torch.ones(3, 2, 8, 8)[:, :1]]}, "layers differ"),
    (
        {
            "active": [torch.ones(2, 3, 1, 8, 8).expand(2, 3, 1 << 31, 8, 8)],
            "quantized": torch.zeros(2, 3, 1, 8, 8, dtype=torch.int8).expand(2, 3, 1 << 31, 8, 8),
            "scale": torch.zeros(2, 3, 1, 1, 8).expand(2, 3, 1 << 31, 1, 8),
        },
        "too many heads",
    ),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_STORES)
def test_a_store_that_would_leave_its_tensors_is_refused(bad, reason):
    good = argument_sets()
    arguments = good | bad
    with pytest.raises(RuntimeError, match=reason):
        native_ops().store(*arguments.values())
    assert good["quantized"].abs().sum() == 0
    if "report" in bad:
        return
    with pytest.raises(RuntimeError, match=reason):
        native_ops().load(
            arguments["quantized"],
            arguments["scale"],
            arguments["active"],
            arguments["slots"],
            arguments["active_slots"],
        )
    assert (good["active"][0] == 1).all()


BAD_MOVES = [
    (torch.zeros(1, 3, 4), vector([1, 2]), 1, "differ in layers"),
    (torch.zeros(3, 3, 4), vector([1, 2]), 1, "differ in layers"),
    (torch.zeros(2, 3, 2), vector([1, 2]), 1, "rows differ in shape"),
    (torch.zeros(2, 3, 8), vector([1, 2]), 1, "rows differ in shape"),
    (torch.zeros(2, 3, 8)[..., ::2], vector([1, 2]), 1, "without gaps"),
    (torch.zeros(2, 3, 4, 1), vector([1, 2]), 1, "differ in shape"),
    (torch.zeros(2, 3, 4).double(), vector([1, 2]), 1, "differ in shape, type"),
    (torch.zeros(2, 3, 4), vector([1]), 1, "of one length"),
    (torch.zeros(2, 3, 4), vector([1, 2]).int(), 1, "two int64 vectors"),
    (torch.zeros(2, 3, 4), vector([1, 2]), 2, "dimension 0 or 1"),
]


@pytest.mark.parametrize(("target", "target_slots", "slot_dim", "reason"), BAD_MOVES)
def test_a_move_that_would_leave_its_tensors_is_refused(target, target_slots, slot_dim, reason):
    source = torch.ones(2, 3, 4)
    with pytest.raises(RuntimeError, match=reason):
        native_ops().move([source], [target], vector([0, 1]), target_slots, [slot_dim], None)
    assert target.abs().sum() == 0


def test_a_move_from_rows_with_gaps_is_refused():
    source, target = torch.ones(2, 3, 8)[..., ::2], torch.zeros(2, 3, 4)
    with pytest.raises(RuntimeError, match="without gaps"):
        move(native_ops(), source, target, [0], [0], 1)


@pytest.mark.parametrize("name", ["active", "quantized", "scale", "report", "slots"])
def test_a_meta_tensor_among_others_is_refused(name):
    arguments = argument_sets()
    value = arguments[name]
    arguments[name] = [value[0].to("meta")] if isinstance(value, list) else value.to("meta")
    with pytest.raises(RuntimeError, match="lie on cpu, meta"):
        native_ops().store(*arguments.values())
