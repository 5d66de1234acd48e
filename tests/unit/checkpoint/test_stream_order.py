"""CheckpointOps of one pool are ordered across streams, and its memory is what is free."""

from contextlib import nullcontext

import pytest
import torch

from statecache.checkpoint import memory
from statecache.checkpoint import pool as checkpoint_pool
from statecache.checkpoint.pool import (
    CheckpointPool,
)
from support.checkpoint_cases import same_bits
from support.pool_states import lifecycle_pool, make_active


class Device:
    """Stands in for the streams of a GPU, and keeps what was asked of it."""

    def __init__(self, monkeypatch, capturing=False):
        self.calls, self.stream = [], "a"
        for name, stand_in in (
            ("is_current_stream_capturing", lambda: capturing),
            ("current_stream", lambda _: Stream(self.stream, self.calls)),
            ("device", lambda _: nullcontext()),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def wait_event(self, event):
        self.calls.append((self.name, "waits for", event.on))

    def record_event(self):
        self.calls.append((self.name, "records"))
        return Event(self.name, self.calls)


class Event:
    def __init__(self, on, calls):
        self.on, self.calls = on, calls

    def query(self):
        return False

    def synchronize(self):
        self.calls.append(("host waits for", self.on))


def test_copies_are_ordered_across_streams(monkeypatch):
    active = make_active()
    pool = CheckpointPool(active, 2)
    slots = pool.alloc(2)
    device = Device(monkeypatch)
    pool._order = checkpoint_pool.StreamOrdering(torch.device("cuda"))
    report = pool.store(active, [0, 1], slots)
    device.stream = "b"
    assert report.refused() == ()
    pool.load(slots, active, [2, 3])
    pool.store(active, [0], slots[:1])
    device.stream = "a"
    pool.load(slots, active, [2, 3])
    assert device.calls == [
        ("a", "records"),
        ("host waits for", "a"),
        ("b", "waits for", "a"),
        ("b", "records"),
        ("b", "records"),
        ("a", "waits for", "b"),
        ("host waits for", "b"),
        ("a", "records"),
    ]


def test_a_pool_refuses_to_be_captured(monkeypatch):
    active, pool = lifecycle_pool()
    pool._order = checkpoint_pool.StreamOrdering(torch.device("cuda"))
    Device(monkeypatch, capturing=True)
    kept = active.temporal.clone()
    for call in (lambda: pool.store(active, [0], [1]), lambda: pool.load([0], active, [1])):
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            call()
    assert same_bits(active.temporal, kept)


def test_the_memory_limit_of_the_control_group_counts(tmp_path):
    for group, limit in (("", "max"), ("outer", "1000"), ("outer/inner", "5000")):
        folder = tmp_path / group
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    free = memory.free_in_groups
    assert free(tmp_path, "4:memory:/x\n0::/outer/inner\n") == [4400, 400]
    assert free(tmp_path, "0::/\n") == []
    assert free(tmp_path / "absent", "0::/outer\n") == []
