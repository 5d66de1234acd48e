"""Speculative decoding: no state is reused by tokens that are not its own, and nothing is lost.

SGLang's own scheduling, tracking and result processing over its real cache layer, with random
acceptance. `test_soak` has the long form.
"""

import pytest
import torch
from cache_layer import CORES, plugin
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import spec_utils
from speculative_chats import Chats
from speculative_loop import STOP, SpeculativeLoop
from speculative_parts import BUFFERS, DRAFTS, build, speculating

INT8 = {"checkpoints": "int8", "checkpoint_slots": 24}
KINDS = [
    *((core, buffer, {"policy": "gds"}, 1) for core in CORES for buffer in BUFFERS),
    ("rust", "extra_buffer", {"policy": "learned"}, 64),
    ("rust", "extra_buffer_lazy", {"policy": "lru"}, 16),
    ("rust", "no_buffer", {"policy": "learned"}, 1),
    *(("rust", buffer, {"policy": "gds", **INT8}, 1) for buffer in BUFFERS),
    ("python", "extra_buffer", {"policy": "gds", **INT8}, 64),
]


def serve(core, buffer, settings, page=1, requests=120, plant=lambda: None, **more) -> Chats:
    """So many requests of random chats; everything is checked at each sixtieth and at the end."""
    with plugin(**settings):
        traffic = build(core, buffer, page)
        plant()
        with speculating(buffer):
            chats, due = Chats(traffic, 1, **more), 60
            for _ in chats.steps():
                if chats.asked >= due:
                    chats.drain()
                    due += 60
                if chats.asked >= requests:
                    return chats
    raise AssertionError("the requests end")


@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize(("core", "buffer", "settings", "page"), KINDS, ids=str)
def test_every_reused_state_is_that_of_its_tokens(core, buffer, settings, page, mixed):
    chats = serve(core, buffer, settings, page, mixed=mixed)
    assert chats.run.compared > 50
    assert chats.run.retracted
    side = chats.run.traffic.core.scheduler_side
    assert side.faults.active
    assert side.counts.numbers["draft_tokens"] == chats.run.drafted
    assert side.counts.numbers["accepted_tokens"] == chats.run.accepted
    past = "skips|past_stop" in side.counts.numbers
    assert past == (buffer == "no_buffer")


@pytest.mark.parametrize(("buffer", "page"), [("no_buffer", 1), ("extra_buffer", 64)])
@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
def test_windows_of_drafts_that_lie_over_each_other(overlap, buffer, page, monkeypatch):
    """As SGLang lays out its buffer on a GPU, and on a CPU: whatever this process runs as."""
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: overlap)
    run = serve("rust", buffer, {"policy": "gds"}, page).run
    drafts = run.traffic.requests.mamba_pool.mamba_cache.intermediate_conv_window[0]
    assert (drafts.stride(2) == drafts.stride(4)) == overlap
    assert run.compared > 50


# Errors that are planted: each is found by the states, that say what they are of.


def after_the_drafts(monkeypatch):
    """The state after the last draft is kept, not the one after the last accepted token."""
    right = spec_utils._verify_commit_step_indices

    def steps(**given):
        last, crossing = right(**given)
        return torch.full_like(last, DRAFTS - 1), crossing

    monkeypatch.setattr(spec_utils, "_verify_commit_step_indices", steps)


def count_of_the_step_before(monkeypatch):
    right, before = spec_utils._verify_commit_step_indices, [2]

    def steps(*, accept_lens, accept_index, **given):
        now = torch.full_like(accept_lens, before[0])
        before[0] = int(accept_lens[0])
        every = torch.arange(accept_index.numel()).view_as(accept_index)
        return right(accept_lens=now, accept_index=every, **given)

    monkeypatch.setattr(spec_utils, "_verify_commit_step_indices", steps)


def rows_of_another_step(monkeypatch):
    right = HybridReqToTokenPool.get_mamba_indices
    monkeypatch.setattr(
        HybridReqToTokenPool, "get_mamba_indices", lambda *given: right(*given).flip(0)
    )


def slots_of_another_pool(monkeypatch):
    """A draft head's pool copies a cached state by its slot, which is one of the int8 pool."""

    def resume(self, req):
        pool, kv = self.traffic.requests, req.kv
        pool.mamba_pool.copy_from(kv.mamba_cow_src_index.view(-1), kv.mamba_pool_idx.view(-1))

    monkeypatch.setattr(SpeculativeLoop, "_resume", resume)


def depth_of_the_crossing_before(monkeypatch):
    right = SchedulerBatchResultProcessor._mamba_check_track_boundary

    def boundary(processor, req, *given):
        crossed, depth = right(processor, req, *given)
        return crossed, depth - 64 * (depth - 64 > req.kv.cache_protected_len)

    monkeypatch.setattr(SchedulerBatchResultProcessor, "_mamba_check_track_boundary", boundary)


def no_guard(monkeypatch):
    monkeypatch.setattr("statecache_sglang.speculation.is_past_stop", lambda *_: False)


FAULTS = [
    (after_the_drafts, "no_buffer", {}, {}),
    (after_the_drafts, "no_buffer", INT8, {}),
    (count_of_the_step_before, "no_buffer", {}, {}),
    (count_of_the_step_before, "extra_buffer", {}, {}),
    (rows_of_another_step, "no_buffer", {}, {}),
    (slots_of_another_pool, "extra_buffer", INT8, {}),
    (depth_of_the_crossing_before, "extra_buffer", {}, {}),
    (no_guard, "no_buffer", {}, {"mixed": True}),
]


@pytest.mark.parametrize(("fault", "buffer", "pool", "more"), FAULTS)
def test_a_planted_error_is_found(fault, buffer, pool, more, monkeypatch):
    with pytest.raises(AssertionError, match="wrong states"):
        serve(
            "rust",
            buffer,
            {"policy": "gds", **pool},
            requests=300,
            plant=lambda: fault(monkeypatch),
            **more,
        )


# Stops inside an accepted run.


def answer(loop: SpeculativeLoop, prompt: list[int], run: list[int]):
    """The tokens of an answer: one by the prefill, then a run that is accepted at once."""
    drawn = iter([5, *run])
    loop._draw = lambda: next(drawn)
    loop.acceptance = lambda: len(run)
    req = loop.ask(prompt, 60)
    loop.run()
    return req


# Of 100 tokens and the answers 5, then four at once: the state is of 104 tokens. The key ends with
# the stop, or before the last token, which nothing has computed: at 102, 103, 104 and 104.
@pytest.mark.parametrize(
    ("stop", "reused", "lost"), [(0, 100, 2), (1, 100, 3), (2, 104, 0), (3, 104, 0)]
)
@pytest.mark.parametrize("own_check", [True, False], ids=["", "without SGLang's check"])
@pytest.mark.parametrize("core", CORES)
def test_a_state_past_the_stop_is_not_cached(core, own_check, stop, reused, lost, monkeypatch):
    """SGLang 0.5.22 has no check of its own."""
    prompt = list(range(10, 110))
    with plugin(policy="gds"):
        if not own_check:
            check = "_mamba_can_cache_finished_req"
            monkeypatch.setattr(
                SchedulerBatchResultProcessor, check, lambda *_: True, raising=False
            )
        traffic = build(core, "no_buffer")
        with speculating():
            loop = SpeculativeLoop(traffic, None)
            run = [6] * stop + [STOP] + [6] * (3 - stop)
            req = answer(loop, prompt, run)
            assert req.finished_len == stop + 2
            again = answer(loop, [*prompt, 5, *run, 7], [STOP])
            assert loop.hits[again.rid] == reused
            assert loop.wrong == 0
            numbers = traffic.core.scheduler_side.counts.numbers
            assert numbers.get("draft_lost_tokens", 0) == lost
            assert numbers.get("skips|past_stop", 0) == (lost > 0)


def test_what_sglang_does_not_cache_is_counted_in_a_version_that_nobody_tried(monkeypatch):
    """As the first of those above: the check is there, whatever the version is called."""
    monkeypatch.setattr("statecache_sglang.seams.version", lambda _: "0.5.99")
    with plugin(policy="gds"):
        traffic = build("rust", "no_buffer")
        with speculating():
            answer(SpeculativeLoop(traffic, None), list(range(10, 110)), [STOP, 6, 6, 6])
            numbers = traffic.core.scheduler_side.counts.numbers
            assert (numbers["draft_lost_tokens"], numbers["skips|past_stop"]) == (2, 1)


class Cut:
    """A grammar that takes one token of an accepted run and ends."""

    def __init__(self, taken: int):
        self.taken = taken

    finished = False

    def accept_token(self, _: int) -> None:
        self.taken -= 1

    def is_terminated(self) -> bool:
        return self.taken <= 0


def no_counts(result):
    result.num_correct_drafts_per_req_cpu = None


def too_few_counts(result):
    result.num_correct_drafts_per_req_cpu = result.num_correct_drafts_per_req_cpu[:-1]


def padding(result):
    result.num_correct_drafts_per_req_cpu = [*result.num_correct_drafts_per_req_cpu, 3]


# Of 100 tokens, the answer 5 and four that are verified the grammar keeps the first: without what
# was accepted the state, of 104 tokens, looks like one of the 101 that the request then has.
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("spoil", "anomalies"),
    [(no_counts, 1), (too_few_counts, 1), (padding, 0)],
)
def test_a_step_whose_counts_are_wrong_ends_and_leaves_no_state(
    core, spoil, anomalies, monkeypatch, caplog
):
    name = "_resolve_spec_v2_tokens"
    own = getattr(SchedulerBatchResultProcessor, name)

    def spoilt(self, result, batch):
        batch.has_grammar, batch.forward_mode = True, ForwardMode.DECODE  # as the scheduler's own
        kept = own(self, result, batch)
        spoil(result)
        return kept

    monkeypatch.setattr(SchedulerBatchResultProcessor, name, spoilt)
    check = "_mamba_can_cache_finished_req"
    monkeypatch.setattr(SchedulerBatchResultProcessor, check, lambda *_: True, raising=False)
    prompt = list(range(10, 110))
    with plugin(policy="gds"):
        traffic = build(core, "no_buffer")
        with speculating():
            loop = SpeculativeLoop(traffic, None)
            drawn = iter([5, 6, 6, 6, 6])
            loop._draw, loop.acceptance = (lambda: next(drawn)), (lambda: 4)
            req = loop.ask(prompt, 60)
            req.grammar = Cut(2)
            loop.run()
            assert list(req.output_ids) == [5, 6]
            side = traffic.core.scheduler_side
            assert side.counts.numbers["skips|past_stop"] == 1
            assert (side.faults.anomalies, side.faults.active) == (anomalies, True)
            assert ("what a verify step accepted is not known" in caplog.text) == (anomalies > 0)
            assert traffic.hit([*prompt, 5, 6, 7]) == 100


def test_a_request_that_ends_in_a_mixed_step_has_run_past_its_key():
    """The last token is computed beside the prefill of another one, and counted nowhere."""
    with plugin(policy="gds"):
        traffic = build("rust", "no_buffer")
        with speculating():
            loop = SpeculativeLoop(traffic, None, mixed=True)
            drawn = iter([5, 6, STOP, STOP])
            loop._draw = lambda: next(drawn)
            first = loop.ask(list(range(10, 60)), 60)
            loop.step()
            loop.ask(list(range(60, 90)), 1)
            loop.step()
            assert first.finished() or loop.running
            loop.run()
            numbers = traffic.core.scheduler_side.counts.numbers
            assert numbers["skips|past_stop"] == 1
            assert traffic.hit([*range(10, 60), 5, 6]) == 50
