"""How many launches, uploads and other operators a copy takes, whatever the layers."""

import pytest
import torch

from statecache.checkpoint import launches
from statecache.checkpoint import pool as checkpoint_pool
from statecache.checkpoint.pool import ActiveState, CheckpointPool, SideState
from support.operators import Operators, count_uploads

LAYERS = [12, 23, 36]
SLOTS = 4


def in_pages(layers):
    """Layers apart, convolution and temporal state of a layer in one page, as vLLM has them."""
    pages = torch.zeros(layers, SLOTS, 1024)
    convolutions = [page[:, :60].view(SLOTS, 20, 3) for page in pages]
    temporals = [page[:, 64 : 64 + 128].view(SLOTS, 2, 8, 8) for page in pages]
    return ActiveState(temporals, convolutions)


def stacked(layers):
    """Layers in one tensor, states of two more kinds beside it, as SGLang has them."""
    side = {
        "short_conv": SideState(torch.zeros(layers, SLOTS, 5), 1),
        "ngram": SideState(torch.zeros(SLOTS, 3, dtype=torch.int64), 0),
    }
    convolution = torch.zeros(layers, SLOTS, 20, 3, dtype=torch.bfloat16)
    return ActiveState(torch.zeros(layers, SLOTS, 2, 8, 8), [convolution], side)


@pytest.fixture
def uploads(monkeypatch):
    return count_uploads(monkeypatch)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("make", [in_pages, stacked])
@pytest.mark.parametrize(
    ("mode", "ways"),
    [
        ("int8", (["move", "store"], ["move", "load"])),
        ("native", (["move"], ["move"])),
    ],
)
def test_a_copy_is_one_launch_a_kind_and_one_upload(mode, ways, make, layers, uploads):
    active = make(layers)
    pool = CheckpointPool(active, SLOTS, mode=mode)
    slots = pool.alloc(3)
    pool.store(active, [2, 1, 0], slots).refused()
    uploads.clear()
    for _ in range(2):
        with Operators() as operators:
            report = pool.store(active, [0, 1, 3], slots)
        assert operators.seen == ways[0]
        assert report.refused() == ()
        with Operators() as operators:
            pool.load(slots, active, [0, 1, 3])
        assert operators.seen == ways[1]
    # Both lists at once; the flags of a store that may be refused are cleared by the same upload.
    assert uploads == [(2, 3 if mode == "int8" else 0), (2, 0)] * 2


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("mode", ["int8", "native"])
def test_active_slots_on_the_device_are_not_uploaded(mode, layers, uploads):
    active = stacked(layers)
    pool = CheckpointPool(active, SLOTS, mode=mode)
    slots = pool.alloc(2)
    on_device = torch.tensor([1, 99])
    with Operators() as operators:
        report = pool.store(active, on_device, slots)
    kinds = ["move", "store"] if mode == "int8" else ["move"]
    assert operators.seen == kinds
    assert report.refused() == ()
    with Operators() as operators:
        pool.load(slots[:1], active, on_device[:1])
    assert len(operators.seen) == len(kinds)
    assert uploads == [(1, 2), (1, 0)]


@pytest.mark.parametrize("zeros", range(4))
def test_an_upload_by_hand(zeros):
    vectors, cleared = launches.upload([[3, -1], [5, 1 << 40]], zeros, torch.device("cpu"))
    assert [vector.tolist() for vector in vectors] == [[3, -1], [5, 1 << 40]]
    assert all(vector.dtype == torch.int64 for vector in vectors)
    assert cleared.dtype == torch.int32
    assert cleared.tolist() == [0] * zeros


def test_the_layout_of_an_active_state_is_worked_out_once(monkeypatch):
    first, second = stacked(2), stacked(2)
    pool = CheckpointPool(first, 1)
    pool.alloc(1)
    asked = []
    layout_of = checkpoint_pool.layout_of

    def counted(active, mode):
        asked.append(active)
        return layout_of(active, mode)

    monkeypatch.setattr(checkpoint_pool, "layout_of", counted)
    for active in (first, second, second, first):
        pool.store(active, [0], [0])
    assert list(map(id, asked)) == [id(second), id(first)]


def test_what_an_active_state_was_given_may_change_later():
    layers = [torch.ones(2, 1, 8, 8)]
    active = ActiveState(layers)
    layers.append(torch.ones(2, 1, 8, 8))
    assert len(active.temporals()) == 1


def test_an_exact_store_of_listed_slots_needs_no_report():
    active = in_pages(2)
    pool = CheckpointPool(active, 2, mode="native")
    slots = pool.alloc(2)
    report = pool.store(active, [1, -1], slots)
    assert report.is_ready()
    assert report.refused() == ()
    pool.load(slots[:1], active, [0])
    with pytest.raises(ValueError, match="no state is stored"):
        pool.load(slots[1:], active, [0])


class PendingEvent:
    """An event of a stream that has not come to it."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True


def test_a_report_is_ready_once_its_event_is_over():
    event = PendingEvent()
    report = checkpoint_pool.StoreReport(
        torch.tensor([3], dtype=torch.int32), event, lambda flags: tuple(flags)
    )
    assert not report.is_ready()
    event.over = True
    assert report.is_ready()
    event.over = False
    assert report.refused() == (3,)
    assert report.is_ready()
