"""What vLLM calls when it loads its plugins."""

import logging

_log = logging.getLogger("statecache.vllm")


def register() -> None:
    """Entry point of vLLM's plugin loader. Changes nothing in this release, and says so."""
    _log.info("statecache: the vLLM adapter is not part of this release; nothing was changed")
