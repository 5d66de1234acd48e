"""Agent sessions on a scheduler without a model, at one amount of memory in all.

.venv-engines/bin/python tests/engines/vllm/sessions.py    # prints the table of the README
.venv-engines/bin/python tests/engines/vllm/sessions.py --drafted    # that of docs/vllm.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from drafted import DraftedWorker
from scheduled import Drafter, Run

from statecache.trace.generate_agent import AgentWorkload, agent_lines

BLOCK = 16
# Pages a state takes: one in each of three groups; in int8 (from fp32) 0.90 of a page in all.
NATIVE, INT8 = 3.0, 0.9
# One block here stands for 512 tokens, so this for 8,192.
INTERVAL = 16 * BLOCK
SEEDS = 12


@cache
def block_tokens(number: int) -> tuple[int, ...]:
    """The tokens of a block of the workload, different for each number."""
    return tuple(3 + (number // 297 ** (at % 3) + at) % 297 for at in range(BLOCK))


def prompts(sessions: int, turns: int, seed: int) -> Iterator[list[int]]:
    """Coding agents as `statecache generate agent` makes them, scaled down to 16-token blocks."""
    for line in agent_lines(AgentWorkload(sessions=sessions, turns=turns, seed=seed)):
        yield [token for block in json.loads(line)["hash_ids"] for token in block_tokens(block)]


class Way:
    """A way to use `pages` pages of memory: settings of the plugin, and slots beside the blocks."""

    def __init__(
        self,
        plugin: dict[str, Any] | None = None,
        mode: str = "",
        share: float = 0,
        policy: str = "learned",
        host_slots: int = 0,
    ):
        self._plugin, self._mode, self._share, self._policy = plugin, mode, share, policy
        self._host_slots = host_slots

    def reused(
        self,
        model: Path,
        pages: int,
        sessions: int,
        turns: int,
        seed: int,
        drafter: Drafter | None = None,
    ) -> float:
        """Share of prompt tokens served from the cache."""
        plugin, blocks = self._plugin, pages
        if self._mode:
            pages_a_state = INT8 if self._mode == "int8" else NATIVE
            slots = self._host_slots or int(self._share * pages / pages_a_state)
            plugin = {"checkpoints": self._mode, "policy": self._policy}
            plugin |= {"checkpoint_slots": slots, "checkpoint_interval": INTERVAL}
            if self._host_slots:
                plugin["checkpoint_memory"] = "host"
            else:
                blocks = pages - int(slots * pages_a_state)
        shape = {"block": BLOCK, "budget": INTERVAL, "requests": 4}
        run = Run(model, blocks=blocks, plugin=plugin, drafter=drafter, **shape)
        if drafter is not None:
            run.step = DraftedWorker(run, drafter.tokens, 0.6).step
        hit = total = 0
        for prompt in prompts(sessions, turns, seed):
            hit += run.ask(prompt)
            total += len(prompt)
        run.check()
        return hit / total


# The shares are the default of the plugin, a tenth, and a fifth.
WAYS = {
    "vLLM": Way(),
    "stock": Way({"block_policy": "stock"}),
    "reuse": Way({}),
    "native 10 %": Way(mode="native", share=0.1),
    "native 20 %": Way(mode="native", share=0.2),
    "int8 10 %": Way(mode="int8", share=0.1),
    "int8 20 %": Way(mode="int8", share=0.2),
    "host, 256 states": Way(mode="int8", host_slots=256),
    "host, 1,024 states": Way(mode="int8", host_slots=1024),
    "host, all states": Way(mode="int8", host_slots=100_000),
}


DRAFTED = {
    "vLLM": Way(),
    "reuse": Way({}),
    **{
        f"{mode} 20 %, {policy}": Way(mode=mode, share=0.2, policy=policy)
        for mode in ("native", "int8")
        for policy in ("lru", "gds", "learned")
    },
}


def print_drafted(model: Path, seeds: int = 1) -> None:
    """Print what is reused without a drafter, with ngram, and with MTP, by policy."""
    out = sys.stdout
    out.write("| pages | | no drafter | ngram | MTP |\n|---:|---|---:|---:|---:|\n")
    for pages in (1024, 2048):
        for name, way in DRAFTED.items():
            cells = []
            for drafter in (None, Drafter("ngram", 2), Drafter("mtp", 2)):
                found = [way.reused(model, pages, 24, 20, seed, drafter) for seed in range(seeds)]
                cells.append(f"{sum(found) / seeds:.3f}")
            out.write(f"| {pages:,} | {name} | " + " | ".join(cells) + " |\n")
            out.flush()


def main() -> None:
    """Print the table: mean of the seeds, lowest and highest difference to vLLM in points."""
    sys.path.append(str(Path(__file__).parents[2]))  # of tests/support
    from tiny_models import make_tiny_model

    from support.mtp_head import add_drafter

    with tempfile.TemporaryDirectory() as folder:
        model = add_drafter(make_tiny_model("qwen3_next", Path(folder)))
        if "--drafted" in sys.argv:
            print_drafted(model)
            return
        out = sys.stdout
        out.write("| sessions | pages | " + " | ".join(WAYS) + " |\n")
        out.write("|---:|---:|" + "---:|" * len(WAYS) + "\n")
        for sessions in (24, 48):
            for pages in (1024, 2048, 3072):
                cells = []
                alone: list[float] = []
                for way in WAYS.values():
                    found = [way.reused(model, pages, sessions, 20, seed) for seed in range(SEEDS)]
                    alone = alone or found
                    gains = [100 * (a - b) for a, b in zip(found, alone, strict=True)]
                    mean = sum(found) / SEEDS
                    cells.append(f"{mean:.3f} ({min(gains):+.1f} to {max(gains):+.1f})")
                out.write(f"| {sessions} | {pages:,} | " + " | ".join(cells) + " |\n")
                out.flush()


if __name__ == "__main__":
    main()
