"""The states of SGLang's tree as the index sees them: spare ones, worked by hand."""

import pytest

from statecache.engine.settings import Settings
from statecache_sglang.state_registry import StateRegistry


@pytest.fixture
def registry() -> StateRegistry:
    """A path of states 1 to 4 at 10 to 40; 2 and 3 are spare."""
    settings = Settings.from_given({"kv_cache_plugin": "statecache", "policy": "gds"}, {})
    made = StateRegistry(settings, lambda _node, _states: [], 8)
    for state in range(1, 5):
        above = range(state - 1, 0, -1)
        made.put(state, 10 * state, above, is_leaf=True, spare=state in (2, 3))
    return made


def free(_state: int) -> bool:
    return False


def walk(registry: StateRegistry, locked: tuple[int, ...] = ()) -> list[int]:
    """Every proposal of one walk, none of which is acted on."""
    registry.begin_walk()
    found = []
    while (state := registry.next_victim(locked.__contains__)) is not None:
        found.append(state)
    registry.end_walk()
    return found


def test_spare_states_go_first_and_the_oldest_of_them(registry: StateRegistry) -> None:
    assert walk(registry) == [2, 3, 1, 4]
    assert walk(registry) == [2, 3, 1, 4]  # nothing was acted on
    assert walk(registry, locked=(2, 1)) == [3, 4]
    registry.check()


def test_one_that_was_resumed_from_counts_as_any_other(registry: StateRegistry) -> None:
    registry.resumed(2)
    assert walk(registry) == [3, 1, 2, 4]
    registry.on_prompt([], b"", 3, [])
    assert walk(registry) == [1, 2, 3, 4]


def test_one_that_ends_a_prompt_later_is_not_spare(registry: StateRegistry) -> None:
    registry.put(3, 30, [2, 1], is_leaf=False)
    assert walk(registry)[0] == 2
    registry.put(3, 30, [2, 1], is_leaf=False, spare=True)
    assert walk(registry)[0] == 2
    assert walk(registry, locked=(2,)) == [1, 3, 4]  # the deeper, the dearer ten tokens are


def test_a_spare_one_that_went_ages_nothing(registry: StateRegistry) -> None:
    """Its gain is no watermark: what is used next is not ranked above what was used before."""
    before = registry.watermark
    registry.begin_walk()
    for state in (2, 3):
        assert registry.next_victim(free) == state
        registry.drop(state)
    registry.end_walk()
    assert registry.watermark == before
    assert registry.counts.numbers["evictions|policy"] == 2
    assert not registry.has_spare(free)
    registry.check()


def test_whether_there_is_one_that_can_go(registry: StateRegistry) -> None:
    assert registry.has_spare(free)
    assert registry.has_spare((2,).__contains__)
    assert not registry.has_spare((2, 3).__contains__)


def test_one_on_the_host_alone_is_not_spare(registry: StateRegistry) -> None:
    registry.move_to_host(2, 20)
    assert walk(registry) == [3, 1, 4]
    registry.put(2, 20, [1], is_leaf=False)
    assert walk(registry)[0] == 3
    registry.check()
