"""Prints what the tests need, from pyproject.toml: base dependencies, extras plot and dev."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
sys.stdout.write("\n".join([*project["dependencies"], *extras["plot"], *extras["dev"]]) + "\n")
