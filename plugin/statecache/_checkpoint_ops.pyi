"""Importing it, after torch, registers the operators `statecache::checkpoint_*`."""

with_cuda: int
cuda_architectures: str
cpu_instructions: str
