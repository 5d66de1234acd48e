"""The order `gds`, for comparison: states by what rebuilding costs, KV by last use.

In one pool of equal blocks this gains little over plain LRU (a state is worth what its KV is worth,
and both are freed together), which is why `reuse` is the default. A state is one block in each
recurrent group: they are evicted together, since one without the others serves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from statecache import StateIndex, _blocks
from statecache.engine.settings import Settings
from statecache_vllm.state_tree import Hash, StateTree

__all__ = ["GdsQueue"]


class GdsQueue(_blocks.GdsQueue):
    """The native queue, and the tree of states it evicts from."""

    def __init__(
        self,
        cached: _blocks.BlockHashIndex,
        settings: Settings,
        block_tokens: int,
        endings: Sequence[bytes],
    ) -> None:
        self.tree = StateTree(settings, block_tokens)
        index = self.tree.index
        if not isinstance(index, StateIndex):
            raise TypeError(f"the policy {settings.policy} is for a checkpoint pool")
        super().__init__(cached, index, list(endings))

    def set_at(self, path: Sequence[Hash]) -> None:
        """A state was set at the end of `path`; a request still holds it."""
        for gone in self.take_gone():
            self.tree.dropped(gone)
        known = self.tree.find(path[-1])
        state = self.tree.put(path)
        if known is None:
            self.committed(state, path[-1])
