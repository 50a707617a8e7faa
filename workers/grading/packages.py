"""Packages of data sets: swebench, multi-swe-bench and swesmith, of which grading needs a few modules.

They are installed without what they require, and an ordinary import of one loads Docker, datasets and Modal, or 2,000 modules. Empty
modules with the real paths of their packages replace those, so that a single module can be imported.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class NotInPackage(ValueError):
    """A package lacks what a task needs: its repository, or a script or a parser that works."""


def root_of(package: str, requirement: str) -> Path:
    """The directory of a package. Raises ModuleNotFoundError with the command that installs it."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        fix = f"pip install --no-deps '{requirement}' (what it requires by itself is not needed here)"
        raise ModuleNotFoundError(f"{package} is not installed: {fix}", name=package)
    return Path(found.submodule_search_locations[0])


def stand_in(name: str, path: Path) -> None:
    """Replaces the package `name`, whose modules are in the directory `path`, unless it is imported."""
    module = ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules.setdefault(name, module)
