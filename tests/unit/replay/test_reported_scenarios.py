"""Workloads that users of hybrid models report, with what is right, worked by hand.

Lengths are in blocks of 512 tokens. States are set at the ends of prompts, or also every `chunk`
blocks (dense); KV stays resident, so what is not hit is missed for want of a state alone.
"""

from itertools import count

import pytest

from statecache import CostModel
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import serve
from support.replay_support import trace_of

BLOCK = 512


class Prompts:
    """Prompts in the order they are asked; the first n blocks of a stream are always the same."""

    def __init__(self) -> None:
        self._asked: list[list[int]] = []
        self._streams: dict[str, list[int]] = {}
        self._fresh = count(1)

    def ask(self, stream: str, blocks: int) -> int:
        """Ask for the first `blocks` of a stream; return the number of the request."""
        known = self._streams.setdefault(stream, [])
        known += [next(self._fresh) for _ in range(blocks - len(known))]
        self._asked.append(known[:blocks])
        return len(self._asked) - 1

    def fork(self, stream: str, source: str, blocks: int) -> None:
        """Begin a stream with the first `blocks` of another one."""
        self._streams[stream] = self._streams[source][:blocks]

    def hits(self, policy: str, slots: int, chunk: int | None = None) -> list[int]:
        """Return the blocks that each request hits, with states at ends alone or dense."""
        tree = PrefixTree.of(trace_of(self._asked))
        admission = "ends" if chunk is None else "dense"
        schedule = make_schedule(tree, kv_timeline(tree, None), admission, BLOCK * (chunk or 16))
        return [hit // BLOCK for hit in serve(schedule, policy, slots, CostModel())[0]]


@pytest.mark.parametrize("turns", [10, 30])
@pytest.mark.parametrize(("policy", "chunk"), [("gds", None), ("learned", None), ("learned", 16)])
def test_a_long_session_returns_after_another_one_has_grown(
    policy: str, chunk: int | None, turns: int
) -> None:
    """A ends at 228 blocks; B takes turns of 3 from 40 on; A returns and resumes where it ended.

    Eight slots are enough for A's end beside the newest ends of B, and A's end is by far the
    dearest to compute again.
    """
    prompts = Prompts()
    prompts.ask("A", 228)
    for turn in range(turns + 1):
        prompts.ask("B", 40 + 3 * turn)
    back = prompts.ask("A", 230)
    assert prompts.hits(policy, 8, chunk)[back] == 228


def test_two_long_sessions_stay_warm_beside_one_that_grows_and_a_side_query() -> None:
    """Three ends are resumed each round, the side query never: eight slots are enough for learned.

    F1 and F2 have 384 blocks and one more each round, MAIN 76 and 7 more; the side query has 84, of
    which it shares one with MAIN and none but that with the side query before.
    """
    prompts = Prompts()
    asked: dict[str, list[int]] = {"F1": [], "F2": [], "MAIN": []}
    for turn in range(12):
        for stream, blocks in (("F1", 384 + turn), ("F2", 384 + turn), ("MAIN", 76 + 7 * turn)):
            asked[stream].append(prompts.ask(stream, blocks))
        prompts.fork(f"SIDE {turn}", "MAIN", 1)
        prompts.ask(f"SIDE {turn}", 84)
    hits = prompts.hits("learned", 8, 16)
    # Each return resumes at the last chunk end of 16 blocks before it, or later.
    for stream, first, step in (("F1", 384, 1), ("F2", 384, 1), ("MAIN", 76, 7)):
        for turn in range(1, 12):
            before = first + step * (turn - 1)
            assert hits[asked[stream][turn]] >= before // 16 * 16, (stream, turn)


@pytest.mark.parametrize("slots", [8, 32])
def test_a_rewind_computes_half_of_its_depth_again_at_most(slots: int) -> None:
    """One session of 150 turns of a block, a state every 4, then back to a depth of 4 or more.

    States that stay: the first in each doubling from 4 on, 4, 8, 16, 32, 64 and 128, and with 8
    slots the tip and the one before it. So a rewind to r resumes at r / 2 or later.
    """
    for depth in range(4, 150, 5):
        prompts = Prompts()
        for turn in range(1, 151):
            prompts.ask("A", turn)
        prompts.fork("B", "A", depth)
        back = prompts.ask("B", depth + 1)
        assert prompts.hits("learned", slots, 4)[back] >= depth / 2, depth


def test_hot_prompts_outlive_a_flood_of_prompts_asked_once() -> None:
    """Eight heads of 24 blocks are asked about twice, 64 documents of 28 once, then the heads.

    There are 72 slots for 80 ends. Each head was resumed from once, no document ever.
    """
    prompts = Prompts()
    for turn in range(2):
        for head in range(8):
            prompts.ask(f"head {head}", 24 + turn)
    for document in range(64):
        prompts.ask(f"document {document}", 28)
    again = [prompts.ask(f"head {head}", 26) for head in range(8)]
    hits = prompts.hits("learned", 72)
    assert all(hits[number] >= 24 for number in again)


@pytest.mark.parametrize("policy", ["gds", "learned"])
def test_a_session_stays_warm_between_its_sub_agents(policy: str) -> None:
    """MAIN has 56 blocks and two more each turn; 1 to 3 sub-agents of 13 blocks come between.

    There are two slots. The longer one is the dearer, and it is resumed: of 40 mains two at most
    are cold.
    """
    prompts = Prompts()
    mains = []
    for turn in range(40):
        mains.append(prompts.ask("MAIN", 56 + 2 * turn))
        for agent in range(1 + turn % 3):
            prompts.ask(f"agent {turn} {agent}", 13)
    hits = prompts.hits(policy, 2)
    assert sum(hits[number] == 0 for number in mains[1:]) <= 2
