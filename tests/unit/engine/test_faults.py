"""Where an error of the plugin stops, what is counted and logged of it, and what answers then."""

import inspect
import logging

import pytest

from statecache.engine.faults import FaultBarrier, advisory, guarded

LOG = logging.getLogger("statecache.test")


class Queue:
    """Its owner: what fails is handed over once."""

    def __init__(self, barrier: FaultBarrier | None = None) -> None:
        self.faults = barrier or FaultBarrier(LOG, "the engine goes on by itself")
        self.handed_over: list[tuple[object, ...]] = []

    def hand_over(self, *arguments: object) -> str:
        """The engine's own answer."""
        self.handed_over.append(arguments)
        return "own"

    def broken_hand_over(self, *_: object) -> str:
        raise LookupError("nothing to hand over to")

    @guarded(hand_over)
    def pop(self, count: int, names: str = "") -> str:
        """Answer, or fail for a count below one."""
        if count < 1:
            raise KeyError(names)
        return names * count

    @guarded(broken_hand_over)
    def push(self) -> str:
        raise KeyError("planted")

    @guarded(hand_over)
    def pop_two(self, first: int, second: int) -> str:
        return self.pop(first, "a") + self.pop(second, "b")

    @guarded(hand_over)
    def leave(self) -> str:
        raise SystemExit(2)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_without_an_error_the_method_answers(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()
    assert queue.pop(2, "ab") == "abab"
    assert (queue.faults.anomalies, queue.handed_over, lines(caplog)) == (0, [], [])


def test_an_error_is_counted_logged_once_with_its_traceback_and_handed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Queue()
    assert [queue.pop(0, "ab"), queue.pop(-1, "c")] == ["own", "own"]
    assert queue.handed_over == [(0, "ab"), (-1, "c")]
    assert queue.faults.anomalies == 2
    assert lines(caplog) == ["statecache: an unexpected error; the engine goes on by itself"]
    assert "KeyError: 'ab'" in (caplog.records[0].exc_text or "")


def test_inside_another_guarded_method_the_inner_one_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The outer method goes on with what was handed over: one anomaly."""
    queue = Queue()
    assert queue.pop_two(1, 0) == "aown"
    assert queue.handed_over == [(0, "b")]
    assert (queue.faults.anomalies, len(lines(caplog))) == (1, 1)


def test_what_the_hand_over_raises_is_raised_without_the_error_around_it() -> None:
    queue = Queue()
    with pytest.raises(LookupError) as caught:
        queue.push()
    assert caught.value.__context__ is None
    assert queue.faults.anomalies == 1


def test_the_end_of_a_process_passes() -> None:
    queue = Queue()
    with pytest.raises(SystemExit):
        queue.leave()
    assert queue.faults.anomalies == 0


def test_a_guarded_method_keeps_its_name_and_its_text() -> None:
    assert Queue.pop.__name__ == "pop"
    assert Queue.pop.__qualname__ == "Queue.pop"
    assert (Queue.pop.__doc__ or "").startswith("Answer")
    assert list(inspect.signature(Queue.pop).parameters) == ["self", "count", "names"]


def test_what_is_wrapped_without_an_owner_behaves_alike(caplog: pytest.LogCaptureFixture) -> None:
    barrier = FaultBarrier(LOG, "the engine goes on by itself")
    given: list[int] = []
    pop = barrier.wrap(given.pop, lambda *_: -1)
    assert pop() == -1
    given += [1, 2, 3]
    assert [pop(0), pop()] == [1, 3]
    assert (barrier.anomalies, pop.__name__) == (1, "pop")
    assert lines(caplog) == ["statecache: an unexpected error; the engine goes on by itself"]


class Component:
    """Its owner may have no barrier."""

    def __init__(self, faults: FaultBarrier | None) -> None:
        self.faults = faults
        self.calls = 0

    @advisory
    def use(self, state: int, *, twice: bool = False) -> int:
        """Return the state, or fail for a negative one."""
        self.calls += 1
        if state < 0:
            raise ValueError(state)
        return 2 * state if twice else state

    @advisory
    def outer(self, state: int) -> str:
        return f"inner said {self.use(state)}"


def advice() -> FaultBarrier:
    return FaultBarrier(LOG, "the engine's own order takes over", "the state index failed")


def test_advice_is_given_until_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    barrier = advice()
    component, other = Component(barrier), Component(barrier)
    assert component.use(3, twice=True) == 6
    assert component.use(-1) is None
    assert [component.use(4), other.use(4)] == [None, None]
    assert (component.calls, other.calls) == (2, 0)
    assert (barrier.active, barrier.anomalies) == (False, 1)
    assert lines(caplog) == [
        "statecache: the state index failed; the engine's own order takes over"
    ]
    assert "ValueError: -1" in (caplog.records[0].exc_text or "")


def test_advice_is_asked_again_after_a_new_start() -> None:
    barrier = advice()
    component = Component(barrier)
    component.use(-1)
    barrier.active = True
    assert component.use(5) == 5
    component.use(-1)
    assert barrier.anomalies == 2


def test_advice_inside_advice_fails_once() -> None:
    component = Component(advice())
    assert component.outer(-1) == "inner said None"
    assert component.faults is not None
    assert component.faults.anomalies == 1
    assert component.outer(1) is None


def test_without_a_barrier_there_is_no_advice() -> None:
    component = Component(None)
    assert component.use(1) is None
    assert component.calls == 0


def test_a_call_of_another_object_is_asked_the_same_way() -> None:
    barrier = advice()
    assert barrier.ask(divmod, 7, 2) == (3, 1)
    assert barrier.ask(divmod, 7, 0) is None
    assert barrier.ask(divmod, 7, 2) is None
    assert barrier.anomalies == 1


def test_who_gives_up_says_why_and_what_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    barrier = advice()
    barrier.give_up("the pools disagree")
    assert not barrier.active
    assert lines(caplog) == ["statecache: the pools disagree; the engine's own order takes over"]


def test_what_the_plugin_survives_does_not_say_that_the_engine_takes_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    barrier = advice()
    barrier.count("the walk did not take state 4", takes_over=False)
    barrier.count("again", takes_over=False)
    assert (barrier.active, barrier.anomalies) == (True, 2)
    assert lines(caplog) == ["statecache: the walk did not take state 4"]
