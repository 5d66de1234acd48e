"""Streams of a device on the CPU: what is asked of them is done late, in any order they allow."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from statecache.checkpoint.ops import CheckpointOps


@dataclass(eq=False)
class Job:
    """A moment, and what is done until then on one stream."""

    stream: str
    work: Callable[[], None]
    after: list["Job"]
    done: bool = False


@dataclass
class LateStreams:
    """A `CopyStreams` whose kernels and copies run when `run` picks them, in the order of waits.

    `dropped` names waits that are left out, `STREAM after STREAM` as `"out after compute"`.
    """

    rng: random.Random
    dropped: str = ""
    queues: dict[str, deque[Job]] = field(
        default_factory=lambda: {name: deque() for name in ("compute", "out", "in")}
    )
    held: list[Job] = field(default_factory=list)
    last: Job | None = None
    waits: set[str] = field(default_factory=set)

    def compute(self, work: Callable[[], None]) -> None:
        """Have the current stream do something."""
        held, self.held = self.held, []
        self.last = self._add("compute", work, held)

    def mark(self) -> Job:
        return self.last or Job("compute", lambda: None, [], done=True)

    def hold(self, moments: Sequence[Job]) -> None:
        self.held += moments

    def copy_out(self, copies: Sequence[tuple[Tensor, Tensor]], after: Sequence[Job]) -> Job:
        return self._copy("out", copies, after)

    def copy_in(self, copies: Sequence[tuple[Tensor, Tensor]], after: Sequence[Job]) -> Job:
        return self._copy("in", copies, after)

    def finish_kernels(self) -> None:
        """Do what is to be done until the current stream has nothing left."""
        while self.queues["compute"]:
            self.run(1)

    def run(self, most: int | None = None) -> None:
        """Do some of what is to be done, all of it without a number."""
        while most is None or most > 0:
            able = [
                queue
                for queue in self.queues.values()
                if queue and all(job.done for job in queue[0].after)
            ]
            if not able:
                break
            job = self.rng.choice(able).popleft()
            job.work()
            job.done = True
            most = None if most is None else most - 1
        assert most is not None or not any(self.queues.values()), "streams wait for each other"

    def late(self, ops: CheckpointOps, *, fails: bool = False) -> CheckpointOps:
        """Return the same copies, done by the current stream; each may fail once it is launched."""

        def deferred(copy):
            def launch(*arguments):
                self.compute(lambda: copy(*arguments))
                if fails:
                    raise RuntimeError("planted")

            return launch

        return replace(
            ops, store=deferred(ops.store), load=deferred(ops.load), move=deferred(ops.move)
        )

    def _copy(self, stream: str, copies: Sequence[tuple[Tensor, Tensor]], after) -> Job:
        def work() -> None:
            for target, source in copies:
                target.copy_(source)

        return self._add(stream, work, list(after))

    def _add(self, stream: str, work: Callable[[], None], after: list[Job]) -> Job:
        named = [(f"{stream} after {job.stream}", job) for job in after]
        self.waits.update(name for name, _ in named)
        job = Job(stream, work, [job for name, job in named if name != self.dropped])
        self.queues[stream].append(job)
        return job
