"""statecache's adapter for vLLM. Importing it imports neither vLLM nor statecache."""

from statecache_vllm.adapter import register

__all__ = ["register"]
