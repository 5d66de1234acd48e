"""How deep a prompt of n tokens hits when it is asked again, in closed form.

Without the extra buffer a state is cached where a chunk of u tokens ends, and the last token of a
prompt is always computed: a repeat resumes after floor((n - 1) / u) chunks. With it a state is
cached at the last multiple of u in a prompt; where that is its end no repeat can use it, and the
first one leaves a state before. SGLang loses nothing to a drafter, and nothing to the plugin.
(There are free slots here: with extra_buffer_lazy and none SGLang gives up the state of a prompt
that ends a few tokens before a multiple, drafter or not.)
"""

import sys

import pytest
from cache_layer import plugin
from speculative_loop import SpeculativeLoop
from speculative_parts import build, speculating

DRAFTERS = pytest.mark.parametrize("drafter", [False, True], ids=["no drafter", "drafter"])
PLUGINS = pytest.mark.parametrize(
    "settings",
    [{}, {"policy": "gds"}, {"policy": "learned", "checkpoints": "int8", "checkpoint_slots": 40}],
    ids=["alone", "native", "int8"],
)


class Repeats:
    """Asks prompts that have nothing in common, each several times; answers are of nine tokens."""

    def __init__(self, buffer, page, chunk, drafter):
        sizes = {"slots": 256, "kv_tokens": 16 * 2_112, "longest": 8_192}
        traffic = build("rust", buffer, page, **sizes)
        self.loop = SpeculativeLoop(traffic, None, chunk=chunk, drafter=drafter)
        self.loop._draw = lambda: 6
        self.loop.acceptance = lambda: 3
        self._first = 0

    def hits(self, n, times):
        self._first += 10_000
        prompt = list(range(self._first, self._first + n))
        asked = []
        for _ in range(times):
            asked.append(self.loop.ask(prompt, 9))
            self.loop.run()
        assert self.loop.wrong == 0
        return [self.loop.hits[req.rid] for req in asked]


def lengths(u, most):
    """Every length up to 12 units of few tokens; around the ends of units for others.

    Between two ends nothing changes: both the states that are there and those that a repeat may
    use are the ones at multiples of u below n.
    """
    if u == 16:
        return range(1, 12 * u + 1)
    ends = range(0, most * u + 1, u)
    return sorted({n for end in ends for n in (end - 1, end, end + 1, end + u // 2)} - {-1, 0})


@DRAFTERS
@PLUGINS
@pytest.mark.parametrize("u", [16, 64, 528])
def test_a_repeat_resumes_where_the_last_chunk_before_its_end_did(u, settings, drafter):
    with plugin(**settings):
        repeats = Repeats("no_buffer", 1, u, drafter)
        with speculating():
            for n in lengths(u, 12):
                assert repeats.hits(n, 2) == [0, (n - 1) // u * u], n


@DRAFTERS
@PLUGINS
@pytest.mark.parametrize("buffer", ["extra_buffer", "extra_buffer_lazy"])
@pytest.mark.parametrize(("page", "u"), [(1, 64), (64, 64), (528, 2_112)])
def test_with_the_extra_buffer_it_resumes_at_the_grid(page, u, buffer, settings, drafter):
    """528 tokens a page and 64 a chunk of the kernels: a multiple of both is 2,112."""
    with plugin(**settings):
        repeats = Repeats(buffer, page, 8_192, drafter)
        with speculating(buffer):
            for n in lengths(u, 12 if u == 64 else 3):
                form = (n - 1) // u * u
                assert repeats.hits(n, 3) == [0, form if n % u else 0, form], n


def main() -> None:
    """Every length up to 12 chunks of each size: prints how many were as the form says."""
    for u in (16, 64, 528):
        for drafter in (False, True):
            with plugin(policy="gds"):
                repeats = Repeats("no_buffer", 1, u, drafter)
                with speculating():
                    asked = range(1, 12 * u + 1)
                    wrong = [n for n in asked if repeats.hits(n, 2) != [0, (n - 1) // u * u]]
            drafts = "drafter" if drafter else "no drafter"
            sys.stdout.write(f"{u} {drafts}: {12 * u - len(wrong)} right, wrong {wrong[:9]}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
