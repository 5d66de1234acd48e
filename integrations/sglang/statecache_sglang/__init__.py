"""statecache's adapter for SGLang. Importing it imports neither SGLang nor statecache."""

from statecache_sglang.adapter import register

__all__ = ["register"]
