"""A copy of an installed package in which some lines are others."""

import importlib.util
import os
import shutil
from pathlib import Path


def folder_of(package: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def copy_with(folder: Path, package: str, changes: dict[str, list[tuple[str, str]]]) -> Path:
    """Copy a package into `folder`, by links, with these lines of these files changed once each."""
    shutil.copytree(
        folder_of(package),
        folder / package,
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name, lines in changes.items():
        file = folder / package / name
        text = file.read_text()
        for old, new in lines:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        file.unlink()
        file.write_text(text)
    return folder
