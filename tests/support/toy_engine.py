"""An engine that no file of the plugin knows, and the adapter for it, as an installed package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["make_toy_engine"]

_SPEC = """
from statecache.engine.seams import Seam
from statecache.engine.spec import EngineSpec

SPEC = EngineSpec(
    name="toy_engine",
    title="Toy",
    plugin_group="toy_engine.plugins",
    disable_variable="TOY_PLUGINS",
    tested_versions=("7.0",),
    seams=(Seam("toy_engine", "Pool.touch", ("self", "blocks")),),
    version=lambda: "7.0",
    own_settings=("checkpoint_interval",),
    refused={("admission", "dense"): "is not for Toy"},
    metrics_flag="with --metrics",
    slots_per_request=3,
    sizing="statecache_toy.sizing:ToySplits",
    cache_driver="statecache_toy.cache_driver",
    arms={"native": ("stock", "lru", "gds")},
)
"""
_SIZING = '''
from statecache.sizing.splits import EngineSplits


class ToySplits(EngineSplits):
    """Every state that is kept is reused once: a token a slot."""

    def play_split(self, kind, share, slots, kv_bytes):
        if self.kv_tokens(kv_bytes) < 512:
            return None
        return self.build_split(kind, share, slots, kv_bytes, slots, 0, [f"--kept {slots}"])
'''
_FILES = {
    "toy_engine/__init__.py": "class Pool:\n    def touch(self, blocks): ...\n",
    "statecache_toy/__init__.py": "def register(): ...\n",
    "statecache_toy/spec.py": _SPEC,
    "statecache_toy/sizing.py": _SIZING,
    "statecache_toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: statecache-toy\n"
    "Version: 1.0\n",
    "statecache_toy-1.0.dist-info/entry_points.txt": "[statecache.engines]\n"
    "toy_engine = statecache_toy.spec:SPEC\n\n"
    "[toy_engine.plugins]\nstatecache = statecache_toy:register\n",
}


def make_toy_engine(folder: Path) -> Path:
    """Write it to `folder`, which is then to be searched for modules."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder
