"""The recorder of host waits: each kind of call is seen where the plugin makes it."""

import types

import pytest
import torch

from support.host_waits import Allowed, HostWaits, StandInEvent, Wait


def called(line, module="statecache_vllm.worker_side", **names):
    """Run a line of Python as the body of a function `made` of that module."""
    code = types.ModuleType(module)
    vars(code).update(torch=torch, **names)
    exec(f"def made():\n    {line}", vars(code))
    code.made()


DEVICE = torch.device("cpu")
HERE = "statecache_vllm.worker_side.made"
WAITING = {
    "t.tolist()": "tolist",
    "t.sum().item()": "item",
    "t.numpy()": "numpy",
    "t.cpu()": "cpu",
    "bool(t[0])": "__bool__",
    "int(t[0])": "__int__",
    "float(t[0])": "__float__",
    "'abcd'[t[0]]": "__index__",
    "1 if t[0] else 2": "__bool__",
    "2 in t": "__contains__",
    "f'{t}'": "__format__",
    "torch.equal(t, t)": "equal",
    "t.nonzero()": "nonzero",
    "torch.nonzero(t)": "nonzero",
    "torch.where(t > 1)": "where",
    "torch.masked_select(t, t > 1)": "masked_select",
    "torch.repeat_interleave(t, t)": "repeat_interleave",
    "t[t > 1]": "__getitem__",
    "t[[0, 1]]": "__getitem__",
    "t[torch.tensor([0, 1])]": "__getitem__",
    "t[t > 1] = 0": "__setitem__",
    "t.to('cpu')": "to",
    "torch.tensor([1, 2]).to(device)": "to",
    "torch.tensor([1, 2], device=device)": "tensor",
    "torch.as_tensor([1, 2], device=device)": "as_tensor",
    "t.copy_(torch.tensor([1, 2, 3]))": "copy_",
    "torch.empty(3, dtype=torch.int64, pin_memory=False).copy_(t)": "copy_",
    "torch.cpu.synchronize()": "cpu.synchronize",
    "event.synchronize()": "Event.synchronize",
}
NOT_WAITING = [
    "t + 1",
    "t[0]",
    "t[1:]",
    "t.to(torch.float32)",
    "t.to(device, torch.int32)",
    "t.to('cpu', non_blocking=True)",
    "torch.tensor([1, 2], pin_memory=False).to(device, non_blocking=True)",
    "torch.tensor([1, 2, 3]).tolist()",
    "t.copy_(torch.tensor([1, 2, 3]), non_blocking=True)",
    "t.to('cpu', non_blocking=True).tolist()",
    "torch.split(torch.tensor([1, 2, 3]), 2)[0].tolist()",
    "(torch.tensor([1]) + torch.ones(1)).item()",
    "torch.zeros(3, device=device)",
    "torch.repeat_interleave(t, 2, output_size=6)",
    "event.query()",
    "named.tolist()",
]


def run(line, waits):
    named = torch.tensor([4])
    waits._is_host = lambda tensor: tensor is named
    with waits:
        called(line, t=torch.tensor([1, 2, 3]), device=DEVICE, event=StandInEvent(), named=named)


@pytest.mark.parametrize("line", WAITING)
def test_a_call_that_waits_is_recorded_with_its_place(line):
    waits = HostWaits()
    run(line, waits)
    assert waits.waits == [Wait(WAITING[line], HERE)]
    with pytest.raises(AssertionError):
        waits.check()
    allowed = HostWaits([Allowed(WAITING[line], HERE, "once at the start")])
    run(line, allowed)
    allowed.check()


@pytest.mark.parametrize("line", NOT_WAITING)
def test_what_does_not_wait_is_not_recorded(line):
    waits = HostWaits()
    run(line, waits)
    assert waits.waits == []
    waits.check()


@pytest.mark.parametrize("name", ["Event", "Stream"])
def test_a_wait_for_an_event_or_a_stream_of_cuda_is_recorded(monkeypatch, name):
    owner = getattr(torch.cuda, name)
    monkeypatch.setattr(owner, "synchronize", lambda _: None)
    stand_in = owner.synchronize
    with HostWaits() as waits:
        called("synchronize(None)", synchronize=owner.synchronize)
    assert waits.waits == [Wait(f"{name}.synchronize", HERE)]
    assert owner.synchronize is stand_in


def test_an_engine_that_waits_by_itself_is_not_the_plugin():
    """Nor where the plugin called it."""
    engine = types.ModuleType("vllm.v1.worker")
    exec("def step(t):\n    return t.tolist()", vars(engine))
    with HostWaits() as waits:
        called("step(t)", step=engine.step, t=torch.tensor([1]))
        called("t.tolist()", module="statecachelike", t=torch.tensor([1]))
        called("t.tolist()", module="statecache.checkpoint.pool", t=torch.tensor([1]))
    assert waits.waits == [Wait("tolist", "statecache.checkpoint.pool.made")]


def test_nothing_is_recorded_outside():
    event = StandInEvent()
    called("event.synchronize(); t.tolist()", event=event, t=torch.tensor([1]))
    assert event.query()
    with HostWaits() as waits:
        pass
    called("event.synchronize(); t.tolist()", event=event, t=torch.tensor([1]))
    assert waits.waits == []


def test_an_allowed_place_needs_a_reason_and_must_be_used():
    with pytest.raises(AssertionError, match="without a reason"):
        HostWaits([Allowed("item", HERE, " ")])
    waits = HostWaits([Allowed("item", HERE, "once at the start")])
    with waits:
        called("torch.ones(1).tolist()")
    with pytest.raises(AssertionError, match="nothing waits there"):
        waits.check()
