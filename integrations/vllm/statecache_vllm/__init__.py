"""statecache's adapter for vLLM."""

from statecache_vllm.adapter import register

__all__ = ["register"]
