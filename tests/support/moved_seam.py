"""Changes an engine in every Python process that has this folder on its path."""

from collections.abc import Mapping
from pathlib import Path

# Python runs a module of this name at its start.
_SITE = """
import importlib.util
import sys

CHANGES = {changes!r}


class Moved:
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            exec(change, vars(module))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Moved())
"""


def plant(folder: Path, module: str, owner: str, name: str) -> Path:
    """Have `owner.name` of `module` take (self, other) where `folder` is on the path."""
    return plant_changes(folder, {module: f"{owner}.{name} = lambda self, other: None"})


def plant_changes(folder: Path, changes: Mapping[str, str]) -> Path:
    """Have these statements run, each at the end of its module, where `folder` is on the path."""
    (folder / "sitecustomize.py").write_text(_SITE.format(changes=dict(changes)))
    return folder
