"""The recorded workloads give the published numbers on a pool of blocks, and exact totals.

The totals are those of the research code behind the published tables, which shares nothing with
ours.
"""

from functools import cache

import pytest

from statecache.replay.block_pools import PoolRow, SlotRule, replay_pool, replay_slots
from statecache.replay.prefix_tree import PreorderTree
from support.recorded import PUBLISHED, tree_of

# The research code gives 0.3014 at the 2,048 slots that the table names for this cell, and so do
# we; 0.305 is what about 2,400 slots give. So the rate is not compared; the exact total is, below.
NOT_REPRODUCED = PUBLISHED["not_reproduced"]

SHARED = {  # trace, blocks: blocks hit and missed by state under fifo, duplicates and reuse
    ("agent_coding", 4096): ((332874, 30628), (337182, 31132), (350400, 23449)),
    ("agent_coding", 8192): ((514304, 15471), (520501, 14667), (520081, 14592)),
    ("agent_coding", 16384): ((604404, 5702), (604434, 5672), (602956, 6947)),
    ("conversation", 8192): ((18866, 5234), (19378, 5619), (20204, 5570)),
    ("conversation", 16384): ((30043, 6282), (30756, 6237), (31621, 6146)),
    ("conversation", 32768): ((39928, 6591), (40561, 6512), (40662, 6387)),
}
OWN = [  # trace, blocks, slots, state's blocks: blocks hit, missed by state, states evicted
    ("agent_coding", 4096, 64, 3, 361477, 15959, 17613),
    ("agent_coding", 4096, 64, 1.58, 371759, 14359, 17072),
    ("agent_coding", 4096, 64, 0.83, 371801, 15192, 17137),
    ("agent_coding", 8192, 128, 3, 528969, 9136, 8760),
    ("agent_coding", 8192, 128, 1.58, 531410, 9790, 8707),
    ("agent_coding", 8192, 128, 0.83, 534510, 10553, 8524),
    ("agent_coding", 16384, 1024, 3, 608422, 1541, 2229),
    ("agent_coding", 16384, 1024, 1.58, 608312, 1791, 2635),
    ("agent_coding", 16384, 2048, 0.83, 608613, 1475, 109),
    ("conversation", 8192, 512, 3, 22763, 2002, 2997),
    ("conversation", 8192, 512, 1.58, 24299, 2224, 5141),
    ("conversation", 8192, 512, 0.83, 24945, 2405, 5384),
    ("conversation", 16384, 1024, 3, 34787, 2403, 2935),
    ("conversation", 16384, 1024, 1.58, 36086, 2821, 4884),
    ("conversation", 16384, 1024, 0.83, 36649, 2976, 5121),
    ("conversation", 32768, 2048, 3, 43739, 2994, 2976),
    ("conversation", 32768, 2048, 1.58, 44033, 3033, 4473),
    ("conversation", 32768, 2048, 0.83, 44166, 3091, 4687),
]
BLOCK_POLICIES = ("fifo", "duplicates", "reuse")


@cache
def preorder(trace: str) -> PreorderTree:
    return PreorderTree.of(tree_of(trace))


@cache
def shared(trace: str, blocks: int, block_policy: str) -> PoolRow:
    return replay_pool(tree_of(trace), blocks, block_policy)


@cache
def own(trace: str, blocks: int, slots: int, state_blocks: float) -> PoolRow:
    rule = SlotRule("gds", interior_weight=0.2, queue_ratio=2)
    return replay_slots(preorder(trace), blocks, slots, rule, state_blocks=state_blocks)


@pytest.mark.parametrize(("trace", "blocks", "block_policy", "rate"), PUBLISHED["shared_pool"])
def test_hit_rates_of_one_pool(trace: str, blocks: int, block_policy: str, rate: float) -> None:
    row = shared(trace, blocks, block_policy)
    assert abs(row.hit_tokens / row.prompt_tokens - rate) < 0.003


@pytest.mark.parametrize(
    ("trace", "blocks", "block_policy", "totals"),
    [
        (*key, *pair)
        for key, all_ in SHARED.items()
        for pair in zip(BLOCK_POLICIES, all_, strict=True)
    ],
)
def test_exact_totals_of_one_pool(
    trace: str, blocks: int, block_policy: str, totals: tuple[int, int]
) -> None:
    row = shared(trace, blocks, block_policy)
    assert (row.hit_tokens // 512, row.missed_by_state_tokens // 512) == totals
    assert row.rejected == 0


@pytest.mark.parametrize(
    ("trace", "blocks", "slots", "state_blocks", "rate"),
    [cell for cell in PUBLISHED["own_slots"] if cell not in NOT_REPRODUCED],
)
def test_hit_rates_of_slots_of_their_own(
    trace: str, blocks: int, slots: int, state_blocks: float, rate: float
) -> None:
    row = own(trace, blocks, slots, state_blocks)
    assert abs(row.hit_tokens / row.prompt_tokens - rate) < 0.003


@pytest.mark.parametrize(
    ("trace", "blocks", "slots", "state_blocks", "hit", "missed", "evicted"), OWN
)
def test_exact_totals_of_slots_of_their_own(
    trace: str, blocks: int, slots: int, state_blocks: float, hit: int, missed: int, evicted: int
) -> None:
    row = own(trace, blocks, slots, state_blocks)
    assert (row.hit_tokens // 512, row.missed_by_state_tokens // 512) == (hit, missed)
    assert row.evicted_states == evicted


@pytest.mark.parametrize(
    ("slots", "weight", "rate"),
    [(64, 0.2, 0.8975), (64, 0.05, 0.91), (128, 0.2, 0.9242), (256, 0.05, 0.9316)],
)
def test_interior_weights_with_room_for_all_kv(slots: int, weight: float, rate: float) -> None:
    row = replay_slots(
        preorder("agent_coding"), 10**6, slots, SlotRule(interior_weight=weight), state_blocks=1
    )
    assert round(row.hit_tokens / row.prompt_tokens, 4) == rate


def test_with_room_for_all_kv_slots_of_their_own_are_the_plain_replay() -> None:
    row = replay_slots(preorder("agent_coding"), 10**6, 64, SlotRule(), state_blocks=1)
    assert (row.hit_tokens, row.prompt_tokens) == (229_773_312, 332_637_184)
    assert (row.missed_by_state_tokens, row.evicted_states) == (82_690_048, 14_289)


@pytest.mark.parametrize(
    ("admission", "every", "trace", "blocks", "totals"),
    [
        ("dense+branch-points", 32, "conversation", 32768, (42932, 3474)),
        ("dense+branch-points", 32, "agent_coding", 16384, (607792, 2314)),
        ("dense", 16, "agent_coding", 4096, (319417, 16672)),
        ("ends", 16, "agent_coding", 4096, (328318, 34240)),
    ],
)
def test_exact_totals_of_other_admissions(
    admission: str, every: int, trace: str, blocks: int, totals: tuple[int, int]
) -> None:
    row = replay_pool(tree_of(trace), blocks, "fifo", admission, every_blocks=every)
    assert (row.hit_tokens // 512, row.missed_by_state_tokens // 512) == totals
