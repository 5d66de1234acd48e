"""What is asked of CUDA for slots in host memory: in which order, and that the host never waits."""

import gc
import types
from contextlib import contextmanager

import pytest
import torch

from statecache.checkpoint import slot_memory
from statecache.checkpoint.copy_streams import streams_on

CUDA = torch.device("cuda", 1)


class Target:
    """A tensor that is copied to."""

    def __init__(self, calls):
        self.calls = calls

    def copy_(self, source, *, non_blocking=False):
        self.calls.append(("copy", source, non_blocking))


@pytest.fixture
def calls(monkeypatch):
    """Each call, and on which stream."""
    found, names = [], iter(("out", "in"))

    class Stream:
        def __init__(self, name=None):
            self.name = name if isinstance(name, str) else next(names)

        def wait_event(self, event):
            found.append((self.name, "waits for", event))

        def record_event(self):
            found.append((self.name, "records"))
            return f"{self.name} {len(found)}"

    @contextmanager
    def on(stream):
        found.append(("on", stream.name))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_a_copy_waits_before_it_runs_and_says_when_it_is_done(calls):
    streams = streams_on(CUDA)
    written = streams.mark()
    moment = streams.copy_out([(Target(calls), "row"), (Target(calls), "other")], [written])
    back = streams.copy_in([(Target(calls), "slot")], [moment])
    streams.hold([back])
    assert calls == [
        ("current", "records"),
        ("out", "waits for", "current 1"),
        ("on", "out"),
        ("copy", "row", True),
        ("copy", "other", True),
        ("out", "records"),
        ("in", "waits for", "out 6"),
        ("on", "in"),
        ("copy", "slot", True),
        ("in", "records"),
        ("current", "waits for", "in 10"),
    ]


def test_host_memory_is_pinned_to_the_byte_and_let_go(monkeypatch):
    made = []
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: made.append((address, size, flags)) or 0,
        cudaHostUnregister=lambda address: made.append(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: made.append(("checked", status)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append(device))
    host = slot_memory._pinned(3, 1008, CUDA)
    assert host.shape == (3, 1008)
    address = host.data_ptr()
    assert made == [(address, 3 * 1008, 0), ("checked", 0)]
    del host
    gc.collect()
    assert made[2:] == [CUDA, address]
