"""How deep a prompt of n tokens hits when it is asked again, in closed form (vllm#52244).

Blocks of u tokens; the last token of a prompt is always computed. Without a drafter a repeat
resumes after floor((n - 1) / u) blocks, with one that reads hidden states a block earlier. vLLM
0.32 is one block better than that form where a prompt is whole blocks.
"""

import random
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_models
from drafted import DraftedWorker
from scheduled import Drafter, Run, without_states, words

SLOTS = {"checkpoints": "native", "checkpoint_slots": 4}
MTP, NGRAM = Drafter("mtp", 2), Drafter("ngram", 2)


def form(n, u, drafter, *, looks_ahead=False):
    """In tokens, as vLLM 0.32 itself does it; never below the published form.

    Where vLLM hashes the tokens ahead, from 0.33 on and without a connector, nothing is dropped.
    """
    if drafter != MTP or looks_ahead:
        return (n - 1) // u * u
    published = max((n - 1 - u) // u * u, 0)
    found = max(n // u * u - u, 0)
    assert found == published or n % u == 0
    return found


class Repeats:
    """Asks prompts that have nothing in common twice each, and again when their states are gone."""

    def __init__(self, model, u, plugin, drafter, budget=8192):
        self.run = Run(
            model, blocks=200, block=u, plugin=plugin, drafter=drafter, length=8192, budget=budget
        )
        self.run.step = DraftedWorker(self.run, drafter.tokens if drafter else 0, 0.5).step
        self._rng, self._restores = random.Random(u), plugin == SLOTS

    def hits(self, n):
        prompt = words(self._rng, n)
        assert self.run.ask(prompt) == 0
        first = self.run.ask(prompt)
        if not self._restores:
            return first, first
        without_states(self.run)
        return first, self.run.ask(prompt)


def lengths(u, share):
    """Every length up to 12 blocks of few tokens; around the ends of blocks for others."""
    if u == 16:
        return range(1, 12 * u + 1)
    ends = range(0, 12 * u + 1, u if share == 1 else 4 * u)
    return sorted({n for end in ends for n in (end - 1, end, end + 1, end + u // 2)} - {-1, 0})


@pytest.mark.parametrize("drafter", [None, MTP, NGRAM], ids=["no drafter", "mtp", "ngram"])
@pytest.mark.parametrize("u", [16, 64, 528])
def test_a_repeat_hits_as_deep_as_the_form_says_and_as_vllm_does(drafting, u, drafter, share):
    alone = Repeats(drafting, u, None, drafter)
    ours = Repeats(drafting, u, SLOTS, drafter)
    arms = [alone] if drafter != MTP else [alone, Repeats(drafting, u, {}, drafter)]
    looks_ahead = getattr(alone.run.config, "num_hash_lookahead_tokens", 0) > 0
    restored = 0
    for n in lengths(u, share):
        vllms = form(n, u, drafter, looks_ahead=looks_ahead)
        for arm in arms:
            assert arm.hits(n) == (vllms, vllms), n
        expected = form(n, u, drafter)
        assert ours.hits(n) == (expected, expected), n
        restored += expected > 0
    assert ours.run.scheduler_side.checkpoints.counts.restored == restored


def main() -> None:
    """Every length up to 12 blocks of each size: prints how many were as the form says."""
    sys.path.append(str(Path(__file__).parents[2]))  # of tests/support
    from support.mtp_head import add_drafter

    with tempfile.TemporaryDirectory() as folder:
        made = add_drafter(tiny_models.make_tiny_model("qwen3_next", Path(folder)))
        for u in (16, 64, 528):
            for drafter in (None, MTP, NGRAM):
                ours = Repeats(made, u, SLOTS, drafter)
                wrong = [
                    n for n in range(1, 12 * u + 1) if ours.hits(n) != (form(n, u, drafter),) * 2
                ]
                sys.stdout.write(f"{u} {drafter}: {12 * u - len(wrong)} right, wrong {wrong[:9]}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
