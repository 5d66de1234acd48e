"""Odd orders around a verify step: aborts, retractions, grammars that end, and new starts."""

import pytest
import torch
from cache_layer import CORES, plugin
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from speculative_loop import STOP, SpeculativeLoop
from speculative_parts import BUFFERS, build, speculating

PROMPT = list(range(10, 110))


class Given(SpeculativeLoop):
    """Steps that accept four tokens, of those in `answer` or 6; `between` runs before a result."""

    between = staticmethod(lambda: None)
    grammar = False
    padded = 0

    def __init__(self, traffic):
        super().__init__(traffic, None)
        self.answer: list[int] = []
        self.acceptance = lambda: 4
        self._draw = lambda: self.answer.pop(0) if self.answer else 6

    def _batch(self, reqs, mode):
        batch = super()._batch(reqs, mode)
        batch.has_grammar = self.grammar
        return batch

    def _verify(self, reqs):
        batch, result = super()._verify(reqs)
        batch.forward_mode = ForwardMode.DECODE  # as the scheduler's own batch says
        result.accept_lens = torch.nn.functional.pad(result.accept_lens, (0, self.padded), value=1)
        return batch, result

    def _take(self, batch, result):
        if batch.forward_mode is ForwardMode.DECODE:
            self.between()
        super()._take(batch, result)


class EndsAt:
    """A grammar that ends with its token `last`."""

    finished = False

    def __init__(self, last: int):
        self.left, self.last = last, last

    def accept_token(self, _token: int) -> None:
        self.left -= 1

    def is_terminated(self) -> bool:
        return self.left <= 0


def hit_of(loop, tokens: list[int]) -> int:
    """How deep a prompt that begins with these tokens is reused."""
    loop.between, loop.grammar, loop.answer = (lambda: None), False, [STOP]
    return loop.hits[finished(loop, [*tokens, 7], 1).rid]


def finished(loop, prompt: list[int], most: int, **more):
    req = loop.ask(prompt, most)
    for name, value in more.items():
        setattr(req, name, value)
    loop.run(1_000)
    assert req.finished()
    return req


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("core", CORES)
def test_an_abort_between_a_verify_step_and_its_result(core, buffer):
    """The answer is 6s; the abort ends it at the tokens of that very result."""
    with plugin(policy="gds"):
        traffic = build(core, buffer)
        with speculating(buffer):
            loop = Given(traffic)

            def abort():
                first.to_finish = FINISH_ABORT("asked for")

            first = loop.ask(PROMPT, 60)
            loop.between = abort
            loop.run(1_000)
            assert first.finished()
            out = list(first.output_ids)
            hit = hit_of(loop, [*PROMPT, *out])
            assert 0 <= hit <= len(PROMPT) + len(out)
            assert loop.wrong == 0
            assert traffic.core.scheduler_side.faults.active
            assert not loop.running


@pytest.mark.parametrize("buffer", BUFFERS[1:])
def test_a_request_retracted_before_its_result_starts_again_without_it(buffer):
    """Where steps overlap. Its tokens of that step are dropped, and come again."""
    with plugin(policy="gds"):
        traffic = build("rust", buffer)
        with speculating(buffer):
            loop, left = Given(traffic), [1]
            first = loop.ask(PROMPT, 9)

            def retract():
                if left and first in loop.running:
                    left.clear()
                    loop.retract(first)
                    assert getattr(first, "statecache_verified_tokens", 0) <= len(PROMPT)

            loop.between = retract
            loop.run(1_000)
            assert (loop.retracted, first.finished_len) == (1, 9)
            assert loop.hits[first.rid] >= 64
            assert len(PROMPT) < first.statecache_verified_tokens <= len(PROMPT) + 12
            assert loop.wrong == 0


def test_a_request_that_starts_again_has_no_verified_tokens():
    """Whatever a step before its retraction left behind: its state is that of its new prefill."""
    with plugin(policy="gds"):
        traffic = build("rust", "no_buffer")
        with speculating():
            loop = Given(traffic)
            first = loop.ask(PROMPT, 9)
            loop.step()
            loop.step()
            loop.retract(first)
            first.statecache_verified_tokens = 1_000
            loop.step()
            assert first.statecache_verified_tokens == 0
            loop.run(1_000)
            # 5 tokens before, one by the new prefill, 4 of which its own answer takes 3: the state
            # is of the last one of these, the fourth is not computed.
            assert first.finished_len == 9
            assert hit_of(loop, [*PROMPT, *first.output_ids]) == len(PROMPT) + 9


@pytest.mark.parametrize("core", CORES)
def test_a_request_that_ends_in_its_prefill_is_cached(core):
    with plugin(policy="gds"):
        traffic = build(core, "no_buffer")
        with speculating():
            loop = Given(traffic)
            finished(loop, PROMPT, 1)
            assert hit_of(loop, PROMPT) == len(PROMPT)
            assert "skips|past_stop" not in traffic.core.scheduler_side.counts.numbers


# The prefill gives one token, then four are accepted at once: the state is of 104. A grammar that
# ends with the fifth keeps it, whose own last token was not computed.
@pytest.mark.parametrize(("last", "hit"), [(2, 100), (3, 100), (5, 104)])
@pytest.mark.parametrize("core", CORES)
def test_a_grammar_that_ends_inside_an_accepted_run(core, last, hit):
    with plugin(policy="gds"):
        traffic = build(core, "no_buffer")
        with speculating():
            loop = Given(traffic)
            loop.grammar = True
            first = loop.ask(PROMPT, 60)
            first.grammar = EndsAt(last)
            loop.run(1_000)
            out = list(first.output_ids)
            assert (first.finished(), len(out)) == (True, last)
            assert hit_of(loop, [*PROMPT, *out]) == hit
            assert loop.wrong == 0
            assert traffic.core.scheduler_side.counts.numbers.get("skips|past_stop", 0) == (
                hit == len(PROMPT)
            )


def test_rows_of_padding_in_a_result_are_no_requests():
    with plugin(policy="gds"):
        traffic = build("rust", "no_buffer")
        with speculating():
            loop = Given(traffic)
            loop.padded = 3
            first = finished(loop, PROMPT, 9)
            assert first.statecache_verified_tokens == len(PROMPT) + 8
            side = traffic.core.scheduler_side
            assert side.counts.numbers["accepted_tokens"] == loop.accepted
