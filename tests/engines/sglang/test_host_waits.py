"""The plugin never has the host wait for the device, and no wrong state is reused for that."""

import contextlib
import itertools
import logging
import random

import pytest
from cache_layer import CORES, plugin
from late_device import LateDevice
from speculative_chats import Chats
from speculative_loop import SpeculativeLoop
from speculative_parts import build, speculating

from statecache_sglang import reporting
from statecache_sglang.steps import read_all_reports
from support.host_waits import Allowed, HostWaits

STATES = 24
PROMPT = list(range(10, 138))
BUFFERS = ("no_buffer", "extra_buffer")
# A share of states is looked at closely, which compares values of the device at once.
CLOSER_LOOK = (
    Allowed(
        "Event.synchronize",
        "statecache.checkpoint.report.StoreReport.refused",
        "whether there is a state to look at, of the share of stores --statecache-verify looks at",
    ),
    Allowed(
        "tolist",
        "statecache_sglang.checkpoints.CheckpointSlots.record.<locals>.errors",
        "the errors of int8, of the share of stores --statecache-verify looks at",
    ),
    Allowed(
        "equal",
        "statecache_sglang.checkpoints.CheckpointSlots.compare_bytes",
        "bytes as stored and now, of the share of restores --statecache-verify looks at",
    ),
)


def serve(core, buffer, *, steps, rate=0.0, plant=lambda: False, allowed=()):
    """Random chats over a device that is late; returns their loop, the device and the waits."""
    settings = {"checkpoints": "int8", "checkpoint_slots": STATES, "verify": rate}
    with plugin(policy="gds", **settings), contextlib.ExitStack() as more:
        traffic = build(core, buffer)
        more.enter_context(speculating(buffer))
        chats = Chats(traffic, seed=3, drafter=False)
        device = LateDevice(chats.run, plant)
        with HostWaits(allowed) as waits:
            for _, _ in zip(range(steps), chats.steps(), strict=False):
                pass
            chats.run.run(chats.run.steps + 10_000)
        read_all_reports(traffic.cache)
        chats.drain()
    assert chats.asked > 20
    assert chats.run.compared > 20
    return chats.run, device, waits


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("core", CORES)
def test_nothing_waits_while_requests_are_served(core, buffer):
    """Admissions, hits, restores, stores, evictions, aborts and retractions."""
    run, device, waits = serve(core, buffer, steps=400)
    waits.check()
    assert device.pool.waits == 0
    found = reporting.sample(run.traffic.cache)
    assert found["evictions|policy"] > 20
    assert min(device.pool.stored, device.pool.restored, run.retracted) > 5


def test_a_closer_look_waits_where_it_compares_and_nowhere_else():
    _, _, waits = serve("rust", "extra_buffer", steps=150, rate=1.0, allowed=CLOSER_LOOK)
    waits.check()


class Late:
    """One scheduler over a late device; `ask` begins and `end` finishes a request of one chunk."""

    def __init__(self, core, buffer="extra_buffer", plant=lambda: False, loop=SpeculativeLoop):
        self.traffic = build(core, buffer)
        self.run = loop(self.traffic, None, drafter=False)
        self.run._draw = lambda: 6
        self.device = LateDevice(self.run, plant)
        self.pool = self.device.pool

    def serve(self, tokens):
        """Answer a prompt with one token; its state is stored by the last result, and unread."""
        req = self.run.ask(tokens, 1)
        self.run.run()
        return req

    def ask_while_stored(self):
        """Serve PROMPT, and ask for it again in the step after the store, in which it waits."""
        self.serve(PROMPT)
        again = self.run.ask([*PROMPT, 7], 1)
        assert self.run.step() == []
        return again

    def hit(self, req):
        return self.run.hits.get(req.rid)

    def counted(self, name):
        return reporting.sample(self.traffic.cache).get(name, 0)

    def check(self):
        assert self.run.wrong == 0
        assert self.counted("anomalies") == 0
        self.traffic.check()


@contextlib.contextmanager
def late(core, buffer="extra_buffer", plant=lambda: False, loop=SpeculativeLoop, **more_settings):
    settings = {"checkpoints": "int8", "checkpoint_slots": STATES, **more_settings}
    with plugin(policy="gds", **settings), contextlib.ExitStack() as more:
        made = Late(core, buffer, plant, loop)
        more.enter_context(speculating(buffer))
        yield made
        made.check()


@pytest.mark.parametrize("core", CORES)
def test_a_request_that_meets_its_state_while_it_is_stored_waits_for_one_step(core):
    """128 tokens, a state at each 64. Asked in the step after the store, it is passed over once."""
    with late(core) as made:
        again = made.ask_while_stored()
        assert again.statecache_unread
        assert not again.kv.holds_mamba
        assert made.run.step() == [again]
        assert made.hit(again) == 128
        made.run.run()
        assert made.pool.waits == 0


class ReservingLoop(SpeculativeLoop):
    """From its second chunk on a long prompt leaves most of a step's budget for shorter ones.

    As SGLang's policy `shortest-prefill-first` does (`PrefillAdder.chunked_req_limit`).
    """

    def _adder(self):
        self.chunk = 128 if self.chunked is None else 1_100
        made = super()._adder()
        made.chunked_req_limit = 64
        return made


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("served", "refused", "hit"), [(64, None, 192), (64, 1, 64), (0, 0, 0)], ids=str
)
def test_a_request_waits_for_one_report_however_many_states_come(core, served, refused, hit):
    """A prompt of 1,024 tokens is computed in chunks, 128 and then 64 a step; another one joins it.

    After the first `served` tokens there is a state. The next one is stored in the second step, at
    192 tokens or 128, and the other request is passed over; store number `refused` keeps nothing.
    In the third step it is read, and a deeper state is stored: from then on to the last chunk the
    deepest one is always unread. The request takes the deepest that is there.
    """
    tokens, stores = [10 + at % 97 for at in range(1_024)], itertools.count()
    planted = {"plant": lambda: next(stores) == refused, "loop": ReservingLoop}
    with late(core, **planted, wait_for_head="off") as made:
        if served:
            made.serve(tokens[:served])
            read_all_reports(made.traffic.cache)
        long = made.run.ask(tokens, 1)
        assert made.run.step() == [long]
        again = made.run.ask([*tokens, 7], 1)
        assert made.run.step() == [long]
        assert again.statecache_unread
        assert made.run.step() == [long, again]
        assert made.hit(again) == hit
        made.run.run()
        assert made.pool.waits == 0


@pytest.mark.parametrize("core", CORES)
def test_after_an_idle_moment_it_is_a_hit_at_once(core):
    with late(core) as made:
        made.serve(PROMPT)
        read_all_reports(made.traffic.cache)  # as the scheduler does whenever it is idle
        again = made.run.ask([*PROMPT, 7], 1)
        assert made.run.step() == [again]
        assert made.hit(again) == 128
        made.run.run()


@pytest.mark.parametrize("core", CORES)
def test_without_the_extra_buffer_no_request_waits(core):
    """Nothing runs beside the scheduler there, so the store is over, or soon."""
    with late(core, "no_buffer") as made:
        made.serve(PROMPT)
        again = made.run.ask([*PROMPT, 7], 1)
        assert made.run.step() == [again]
        assert made.hit(again) == 128
        made.run.run()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("read", ["in a step", "when idle"])
def test_a_state_that_turns_out_not_to_be_finite_is_dropped_and_its_prompt_computed(core, read):
    with late(core, plant=lambda: made.device.planted == 0) as made:
        made.serve(PROMPT)
        assert len(made.traffic.state_slots()) == 1
        again = made.run.ask([*PROMPT, 7], 1)
        if read == "when idle":
            read_all_reports(made.traffic.cache)
        else:
            assert made.run.step() == []
        assert made.run.step() == [again]
        assert made.hit(again) == 0
        assert made.counted("skips|not_finite") == 1
        assert made.traffic.state_slots() == []
        assert made.pool.available_size() == STATES
        made.run.run()
        read_all_reports(made.traffic.cache)
        assert made.run.step() == []
        made.serve([*PROMPT, 8])
        assert made.counted("skips|not_finite") == 1
        assert made.pool.refused == 1


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("read", ["in a step", "when idle"])
def test_a_node_that_the_index_alone_has_stops_no_scheduler(core, read, monkeypatch, caplog):
    """As a refused state is dropped it is looked at: SGLang's own order takes over."""
    caplog.set_level(logging.CRITICAL, "statecache.sglang")
    monkeypatch.setattr(Late, "check", lambda made: made.traffic.sane())
    with late(core, plant=lambda: made.device.planted == 0) as made:
        made.serve(PROMPT)
        side, unknown = made.traffic.core.scheduler_side, 1_000_000
        side.registry.put(unknown, 64, [], is_leaf=True)
        again = made.run.ask([*PROMPT, 7], 1)
        if read == "when idle":
            read_all_reports(made.traffic.cache)
        else:
            assert made.run.step() == []
        assert made.run.step() == [again]
        assert made.hit(again) == 0
        assert (side.faults.active, side.faults.anomalies) == (False, 1)
        assert made.counted("skips|not_finite") == 1
        made.run.run()
        assert made.run.wrong == 0
        assert len(made.traffic.state_slots()) + made.pool.available_size() == STATES


@pytest.mark.parametrize("core", CORES)
def test_one_that_a_request_holds_is_dropped_when_it_lets_go(core):
    with late(core, plant=lambda: made.device.planted == 0) as made:
        made.serve(PROMPT)
        made.traffic.hold(PROMPT)
        read_all_reports(made.traffic.cache)
        assert len(made.traffic.state_slots()) == 1
        assert made.hit(made.serve([*PROMPT, 7])) == 0
        made.traffic.let_go()
        for number in range(STATES):
            made.serve([1_000 + number] * 65)
        assert made.pool.available_size() == 0
        assert made.hit(made.serve([*PROMPT, 8])) == 0  # in the way still: it goes, as the next one
        read_all_reports(made.traffic.cache)
        assert made.hit(made.serve([*PROMPT, 9])) == 128


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("between", ["flush", "evicted"])
def test_a_report_that_comes_after_its_slot_was_used_again_says_nothing_of_the_new_state(
    core, between
):
    """The first store is refused, and that is known after a second one went into its slot."""
    with late(core, plant=lambda: made.device.planted == 0) as made:
        made.serve(PROMPT)
        (slot,) = made.traffic.state_slots()
        (_, report) = made.pool._unread[slot]
        if between == "flush":
            made.traffic.cache.reset()
            made.traffic.requests.clear()
            made.traffic.allocator.clear()
        else:
            assert made.traffic.evict(states=1) == 1
        made.serve([5, *PROMPT])
        assert made.traffic.state_slots() == [slot]
        assert report.refused() == ()
        read_all_reports(made.traffic.cache)
        assert made.hit(made.serve([5, *PROMPT, 7])) == 128
        assert made.pool.refused == 0


@pytest.mark.parametrize("core", CORES)
def test_a_request_that_waits_for_its_state_can_be_aborted(core):
    with late(core) as made:
        again = made.ask_while_stored()
        made.run.abort(again)
        made.run.run()
        assert made.traffic.requests.mamba_allocator.available_size() == 48
        read_all_reports(made.traffic.cache)
        assert made.hit(made.serve([*PROMPT, 8])) == 128


@pytest.mark.parametrize("buffer", BUFFERS)
def test_no_request_starts_from_a_state_that_was_refused(buffer):
    """One state in five is not finite, over random chats with aborts and retractions."""
    drawn = random.Random(5)
    run, device, _ = serve("rust", buffer, steps=400, plant=lambda: drawn.random() < 0.2)
    assert min(device.planted, device.pool.restored) > 20
    assert 0 < device.pool.refused <= device.planted
    found = reporting.sample(run.traffic.cache)
    assert found["anomalies"] == 0
    assert found["skips|not_finite"] == device.pool.refused
