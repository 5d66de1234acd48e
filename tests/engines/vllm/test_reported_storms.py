"""Reported of other caches, tried on vLLM's real scheduler: clients that go, memory that runs out.

`Shadow` checks in each of them that a request resumes from its own state.
"""

import dataclasses
import json
import random

import pytest
from scheduled import Run, without_states, words
from stored import copy, store_over, told
from vllm.v1.request import RequestStatus

from statecache.replay.prefix_tree import PrefixTree
from statecache.sizing.model_config import read_model
from statecache.sizing.splits import Demand, rated_splits
from statecache_vllm.checkpoints import CheckpointManager

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
POOLS = {
    "reuse": {},
    "native": POOL,
    "int8": {**POOL, "checkpoints": "int8"},
    "learned": {**POOL, "policy": "learned"},
}
GONE = [status for status in RequestStatus if status > RequestStatus.PREEMPTED]


def add_up(run):
    """Free and held blocks are all there are, and so are free, cached and pinned slots."""
    run.check()
    held = sum(block.ref_cnt > 0 and not block.is_null for block in run.pool.blocks)
    assert held + run.pool.get_num_free_blocks() == len(run.pool.blocks) - 1
    checkpoints = run.scheduler_side.checkpoints
    if checkpoints is not None:
        checkpoints.check()
        assert 0 <= checkpoints.pinned <= len(checkpoints)
        assert len(checkpoints) + len(checkpoints._free) == checkpoints.slots


def nothing_is_left(run):
    add_up(run)
    side = run.scheduler_side
    assert run.pool.get_num_free_blocks() == len(run.pool.blocks) - 1
    assert side.stores.requests == side.lookup.planned == side.report._found == {}
    assert side.lookup.known == set()
    assert side.lookup.restores == []
    assert side.checkpoints is None or side.checkpoints.pinned == 0
    assert side.faults.anomalies == 0


# Clients that go.


@pytest.mark.parametrize("plugin", POOLS)
def test_a_fan_out_whose_clients_go_at_any_moment_leaves_nothing_behind(model, share, plugin):
    """500 requests in groups of 16, each aborted: queued, in a step, between two, or decoding."""
    run = Run(model, blocks=130, plugin=POOLS[plugin], budget=64)
    rng = random.Random(1)
    gone, stages = 0, set()

    def leave(requests, moment):
        nonlocal gone
        leaving = [name for name, at in requests.items() if at == moment]
        for name in leaving:
            request = run.scheduler.requests.get(name)
            if request is not None:
                stages.add((request.status.name, moment % 1 > 0, request.num_output_tokens > 0))
                run.scheduler.finish_requests([name], rng.choice(GONE))
                gone += 1
            del requests[name]

    while gone < 500 * share:
        head = words(rng, rng.randint(20, 120))
        requests = {}
        for _ in range(16):
            name = run.add(head + words(rng, rng.randint(1, 40)), tokens=30)
            requests[name] = rng.choice([0, rng.randint(0, 24) / 2])
        step = 0
        while requests:
            leave(requests, step)
            planned = run.schedule()
            leave(requests, step + 0.5)
            run.report(planned)
            step += 1
            add_up(run)
        run.step()
        if rng.random() < 0.5:
            without_states(run)
        nothing_is_left(run)
    assert {status for status, _, _ in stages} >= {"WAITING", "RUNNING"}
    assert {(inside, decoding) for _, inside, decoding in stages} >= {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
    if plugin != "reuse":
        assert len(run.restores) > 0


@pytest.mark.parametrize("status", GONE, ids=lambda status: status.name)
@pytest.mark.parametrize("mode", ["native", "int8"])
def test_a_queued_request_that_ends_for_any_reason_holds_no_slot_any_more(model, mode, status):
    """It has found a state and waits for blocks. Both slots are there for the next two prompts."""
    plugin = {"checkpoints": mode, "checkpoint_slots": 2, "policy": "lru"}
    run = Run(model, blocks=60, plugin=plugin)
    rng = random.Random(0)
    prompt = words(rng, 100)
    run.ask(prompt)
    without_states(run)
    running = run.add(words(rng, 560), tokens=20)
    run.step()
    waiting = run.add(prompt + words(rng, 300))
    run.step()
    request = run.scheduler.requests[waiting]
    assert request.status is RequestStatus.WAITING
    run.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert list(run.scheduler_side.lookup.planned) == [waiting]
    run.scheduler.finish_requests([waiting], status)
    add_up(run)
    assert run.scheduler_side.lookup.planned == {}
    assert waiting not in run.scheduler_side.lookup.known
    run.scheduler.finish_requests([running], status)
    run.step()
    nothing_is_left(run)
    others = [words(rng, 100) for _ in range(2)]
    for _ in range(2):
        found = [run.ask(other) for other in others]
        without_states(run)
    assert found == [96, 96]
    assert len(run.restores) == 2


# Memory that runs out.


class Promises(dict):
    """Restores planned by request, and how many were made and taken back or kept."""

    made = taken = 0

    def __setitem__(self, name, copy):
        assert name not in self
        self.made += 1
        super().__setitem__(name, copy)

    def pop(self, name, *default):
        self.taken += name in self
        return super().pop(name, *default)


def report_late(run, rng):
    """What the workers stored is reported steps later, as where steps overlap."""
    waiting, report = [], run.report

    def reported(planned):
        commands = planned.kv_connector_metadata
        if commands is not None:
            waiting.extend(commands.stores)
            ready = waiting[: rng.randint(0, len(waiting)) if rng.random() < 0.5 else 0]
            del waiting[: len(ready)]
            planned.kv_connector_metadata = dataclasses.replace(commands, stores=ready)
        report(planned)

    run.report = reported
    return waiting


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("plugin", ["native", "int8", "learned"])
def test_a_storm_of_preemptions_keeps_or_takes_back_each_promise(model, monkeypatch, plugin, slots):
    """No block is free, and each slot waits for its store: what is promised is done or withdrawn.

    30 prompts that share heads, with answers longer than themselves, in 44 blocks.
    """
    counts = {"stores": 0, "preempted": 0}
    prepare = CheckpointManager.prepare_store

    def prepare_store(self, *args, **more):
        found = prepare(self, *args, **more)
        counts["stores"] += found is not None
        return found

    monkeypatch.setattr(CheckpointManager, "prepare_store", prepare_store)
    plugin_of = {**POOLS[plugin], "checkpoint_slots": slots, "checkpoint_interval": 32}
    run = Run(model, blocks=44, plugin=plugin_of, budget=64)
    rng = random.Random(slots)
    unreported = report_late(run, rng)
    side = run.scheduler_side
    promises = side.lookup.planned = Promises()
    original = run.scheduler._preempt_request

    def preempt(request, *args, **more):
        counts["preempted"] += 1
        return original(request, *args, **more)

    run.scheduler._preempt_request = preempt
    heads = [words(rng, 70) for _ in range(3)]
    for _ in range(30):
        run.add(rng.choice(heads) + words(rng, rng.randint(1, 30)), tokens=60)
    full = all_promised = 0
    for _ in range(10_000):
        if not run.scheduler.has_unfinished_requests():
            break
        if rng.random() < 0.3:
            without_states(run)
        run.step()
        add_up(run)
        full += run.pool.get_num_free_blocks() < 4
        all_promised += side.checkpoints.pinned == slots
    done = side.checkpoints.counts
    assert not run.scheduler.has_unfinished_requests()
    exact = POOLS[plugin]["checkpoints"] == "native"  # there in the next step, reported or not
    assert min(full, counts["preempted"], done.restored) > 3
    assert all_promised > 3 or exact
    late = [state for state, _, _, _ in unreported]
    late = [] if exact else [*run.unreported, *late]
    assert (promises, promises.made) == ({}, promises.taken)
    assert done.restored == len(run.restores) <= promises.made
    dropped = counts["stores"] - done.stored - len(late)
    assert side.checkpoints.pinned <= len(late) or exact
    assert dropped >= 0
    side.stored(late, [], failed=False)
    run.step()
    nothing_is_left(run)


# Sizes.


def four_layers(model, folder):
    """Write the configuration of three recurrent layers and one of attention, as `Run` has them."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("share", [5, 20, 60])
def test_three_groups_keep_as_many_states_as_the_plan_says(
    model, tmp_path, monkeypatch, shared, share
):
    """A state is one slot in each of three groups: the slots of the plan are whole states."""
    demand = Demand(
        model=read_model(four_layers(model, tmp_path)),
        memory_bytes=20_000_000,
        engines=["vllm"],
        shares=[share],
        running=2,
        state_dtype="float32",
    )
    splits = list(rated_splits(demand, PrefixTree([-1, 0, 1], [[1, 2], [1, 2]], [0, 2])))
    assert [split.states for split in splits] == ["shared", "native", "int8"]
    for split in splits[1:]:
        kept = split.kept_slots
        assert kept > 1
        taken = split.active_bytes + split.kept_bytes + split.kv_bytes
        assert taken <= demand.memory_bytes
        plugin = {"checkpoints": split.states, "checkpoint_slots": kept, "policy": "lru"}
        run = Run(model, blocks=40 + 30 * kept, plugin=plugin)
        rng = random.Random(0)
        prompts = [words(rng, 40) for _ in range(kept + 3)]
        for prompt in prompts:
            run.ask(prompt)
        assert len(run.scheduler_side.checkpoints) == kept
        without_states(run)
        assert sum(run.ask(prompt) > 0 for prompt in prompts[3:]) == kept
        store, _ = store_over(monkeypatch, shared=shared, **plugin)
        assert allocated(store) == split.kept_bytes
        for state in range(kept):
            store.store([copy(state, state, (1, 2, 3))])
            assert told(store) == (None if split.states == "native" else ((state,), ()))


def allocated(store):
    return sum(each.pool.total_bytes for each in store._pools)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 419])
@pytest.mark.parametrize("mode", ["native", "int8"])
@pytest.mark.parametrize("memory", ["device", "host"])
def test_the_bytes_that_are_announced_are_those_of_the_pool(
    monkeypatch, caplog, memory, mode, slots, shared
):
    """Three layers: 3 x (3,072 + 65,536) bytes exact; in int8 3 x (3,072 + 16,384 + 1,024)."""
    state = {"native": 205_824, "int8": 61_440}[mode]
    with caplog.at_level("INFO", logger="statecache"):
        more = {"checkpoints": mode, "checkpoint_slots": slots, "checkpoint_memory": memory}
        store, _ = store_over(monkeypatch, shared=shared, **more)
    assert allocated(store) == slots * state
    announced = (
        f"statecache: {slots} {mode} checkpoints of {state} bytes in {memory} memory, each 3 slots"
        f" of the pool, {slots * state} bytes in all"
    )
    assert announced in [record.getMessage() for record in caplog.records]
