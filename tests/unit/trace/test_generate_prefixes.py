"""Workloads on prefixes: what they repeat, and that the same one has the same bytes."""

import json

from statecache.trace.generate_prefixes import DistinctPrefixes, SharedPrefix, prefix_lines


def test_distinct_prefixes_come_one_after_the_other_with_ends_of_their_own() -> None:
    """Three prefixes of two blocks are blocks 0 to 5; ends are counted from 6 on."""
    workload = DistinctPrefixes(count=3, rounds=2, prefix_tokens=1024, own_tokens=512)
    lines = [json.loads(line) for line in prefix_lines(workload)]
    assert [line["hash_ids"] for line in lines] == [
        *([0, 1, 6], [2, 3, 7], [4, 5, 8]),
        *([0, 1, 9], [2, 3, 10], [4, 5, 11]),
    ]
    assert {line["input_length"] for line in lines} == {3 * 512}
    assert ["seed" in line for line in lines] == [True] + [False] * 5


def test_shared_prefixes_are_drawn_by_seed_and_the_first_far_more_often() -> None:
    """The product of two draws is below a tenth in 33 % of cases, above nine tenths in 0.5 %."""
    made = {
        seed: list(prefix_lines(SharedPrefix(count=100, rounds=20, own_tokens=0, seed=seed)))
        for seed in (0, 1)
    }
    assert made[0] == list(prefix_lines(SharedPrefix(count=100, rounds=20, own_tokens=0)))
    assert made[0] != made[1]
    chosen = [json.loads(line)["hash_ids"][0] // 2 for line in made[0]]
    assert len(chosen) == 2_000
    assert 560 < sum(number < 10 for number in chosen) < 760
    assert sum(number >= 90 for number in chosen) < 40
