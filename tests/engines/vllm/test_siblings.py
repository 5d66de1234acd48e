"""Requests that begin alike, on vLLM's real scheduler: a head is known, restored, or computed."""

import random

import pytest
from scheduled import Run, without_states, words
from vllm.v1.request import RequestStatus

POOL = {"checkpoints": "native", "checkpoint_slots": 64}
PLUGINS = {"blocks": {}, "stock": {"block_policy": "stock"}, "pool": POOL}
RNG = random.Random(5)
HEAD = words(RNG, 512)


def tails(count, least=3, most=15):
    """Each begins with its own number."""
    return [[400 + number, *words(RNG, RNG.randint(least, most) - 1)] for number in range(count)]


def scheduled_at_once(run, tails):
    """Add a prompt for each tail and an unrelated one; return (names, names in the next step)."""
    names = [run.add([*HEAD, *tail]) for tail in tails]
    names.append(run.add(words(RNG, 100)))
    return names, set(run.step().num_scheduled_tokens)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_siblings_on_a_known_head_are_admitted_in_one_step(model, plugin):
    """Tails of 3 to 15 tokens below blocks of 16, and an unrelated request behind them."""
    run = Run(model, blocks=400, plugin=PLUGINS[plugin], requests=32)
    run.ask([*HEAD, 399])
    names, step = scheduled_at_once(run, tails(16))
    assert step == set(names)
    assert [run.cached[name] for name in names] == [512] * 16 + [0]
    run.finish()
    run.check()
    assert run.shadow.resumed == 16


def test_without_the_plugin_one_is_admitted_and_all_others_wait(model):
    """What the plugin is for: this can go when vLLM admits them together."""
    run = Run(model, blocks=400, requests=32)
    run.ask([*HEAD, 399])
    names, step = scheduled_at_once(run, tails(16))
    assert step == {names[0]}


@pytest.mark.parametrize("most", [15, 60])
def test_siblings_share_one_restore(model, most):
    """The states of the head are gone from the blocks, twelve requests come at once."""
    run = Run(model, blocks=400, plugin=POOL, requests=32)
    run.ask([*HEAD, 399])
    without_states(run)
    names, step = scheduled_at_once(run, tails(12, most=most))
    assert step == set(names)
    assert [run.cached[name] for name in names] == [512] * 12 + [0]
    assert len(run.restores) == 1
    run.finish()
    run.check()
    run.scheduler_side.checkpoints.check()
    assert run.shadow.resumed == 12
    # The state is in its blocks again: nothing has to be restored for the next one.
    assert run.ask([*HEAD, 398]) == 512
    assert len(run.restores) == 1


def test_a_restore_that_is_only_planned_names_no_block(model):
    run = Run(model, blocks=400, plugin=POOL)
    run.ask([*HEAD, 399])
    without_states(run)
    request = run.scheduler.requests[run.add([*HEAD, 398])]
    assert run.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 512
    planned = run.scheduler_side.lookup.planned[request.request_id]
    assert len(planned.blocks) == 3
    assert {run.pool.blocks[at].block_hash for at in planned.blocks} == {None}
    run.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    run.step()
    assert {run.pool.blocks[at].block_hash for at in planned.blocks} == {None}
    assert run.restores == []
    run.check()


@pytest.mark.parametrize("plugin", PLUGINS)
def test_others_do_not_wait_behind_a_sibling_of_a_head_in_this_step(model, plugin):
    """The head is computed in this step: its sibling waits for the next one, nobody else does."""
    run = Run(model, blocks=400, plugin={**PLUGINS[plugin], "wait_for_head": "off"}, requests=32)
    first, sibling = run.add([*HEAD, 400, 1]), run.add([*HEAD, 401, 1])
    other = run.add(words(RNG, 100))
    assert set(run.step().num_scheduled_tokens) == {first, other}
    assert set(run.step().num_scheduled_tokens) >= {first, sibling}
    assert run.cached[sibling] == 512
    run.finish()


def computed(run):
    """Run all steps; return the tokens computed and the step of each request's first token."""
    total, step, first = 0, 0, {}
    while run.scheduler.has_unfinished_requests():
        planned = run.step()
        step += 1
        for name, tokens in planned.num_scheduled_tokens.items():
            total += tokens
            request = run.scheduler.requests.get(name)
            if request is None or request.num_output_tokens:
                first.setdefault(name, step)
        assert step < 1_000
    return total, first


SHAPES = {
    # head, shortest and longest tail, block, budget of a step
    "several steps a head": (4096, 64, 200, 16, 2048),
    "one step a prompt": (1600, 64, 200, 16, 8192),
    "a head inside a large block": (6900, 500, 1000, 528, 4096),
    "tails below a block": (4096, 3, 15, 16, 2048),
}


@pytest.mark.parametrize("count", [6, 16])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_burst_computes_its_head_once(model, plugin, count, shape):
    """At most 1.15 times the head and the tails; the first sibling's first token comes no later."""
    head, least, most, block, budget = SHAPES[shape]
    shared = words(RNG, head)
    prompts = [[*shared, *tail] for tail in tails(count, least, most)]
    tokens = head + sum(len(prompt) - head for prompt in prompts)
    total, first = {}, {}
    for wait in ("on", "off"):
        run = Run(
            model,
            blocks=3000,
            block=block,
            budget=budget,
            requests=32,
            length=8192,
            plugin={**PLUGINS[plugin], "wait_for_head": wait},
        )
        names = [run.add(prompt) for prompt in prompts]
        total[wait], steps = computed(run)
        first[wait] = steps[names[0]]
        run.check()
        assert run.scheduler_side.faults.anomalies == 0
        assert run.scheduler_side.lookup.known == set()
    assert total["on"] <= min(1.15 * tokens, total["off"])
    assert first["on"] <= first["off"]
    if shape == "several steps a head":
        assert total["off"] > 1.5 * tokens


def waiting(model, plugin=POOL):
    """One request that computes a head of 4,096 tokens, 1,024 a step, and one that waits for it.

    There is room for both in a step.
    """
    limit = {"long_prefill_token_threshold": 1024}
    run = Run(model, blocks=3000, length=8192, plugin=plugin, **limit)
    shared = words(RNG, 4096)
    first, second = run.add([*shared, 400]), run.add([*shared, 401])
    assert set(run.step().num_scheduled_tokens) == {first}
    assert set(run.step().num_scheduled_tokens) == {first}
    return run, shared, first, second


def test_with_the_flag_off_nobody_waits(model):
    with pytest.raises(AssertionError):
        waiting(model, {**POOL, "wait_for_head": "off"})


def test_a_waiting_request_goes_on_in_the_step_after_the_head(model):
    run, _, first, second = waiting(model)
    steps = [set(run.step().num_scheduled_tokens) for _ in range(3)]
    assert steps == [{first}, {first}, {first, second}]
    assert run.cached[second] == 4096
    run.finish()
    numbers = run.scheduler_side.report.counts.numbers
    assert numbers["head_waits"] == 1
    assert numbers["head_wait_steps"] == 4
    assert numbers["head_wait_saved_tokens"] == 4096


def test_a_waiting_request_goes_on_at_once_when_the_other_is_aborted(model):
    run, _, first, second = waiting(model)
    run.scheduler.finish_requests([first], RequestStatus.FINISHED_ABORTED)
    assert set(run.step().num_scheduled_tokens) == {second}
    run.finish()
    assert run.scheduler_side.lookup.known == set()


def test_a_waiting_request_goes_on_at_once_when_the_other_is_preempted(model):
    """As where a reset takes all running requests back."""
    run, _, first, second = waiting(model)
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert set(run.step().num_scheduled_tokens) == {first, second}
    run.finish()
    assert second in run.cached
    assert run.scheduler_side.lookup.known == set()


def test_a_waiting_request_holds_up_nobody(model):
    run, _, first, second = waiting(model)
    short = run.add(words(RNG, 40))
    assert set(run.step().num_scheduled_tokens) == {first, short}
    assert run.scheduler.waiting.peek_request().request_id == second


def test_a_waiting_request_that_is_aborted_leaves_nothing(model):
    run, _, first, second = waiting(model)
    run.scheduler.finish_requests([second], RequestStatus.FINISHED_ABORTED)
    run.finish()
    assert run.scheduler_side.lookup.known == set()
    assert second not in run.cached
    assert run.chunk_ends[first][-1] == 4097


@pytest.mark.parametrize("other", [{"cache_salt": "x"}])
def test_nobody_waits_across_namespaces(model, other):
    run = Run(model, blocks=3000, budget=8192, length=8192, plugin=POOL)
    shared = words(RNG, 2048)
    names = {run.add([*shared, 400]), run.add([*shared, 401], **other)}
    assert set(run.step().num_scheduled_tokens) == names


def test_a_head_too_short_for_a_wait_is_computed_by_each(model):
    """256 tokens cost less than a step (512)."""
    run = Run(model, blocks=3000, budget=8192, length=8192, plugin=POOL)
    shared = words(RNG, 256)
    tail = words(RNG, 40)
    names = {run.add([*shared, 400, *tail]), run.add([*shared, 401, *tail])}
    assert set(run.step().num_scheduled_tokens) == names


def test_an_own_boundary_of_the_first_sibling_is_kept_too(model):
    """Its KV parts from what is cached at 1,024; the others part from it at 2,048."""
    run = Run(model, blocks=3000, budget=8192, length=8192, plugin={})
    shared = words(RNG, 2048)
    run.ask([*shared[:1024], *words(RNG, 200)])
    for tail in tails(3, 64, 200):
        run.add([*shared, *tail])
    run.finish()
    assert run.chunk_ends["r2"][:2] == [1024, 2048]
    assert [run.cached[name] for name in ("r2", "r3", "r4")] == [0, 2048, 2048]
