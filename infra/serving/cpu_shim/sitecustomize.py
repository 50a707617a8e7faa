"""Lets the unchanged SGLang import where there is no GPU; a missing function that is called raises an error.

SGLang imports a few GPU-only packages at module level even when it serves on the CPU. Put this directory on
``PYTHONPATH`` and each package named in ``SWERVE_CPU_SHIM`` (comma separated) that is not installed becomes
importable; a module named there with a leading ``-`` cannot be imported at all, not even where it is
installed, which tells SGLang that a feature is absent. The names of a stand-in package can be bound, used
as decorators, base classes and annotations while modules are being imported. Calling one of them afterwards
raises ``RuntimeError`` with its full name: a kernel that is needed but missing is a loud failure, never a
silent no-op.

Python imports ``sitecustomize`` by itself in every interpreter, so spawned scheduler processes are covered
as well.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn


def being_imported() -> bool:
    """True while the calling thread is inside the execution of a module body."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap_external>":
            return True
        frame = frame.f_back
    return False


def refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} was called, but it is a stand-in: the package is not installed on this machine"
    )


class StandIn(type):
    """The type of one name in a package that is not installed.

    Stand-ins are classes, so they also serve as bases, in annotations and in ``isinstance``; a class derived from one cannot be called
    either. Attributes of a stand-in are stand-ins.
    """

    def __getattr__(cls, attribute: str) -> "StandIn":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return stand_in_for(f"{cls.__module__}.{cls.__qualname__}", attribute)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not being_imported():
            refuse(f"{cls.__module__}.{cls.__qualname__}")
        is_decoration = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decoration else stand_in_for(cls.__module__, f"{cls.__qualname__}(...)")

    def __getitem__(cls, key: Any) -> "StandIn":
        return cls

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A model field of this type accepts only instances, and none exist."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)


def stand_in_for(module: str, name: str) -> StandIn:
    return StandIn(name, (), {"__module__": module})


class StandInModule(types.ModuleType):
    """A module of a package that is not installed: every public name in it is a stand-in."""

    __version__ = "0.0.0"

    def __getattr__(self, attribute: str) -> StandIn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return stand_in_for(self.__name__, attribute)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """This finder is consulted last, so that an installed package is always preferred."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandInModule:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing: names are made when they are looked up."""


class AbsenceFinder(importlib.abc.MetaPathFinder):
    """This finder is consulted first, so that a hidden module is absent whether or not it is installed."""

    def __init__(self, modules: frozenset[str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        if fullname in self.modules:
            raise ModuleNotFoundError(f"{fullname} is hidden by SWERVE_CPU_SHIM", name=fullname)


names = set(filter(None, os.environ.get("SWERVE_CPU_SHIM", "").split(",")))
hidden = {name for name in names if name.startswith("-")}
if names:
    sys.meta_path.insert(0, AbsenceFinder(frozenset(name[1:] for name in hidden)))
    sys.meta_path.append(StandInFinder(frozenset(names - hidden)))
