"""statecache's adapter for SGLang."""

from statecache_sglang.adapter import register

__all__ = ["register"]
