"""vLLM's cache layer without a server, for `statecache ab` and benchmarks."""
