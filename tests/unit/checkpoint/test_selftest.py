"""A pool proves its copies when it is made, and goes on by plain operators if a launch fails."""

from dataclasses import replace

import pytest
import torch

from statecache.checkpoint import ops as checkpoint_ops
from statecache.checkpoint import pool as checkpoint_pool
from statecache.checkpoint import selftest
from statecache.checkpoint.formats import FORMATS
from statecache.checkpoint.ops import native_ops, plain_ops
from statecache.checkpoint.pool import ActiveState, CheckpointPool
from statecache.checkpoint.selftest import CopiesDoNotWorkError, check_copies
from support.checkpoint_cases import DTYPES, is_close, same_bits
from support.launch_failures import LAUNCH_ERRORS, failing, launch_error
from support.pool_states import exact_rows, make_active, zeros_like

CPU = torch.device("cpu")


@pytest.mark.parametrize("ops", [native_ops(), plain_ops()])
@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("matrix", [(8, 8), (24, 40), (128, 128)])
def test_copies_that_work(ops, mode, dtype, matrix):
    check_copies(ops, CPU, mode, dtype, matrix)


def test_a_format_that_is_exact_may_have_odd_matrices():
    check_copies(native_ops(), CPU, "native", torch.float32, (3, 5))


@pytest.mark.parametrize("name", ["store", "load", "move"])
def test_a_copy_that_does_nothing_is_seen(name):
    idle = replace(native_ops(), **{name: lambda *_: None})
    with pytest.raises(RuntimeError, match="does not come back as it should"):
        check_copies(idle, CPU, "int8", torch.bfloat16, (8, 8))


def test_one_wrong_bit_is_seen():
    def load(quantized, scale, active, *slots):
        native_ops().load(quantized, scale, active, *slots)
        active[0].view(torch.int32)[0, 0, 0, 1, 1] ^= 1

    wrong = replace(native_ops(), load=load)
    with pytest.raises(RuntimeError, match="does not come back as it should"):
        check_copies(wrong, CPU, "int8", torch.float32, (8, 8))


@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
@pytest.mark.parametrize("names", [["store"], ["load"], ["move"], ["store", "load", "move"]])
def test_a_pool_whose_kernels_do_not_launch_uses_plain_torch(names, reason, caplog):
    active = make_active()
    pool = CheckpointPool(active, 2, copies=failing(launch_error(reason), *names))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == (
        "statecache: the native checkpoint copies do not work on cpu: launch failed:"
        f" {reason}; using plain torch operators, which are far slower"
    )
    assert pool.launch_failures == 0  # a copy was never tried with them
    slots = pool.alloc(1)
    assert pool.store(active, [3], slots).refused() == ()
    pool.load(slots, active, [0])
    assert is_close(active.temporal[:, 0], active.temporal[:, 3])


def test_the_line_names_what_the_build_lacks(monkeypatch, caplog):
    active = make_active()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 1))
    error = RuntimeError(launch_error(LAUNCH_ERRORS[0]))
    line = checkpoint_ops.describe_failure(torch.device("cuda:1"), error)
    assert line.startswith(
        "the native checkpoint copies do not work on cuda:1 (compute capability 12.1, kernels built"
        " for "
    )
    assert "\n" not in line
    assert CheckpointPool(active, 1).launch_failures == 0
    assert caplog.text.count("WARNING") == 0


def test_nothing_works_at_all(monkeypatch):
    """Plain torch operators fail as well: an error of its own, which engines stop with."""
    broken = failing("the device is gone\nand more", "move", ops=plain_ops())
    monkeypatch.setattr(selftest, "plain_ops", lambda: broken)
    with pytest.raises(CopiesDoNotWorkError) as error:
        CheckpointPool(make_active(), 1, copies=broken)
    assert str(error.value) == "nothing can be copied on cpu: the device is gone"


def test_want_of_memory_is_told_apart():
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        CheckpointPool(make_active(), 1, copies=replace(native_ops(), move=full))


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("apart", [False, True])
# The calls of one pool: a store and a load of its own, then two stores and two loads.
@pytest.mark.parametrize("after", range(4, 12))
def test_a_launch_that_fails_later_is_made_by_plain_torch(mode, apart, after, caplog):
    """Whichever launch it is: every state comes back, one line, one failure is counted."""
    reason = LAUNCH_ERRORS[after % 3]
    active = make_active(apart=apart)
    names = ["store", "load", "move"] if mode == "int8" else ["move"]
    ops = failing(launch_error(reason), *names, after=after if mode == "int8" else after // 2)
    pool = CheckpointPool(active, 2, mode=mode, copies=ops)
    slots = pool.alloc(2)
    back = zeros_like(active)
    for slot, source in zip(slots, (4, 1), strict=True):
        assert pool.store(active, [source], [slot]).refused() == ()
    for slot, source in zip(slots, (4, 1), strict=True):
        pool.load([slot], back, [source])
        assert all(map(same_bits, exact_rows(back, source), exact_rows(active, source)))
        for ours, theirs in zip(back.temporals(), active.temporals(), strict=True):
            assert is_close(ours[..., source, :, :, :], theirs[..., source, :, :, :])
    assert pool.launch_failures == 1
    lines = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(lines) == 1
    assert reason in lines[0]
    assert "\n" not in lines[0]


def test_a_state_stored_by_plain_torch_has_the_same_bytes():
    active = make_active()
    sums = []
    for after in (4, 100):
        pool = CheckpointPool(active, 1, copies=failing(launch_error("x"), "store", after=after))
        (slot,) = pool.alloc(1)
        for source in (0, 1, 2, 3, 4):
            pool.store(active, [source], [slot]).refused()
        sums.append(pool.checksums([slot]).item())
    assert sums[0] == sums[1]


def test_another_error_is_not_taken_for_a_launch():
    active = make_active()
    pool = CheckpointPool(active, 1, copies=failing("an illegal memory access", "load", after=1))
    slots = pool.alloc(1)
    pool.store(active, [0], slots).refused()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pool.load(slots, active, [1])
    assert pool.launch_failures == 0


def test_the_pool_of_a_device_asks_for_its_copies(monkeypatch):
    asked = []
    monkeypatch.setattr(
        checkpoint_pool, "ops_for", lambda device: asked.append(device) or native_ops()
    )
    CheckpointPool(ActiveState(torch.ones(1, 2, 1, 8, 8)), 1)
    assert asked == ["cpu"]
