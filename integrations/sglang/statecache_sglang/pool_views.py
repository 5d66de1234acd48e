"""What statecache reads of the pools of SGLang 0.5.23, as types. The rest is in `views`.

Slots are int64 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Tensor(Protocol):
    """A tensor of torch, which is there only with an engine."""

    @property
    def device(self) -> object: ...
    def tolist(self) -> list[int]: ...
    def data_ptr(self) -> int: ...
    def unsqueeze(self, dim: int) -> Tensor: ...
    def __len__(self) -> int: ...


class StateTensors(Protocol):
    """The states of running requests: each tensor is `[layers, slots + 1, ...]`."""

    temporal: Tensor
    conv: Sequence[Tensor]


class StatePool(Protocol):
    """The pool of states of running requests."""

    size: int
    mamba_cache: StateTensors
    _slot_siblings: Sequence[object]


class ShortConvStates(Protocol):
    """States of short convolutions, kept by the same slot beside the pool."""

    conv_state: Tensor


class NGramStates(Protocol):
    """The last tokens of each slot, kept beside the pool, too."""

    context: Tensor


class StateAllocator(Protocol):
    """The free slots of that pool."""

    _alloc_iter: Iterator[Tensor] | None

    def available_size(self) -> int: ...
    def schedulable_available_size(self) -> int: ...
    def free(self, slots: Tensor) -> None: ...


class Checkpoints(Protocol):
    """A pool for states at rest: SGLang's own int8 pool, or the plugin's."""

    num_slots: int

    def available_size(self) -> int: ...
    def free(self, slots: Tensor) -> None: ...


class RequestPool(Protocol):
    """The rows of running requests and their states."""

    mamba_pool: StatePool
    mamba_allocator: StateAllocator
    mamba_ckpt_pool: Checkpoints | None
    short_conv_pool: ShortConvStates
    ngram_pool: NGramStates
    mamba_initial_tracking_slots: int


class RequestKv(Protocol):
    """What one request holds outside the prefix cache."""

    mamba_ping_pong_track_buffer: Tensor | None
    mamba_last_track_seqlen: int | None
    mamba_pool_idx: Tensor | None
    mamba_cow_src_index: Tensor | None
    mamba_needs_clear: bool
    kv_committed_len: int
    cache_protected_len: int

    @property
    def holds_kv(self) -> bool: ...
    @property
    def holds_mamba(self) -> bool: ...


class StateShapes(Protocol):
    """The shape of one layer's state of one slot."""

    temporal: tuple[int, ...]
    conv: Sequence[tuple[int, ...]]


class StateTypes(Protocol):
    """The torch types of a state."""

    temporal: object
    conv: object


class StateParameters(Protocol):
    """What a model's recurrent states look like."""

    layers: Sequence[int]
    shape: StateShapes
    dtype: StateTypes

    @property
    def mamba_cache_per_req(self) -> int: ...


class ModelStates(Protocol):
    """The configuration of a model with recurrent states."""

    mamba2_cache_params: StateParameters


class SpeculativeAlgorithm(Protocol):
    """How drafts are made, if any are."""

    def is_none(self) -> bool: ...


class Configurator(Protocol):
    """What divides the memory among the pools."""

    spec_algorithm: SpeculativeAlgorithm

    @property
    def mambaish_config(self) -> ModelStates: ...
    @property
    def extra_mamba_cache_bytes_per_req(self) -> int: ...
    def _calculate_mamba_ratio(self) -> int: ...
