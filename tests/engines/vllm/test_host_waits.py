"""On a real vLLM the plugin makes the host wait for the device nowhere but where a list says so."""

import pytest
from engine import cached, document, run
from test_restore import drop_state_blocks

from statecache.checkpoint import stream_order
from statecache_vllm import seams
from support.host_waits import Allowed, HostWaits, SlowDevice

# What is compared is known before an answer that was computed from it goes out.
COMPARED = Allowed(
    "Event.synchronize",
    "statecache.checkpoint.stream_order.HostCopy.read",
    "restores of the share that --statecache-verify compares; behind the restore, not the forward",
)


def hot_path(engine, allowed):
    """Prompts that store, restore and go on, some at once; the device is a step behind."""
    device, side = SlowDevice(1), seams.transfer_group().worker_side
    begin = side.begin_step

    def begin_step():
        device.begin_step()
        begin()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(stream_order, "event_behind", device.event_behind)
        monkeypatch.setattr(side, "begin_step", begin_step)
        with HostWaits(allowed) as waits:
            prompts = [document(number, 276) for number in range(3)]
            assert cached(engine.ask(prompts)) == [0, 0, 0]
            drop_state_blocks(engine)
            assert cached(engine.ask(prompts)) == [256] * 3
            engine.ask_together([[*prompt, *document(9, 70)] for prompt in prompts], tokens=40)
    return waits


@pytest.mark.parametrize(
    ("mode", "verify", "allowed"),
    [("int8", 0, []), ("int8", 1, [COMPARED])],
)
def test_the_host_waits_for_nothing(model, mode, verify, allowed):
    plugin = {"checkpoints": mode, "checkpoint_slots": 16, "checkpoint_interval": 64}
    with run(model, plugin={**plugin, "verify": verify}) as engine:
        waits = hot_path(engine, allowed)
        waits.check()
        counts = engine.scheduler_side.checkpoints.counts
        assert counts.stored >= 9
        assert counts.restored == 3
        assert engine.scheduler_side.faults.anomalies == 0
        numbers = engine.scheduler_side.proofs.events.numbers
        assert numbers.get("verified_restores", 0) == (3 if verify else 0)
