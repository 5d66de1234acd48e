"""Workloads that users of hybrid models report, with what is right, worked by hand.

Lengths are in blocks of 512 tokens. States are set at the ends of prompts, or also every `chunk`
blocks (dense); KV stays resident, so what is not hit is missed for want of a state alone.
"""

from collections.abc import Sequence
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


@pytest.mark.parametrize("chunk", [None, 16])
def test_lru_loses_the_long_session(chunk: int | None) -> None:
    """B's eleven newest ends alone are more than the eight slots."""
    prompts = Prompts()
    prompts.ask("A", 228)
    for turn in range(11):
        prompts.ask("B", 40 + 3 * turn)
    back = prompts.ask("A", 230)
    assert prompts.hits("lru", 8, chunk)[back] == 0


def two_long_sessions(policy: str) -> dict[str, list[int]]:
    """Return what each session hits in each of its rounds, with eight slots."""
    prompts = Prompts()
    asked: dict[str, list[int]] = {"F1": [], "F2": [], "MAIN": []}
    for turn in range(12):
        for stream, blocks in (("F1", 384 + turn), ("F2", 384 + turn), ("MAIN", 76 + 7 * turn)):
            asked[stream].append(prompts.ask(stream, blocks))
        prompts.fork(f"SIDE {turn}", "MAIN", 1)
        prompts.ask(f"SIDE {turn}", 84)
    hits = prompts.hits(policy, 8, 16)
    return {stream: [hits[number] for number in numbers] for stream, numbers in asked.items()}


def test_two_long_sessions_stay_warm_beside_one_that_grows_and_a_side_query() -> None:
    """Three ends are resumed each round, the side query never: eight slots are enough for learned.

    F1 and F2 have 384 blocks and one more each round, MAIN 76 and 7 more; the side query has 84, of
    which it shares one with MAIN and none but that with the side query before.
    """
    hits = two_long_sessions("learned")
    # Each return resumes at the last chunk end of 16 blocks before it, or later.
    for stream, first, step in (("F1", 384, 1), ("F2", 384, 1), ("MAIN", 76, 7)):
        for turn in range(1, 12):
            before = first + step * (turn - 1)
            assert hits[stream][turn] >= before // 16 * 16, (stream, turn)


def test_lru_finds_none_of_the_sessions_again() -> None:
    """Each is computed in chunks of 16 blocks: F1 and F2 leave 25 states each, eight stay.

    MAIN and the side query leave at least twelve between F2 and F1, so nothing is left of either.
    """
    assert two_long_sessions("lru") == {stream: [0] * 12 for stream in ("F1", "F2", "MAIN")}


def rewound(depth: int) -> tuple[Prompts, int]:
    """A session of 150 turns of a block, and which request goes on from so many of them."""
    prompts = Prompts()
    for turn in range(1, 151):
        prompts.ask("A", turn)
    prompts.fork("B", "A", depth)
    return prompts, prompts.ask("B", depth + 1)


@pytest.mark.parametrize("slots", [8, 32])
def test_a_rewind_computes_half_of_its_depth_again_at_most(slots: int) -> None:
    """One session of 150 turns of a block, a state every 4, then back to a depth of 4 or more.

    States that stay: the first in each doubling from 4 on, 4, 8, 16, 32, 64 and 128, and with 8
    slots the tip and the one before it. So a rewind to r resumes at r / 2 or later.
    """
    for depth in range(4, 150, 5):
        prompts, back = rewound(depth)
        assert prompts.hits("learned", slots, 4)[back] >= depth / 2, depth


@pytest.mark.parametrize(("slots", "newest"), [(8, 143), (32, 119)])
def test_lru_computes_a_rewind_again_unless_it_is_short(slots: int, newest: int) -> None:
    """The states of the latest turns are there, one a slot, and no other."""
    for depth in range(4, 150, 5):
        prompts, back = rewound(depth)
        right = depth if depth >= newest else 0
        assert prompts.hits("lru", slots, 4)[back] == right, depth


@pytest.mark.parametrize(
    ("policy", "slots", "warm"),
    [
        ("learned", 72, range(8)),
        ("gds", 72, [0]),
        ("lru", 72, [7]),
        ("learned", 80, range(8)),
        ("gds", 80, range(8)),
        ("lru", 80, range(8)),
    ],
)
def test_hot_prompts_outlive_a_flood_of_prompts_asked_once(
    policy: str, slots: int, warm: Sequence[int]
) -> None:
    """Eight heads of 24 blocks are asked about twice, 64 documents of 28 once, then the heads.

    There are 80 ends. With 72 slots eight go, and one more for each head that is cached anew. Each
    head was resumed from once, no document ever.

    - lru: the ends of the heads are the oldest, two of each. Four heads go first, and two more ends
      with each head that is computed again: seven times one, so one end of the last head is left.
    - gds: the ends of 25 blocks, one block beyond another end, are the cheapest and go first. Then
      the first head resumes; its new end takes the slot of the second head, and so on.
    """
    prompts = Prompts()
    for turn in range(2):
        for head in range(8):
            prompts.ask(f"head {head}", 24 + turn)
    for document in range(64):
        prompts.ask(f"document {document}", 28)
    again = [prompts.ask(f"head {head}", 26) for head in range(8)]
    hits = prompts.hits(policy, slots)
    assert [head for head, number in enumerate(again) if hits[number] >= 24] == list(warm)


@pytest.mark.parametrize("slots", [12, 24])
@pytest.mark.parametrize(("policy", "warm"), [("learned", 8), ("gds", 0), ("lru", 0)])
def test_hot_prompts_outlive_one_off_prompts_that_go_on_coming(
    policy: str, warm: int, slots: int
) -> None:
    """Eight heads of 24 blocks grow by one a round, with eight new documents of 28 behind each.

    In the first rounds nothing tells a document from a head: both are ends that nobody has resumed
    from, and the document is the dearer one. From the third round on learned has seen which of them
    come back. Between two turns of a head there are 64 documents, more than there are slots: all of
    them newer, for lru, and dearer as well, for gds, which keeps a document before any older head.
    """
    prompts = Prompts()
    heads = []
    for turn in range(5):
        for head in range(8):
            heads.append(prompts.ask(f"head {head}", 24 + turn))
            for document in range(8):
                prompts.ask(f"document {turn} {head} {document}", 28)
    hits = prompts.hits(policy, slots)
    assert sum(hits[number] >= 24 for number in heads[-8:]) == warm


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


def test_lru_keeps_a_session_beside_a_single_sub_agent_alone() -> None:
    """Of two slots two or three sub-agents leave none: a turn is warm behind a single one."""
    prompts = Prompts()
    mains = []
    for turn in range(40):
        mains.append(prompts.ask("MAIN", 56 + 2 * turn))
        for agent in range(1 + turn % 3):
            prompts.ask(f"agent {turn} {agent}", 13)
    hits = prompts.hits("lru", 2)
    warm = [turn for turn in range(1, 40) if hits[mains[turn]]]
    assert warm == list(range(1, 40, 3))
