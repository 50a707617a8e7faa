"""Notes what the test runner is made of, and finds what of it has been replaced since the start."""
# pyright: basic, reportOptionalMemberAccess=false

import functools
import os
import sys
import types

RUNNERS = ("_pytest", "pluggy", "pytest", "unittest")
WITH_CODE = (types.FunctionType, type, property, staticmethod, classmethod, functools.partial)
ASSERTION_ERROR = AssertionError
LIBRARY = os.path.dirname(os.__file__) + os.sep
REINTERPRETING = "_pytest.assertion.reinterpret"  # where an old pytest has its own AssertionError
PARTS = {}  # the runner's parts at the start: part and its code, by id of the holder and name


def of_runner(path):
    folders = [folder for name in RUNNERS for folder in getattr(sys.modules.get(name), "__path__", ())]
    return path.startswith(tuple(folder + os.sep for folder in folders))


def _holders():
    """Name and object of each module and class that holds parts of the runner."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in RUNNERS or not isinstance(module, types.ModuleType):
            continue
        yield name, module
        for thing in list(vars(module).values()):
            if isinstance(thing, type) and thing.__module__ == name:
                yield name + "." + thing.__name__, thing


def note_parts():
    for _, holder in _holders():
        parts = {name: (part, _code(part)) for name, part in list(vars(holder).items())}
        PARTS[id(holder)] = (holder, parts)  # the reference keeps the holder alive, so its id stays unique


def replaced_parts():
    """Name of each part that has been replaced, and the file of its replacement. For a module of unittest that was imported
    later: each function that is not Python's own.
    """
    replaced = []
    for holder_name, holder in _holders():
        known = PARTS.get(id(holder), (None, None))[1]
        for name, part in list(vars(holder).items()):
            if known is None:
                files = _foreign_files(part) if holder_name.startswith("unittest") else ()
            elif name in known:
                old, old_code = known[name]
                changed = part is not old or _code(part) is not old_code
                files = files_of(part) if changed and isinstance(old, WITH_CODE) else ()
            else:
                files = files_of(part) if isinstance(holder, type) and hasattr(type(part), "__set__") else ()
            replaced += [(holder_name + "." + name, path) for path in files]
    return replaced


def _function(part):
    if isinstance(part, property):
        part = part.fget
    if isinstance(part, (staticmethod, classmethod, types.MethodType)):
        part = part.__func__
    if isinstance(part, functools.partial):
        part = part.func
    return part if isinstance(part, types.FunctionType) else None


def _code(part):
    return getattr(_function(part), "__code__", None)


def files_of(part):
    """The files that the code of `part` is from: as the code says, and as the module says in which it was compiled."""
    function = _function(part)
    if function is not None:
        return {function.__code__.co_filename, str(function.__globals__.get("__file__", ""))}
    module = sys.modules.get(getattr(part, "__module__", None) or type(part).__module__)
    return {getattr(module, "__file__", None) or ""}


def _foreign_files(part):
    function = _function(part)
    files = files_of(part) if function is not None else ()
    return [path for path in files if not path.startswith(("<", LIBRARY))]
