"""Importing it, after torch, registers the operators `statecache::checkpoint_*`."""

with_cuda: int
