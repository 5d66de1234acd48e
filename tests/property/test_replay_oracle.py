"""The replay equals the plain one, total by total, on any small workload."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.replay_oracle import oracle
from support.replay_support import replay_prompts

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40)


@st.composite
def growing_prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that go on from a cut of an earlier one: sessions, rewinds, repeats."""
    prompts: list[list[int]] = [[0]]
    for fresh in range(1, draw(st.integers(1, 40))):
        base = prompts[draw(st.integers(0, len(prompts) - 1))]
        kept = draw(st.integers(0, len(base)))
        added = draw(st.integers(0 if kept else 1, 6))
        prompts.append(base[:kept] + [100 * fresh + i for i in range(added)])
    return prompts


def test_every_total_equals_the_plain_replay(share: float) -> None:
    @settings(
        max_examples=int(600 * share),
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        prompts=PROMPTS | growing_prompts(),
        policy=st.sampled_from(["lru", "gds"]),
        slots=st.integers(1, 8),
        admission=st.sampled_from(["dense", "ends"]),
        chunk_blocks=st.integers(1, 4),
        kv_blocks=st.none() | st.integers(1, 24),
    )
    def equal(
        prompts: list[list[int]],
        policy: str,
        slots: int,
        admission: str,
        chunk_blocks: int,
        kv_blocks: int | None,
    ) -> None:
        expected = oracle(prompts, policy, slots, admission, chunk_blocks, kv_blocks)
        row = replay_prompts(prompts, policy, slots, admission, chunk_blocks, kv_blocks)
        for name, value in vars(expected).items():
            assert getattr(row, name) == value, name
        assert (row.policy, row.slots, row.admission) == (policy, slots, admission)

    equal()
