"""What SGLang calls when it loads its plugins."""

import logging

_log = logging.getLogger("statecache.sglang")


def register() -> None:
    """Entry point of SGLang's plugin loader. Changes nothing in this release, and says so."""
    _log.info("statecache: the SGLang adapter is not part of this release; nothing was changed")
