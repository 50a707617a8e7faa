"""Notes what the test runner is made of, and finds what of it has become something else since the start."""
# pyright: basic, reportOptionalMemberAccess=false

import functools
import math  # noqa: F401 - so that its functions are noted
import os
import sys
import types
import typing  # noqa: F401 - as above

RUNNERS = ("_pytest", "pluggy", "pytest", "unittest")
# What runners build on: modules of Python whose functions and classes must stay what they are.
FOUNDATIONS = (
    "builtins",
    "ast",
    "contextlib",
    "importlib",
    "importlib.machinery",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "linecache",
    "math",
    "typing",  # a class of it is a base of many of pytest's
)
WITH_CODE = (types.FunctionType, types.MethodType, property, staticmethod, classmethod, functools.partial)
ASSERTION_ERROR = AssertionError
LIBRARY = os.path.dirname(os.__file__) + os.sep
REINTERPRETING = "_pytest.assertion.reinterpret"  # where an old pytest has its own AssertionError
ABSENT = object()
# What Python itself adds to a class.
LAZY = ("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__signature__")
PARTS = {}  # the parts at the start, by the holder's name: the holder, its kind and its contents
FUNCTIONS = {}  # the functions among them by id: name of the part, function and what of it can be exchanged


def of_runner(path):
    folders = [folder for name in RUNNERS for folder in getattr(sys.modules.get(name), "__path__", ())]
    return path.startswith(tuple(folder + os.sep for folder in folders))


def _holders():
    """Name and object of each module and class that holds parts of the runner, or of what runners build on."""
    for name, module in list(sys.modules.items()):
        is_runner = name.partition(".")[0] in RUNNERS
        if not (is_runner or name in FOUNDATIONS) or not isinstance(module, types.ModuleType):
            continue
        yield name, module
        if name in ("ast", "builtins"):  # what their classes do is not written in Python
            continue
        for thing in list(vars(module).values()):
            if isinstance(thing, type) and thing.__module__ == name:
                yield name + "." + thing.__name__, thing


def note_parts():
    for name, holder in _holders():
        if name not in PARTS:
            _note(name, holder)


def _note(name, holder):
    PARTS[name] = (holder, _kind(holder), dict(vars(holder)))
    for key, part in PARTS[name][2].items():
        function = part if type(part) is types.FunctionType else _function(part)
        if function is not None and id(function) not in FUNCTIONS:
            FUNCTIONS[id(function)] = (name + "." + key, function, _exchangeable(function))


def replaced_parts(note_anew=False):
    """Name of each part that has become something else, and the files that its replacement is from. For a module of a runner
    that was imported later: each function that is neither Python's nor the runner's.
    """
    found, seen = [], set()
    for name, holder in _holders():
        seen.add(name)
        changes = _changes(name, holder) if name in PARTS else _foreign_parts(name, holder)
        found += changes
        if changes and note_anew:
            _note(name, holder)
    for part, function, exchangeable in list(FUNCTIONS.values()):
        if list(map(id, _exchangeable(function))) != list(map(id, exchangeable)):
            found.append((part, files_of(function)))
    gone = [name for name in PARTS if name not in seen and isinstance(PARTS[name][0], types.ModuleType)]
    return found + [(name, ()) for name in gone]


def _changes(name, holder):
    old_holder, kind, parts = PARTS[name]
    if holder is not old_holder or _kind(holder) != kind:
        return [(name, files_of(holder))]
    now = vars(holder)
    changed = [key for key, part in parts.items() if now.get(key, ABSENT) is not part and _works(part)]
    if isinstance(holder, type):
        changed += [key for key in list(now) if key not in parts and _matters(holder, key, now[key])]
    return [(name + "." + key, files_of(now.get(key))) for key in changed]


def shadowed(thing, own=()):
    """Names of the methods of `thing` that attributes of its own stand in for, and the files that those are from."""
    attributes = getattr(thing, "__dict__", None) or {}
    return [
        (type(thing).__name__ + "." + key, files_of(attributes[key]))
        for key in list(attributes)
        if key not in own and isinstance(getattr(type(thing), key, None), types.FunctionType)
    ]


def _works(part):
    """Whether the part does something, as opposed to a value that may change."""
    return callable(part) or hasattr(type(part), "__get__") or isinstance(part, types.ModuleType)


def _matters(holder, key, part):
    """Whether an addition to a class changes what the class did: by a method that Python calls by itself, by what hides an
    inherited part, or by what guards an attribute.
    """
    if key in LAZY or not (callable(part) or hasattr(type(part), "__get__")):
        return False
    by_itself = key.startswith("__") or hasattr(type(part), "__set__")
    return by_itself or any(key in vars(base) for base in holder.__mro__[1:])


def _kind(holder):
    return (type(holder), getattr(holder, "__bases__", None))


def _exchangeable(function):
    """What of a function can be exchanged without exchanging the function."""
    return (function.__code__, function.__defaults__, function.__kwdefaults__)


def _function(part):
    if not isinstance(part, WITH_CODE):
        return None
    if isinstance(part, property):
        part = part.fget
    if isinstance(part, (staticmethod, classmethod, types.MethodType)):
        part = part.__func__
    if isinstance(part, functools.partial):
        part = part.func
    return part if isinstance(part, types.FunctionType) else None


def files_of(part):
    """The files that the code of `part` is from: as the code says, and as the module says in which it was compiled."""
    function = _function(part)
    if function is not None:
        paths = (function.__code__.co_filename, function.__globals__.get("__file__"))
    else:
        module = sys.modules.get(getattr(part, "__module__", None) or type(part).__module__)
        paths = (getattr(module, "__file__", None),)
    return sorted({str(path) for path in paths if path})


def _foreign_parts(name, holder):
    functions = [(key, part) for key, part in list(vars(holder).items()) if _function(part) is not None]
    return [
        (name + "." + key, files_of(part))
        for key, part in functions
        if not all(path.startswith(("<", LIBRARY)) or of_runner(path) for path in files_of(part))
    ]
