"""Changes a method of an engine in every Python process that has this folder on its path."""

from pathlib import Path

# Python runs a module of this name at its start.
_SITE = """
import importlib.util
import sys

MODULE, OWNER, NAME = {place!r}


class Moved:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            setattr(getattr(module, OWNER), NAME, lambda self, other: None)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Moved())
"""


def plant(folder: Path, module: str, owner: str, name: str) -> Path:
    """Have `owner.name` of `module` take (self, other) where `folder` is on the path."""
    (folder / "sitecustomize.py").write_text(_SITE.format(place=(module, owner, name)))
    return folder
