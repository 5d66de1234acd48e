"""States that say what they are of: a mark of depth and prefix, written when a state is made."""

from __future__ import annotations

import zlib

import torch
from cache_layer import MAMBA, Traffic


def write_mark(traffic: Traffic, slot: int, tokens, namespace=None) -> None:
    """Let the state in this slot of the running requests be that of `tokens`."""
    states = traffic.requests.mamba_pool.mamba_cache
    states.temporal[:, slot] = len(tokens)
    states.conv[0][:, slot] = _mark(tokens, namespace)


def has_mark(traffic: Traffic, slot: int, tokens, namespace=None) -> bool:
    """Whether the state in this slot is that of `tokens`, within the error of an int8 store."""
    states = traffic.requests.mamba_pool.mamba_cache
    depth = len(tokens)
    near = (states.temporal[:, slot].float() - depth).abs() <= depth / 127
    same = states.conv[0][:, slot] == _mark(tokens, namespace)
    return bool(near.all()) and bool(same.all())


def _mark(tokens, namespace) -> torch.Tensor:
    """Three numbers that bfloat16 holds exactly."""
    of = zlib.crc32(repr((list(map(int, tokens)), sorted((namespace or {}).items()))).encode())
    return torch.tensor([len(tokens) % 251, of % 251, of // 251 % 251], dtype=torch.bfloat16)


class Marked(Traffic):
    """Marks each state it caches; every match must end at the state of its own prefix."""

    compared = 0

    def insert(self, tokens, values, slot, hit, **namespace):
        checkpoints = self.requests.mamba_ckpt_pool
        if checkpoints is None:
            write_mark(self, int(slot), tokens, namespace)
        else:
            running = self.requests.mamba_allocator.alloc(1)
            write_mark(self, int(running), tokens, namespace)
            checkpoints.store_from_active(None, running, slot)
            self.requests.mamba_allocator.free(running)
        return super().insert(tokens, values, slot, hit, **namespace)

    def match(self, tokens, **namespace):
        found = super().match(tokens, **namespace)
        if not found.host_hit_length and not found.mamba_host_hit_length:
            self.compare(found.best_match_node, tokens, found.device_prefix_len, namespace)
        return found

    def start(self, tokens, **namespace):
        hit, lock = super().start(tokens, **namespace)
        self.compare(lock[0], tokens, hit, namespace)
        return hit, lock

    def compare(self, node, tokens, hit: int, namespace) -> None:
        """A hit of so many tokens is the depth of this node, and its state says the same."""
        assert hit <= len(tokens)
        assert len(self.cache.path_device_indices(node)) == hit
        if hit:
            self.compared += 1
            state = self.core.get_component_device_value(node, MAMBA)
            assert state is not None
            assert int(state) in self.state_slots()
            assert self.holds(state, tokens[:hit], namespace)

    def holds(self, state, tokens, namespace) -> bool:
        """Whether this slot of the cache holds the state of `tokens`."""
        checkpoints = self.requests.mamba_ckpt_pool
        if checkpoints is None:
            return has_mark(self, int(state), tokens, namespace)
        running = self.requests.mamba_allocator.alloc(1)
        checkpoints.load_to_active(None, state, running)
        self.requests.mamba_allocator.free(running)
        return has_mark(self, int(running), tokens, namespace)
