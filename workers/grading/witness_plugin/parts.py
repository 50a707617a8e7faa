"""Notes what the test runner is made of, and finds what of it has become something else since the start."""
# pyright: basic, reportOptionalMemberAccess=false

import builtins
import functools
import operator
import os
import sys
import types

# A copy of its own for the code of this plugin: the functions that it uses stay those of the start.
__builtins__ = dict(vars(builtins))
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
IS_SAME = operator.is_
PARTS = {}  # by the name of each module: what it was and what each of its classes was
FUNCTIONS = []  # the functions among the parts: name of the part, and the function
KNOWN = set()  # their ids
# What of a function can be exchanged without exchanging the function: those noted, in the order of FUNCTIONS, and the way to it.
EXCHANGEABLE = [([], operator.attrgetter(name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]


def of_runner(path):
    folders = [folder for name in RUNNERS for folder in getattr(sys.modules.get(name), "__path__", ())]
    return path.startswith(tuple(folder + os.sep for folder in folders))


def note_parts():
    """Notes each part that is not noted yet."""
    for name, module in _modules():
        if name not in PARTS:
            PARTS[name] = (_Noted(name, module), [_Noted(*one) for one in _classes(name, module)])


def _modules():
    """Name and object of each module that holds parts of the runner, or of what runners build on."""
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if (name in FOUNDATIONS or name.partition(".")[0] in RUNNERS) and isinstance(module, types.ModuleType)
    ]


def _classes(name, module):
    """Name and object of each class that the module of this name defines."""
    if name in ("ast", "builtins"):  # what their classes do is not written in Python
        return []
    things = [thing for thing in list(vars(module).values()) if isinstance(thing, type)]
    return [(name + "." + thing.__name__, thing) for thing in things if thing.__module__ == name]


class _Noted:
    """A module or a class as it was when it was noted."""

    def __init__(self, name, holder):
        self.name = name
        self.holder = holder
        self.kind = _kind(holder)
        self.contents = dict(vars(holder))
        self.keys, self.parts = list(self.contents), list(self.contents.values())
        found = []
        for key, part in self.contents.items():
            if isinstance(part, WITH_CODE):
                function = part if type(part) is types.FunctionType else _function(part)
                if function is not None and id(function) not in KNOWN:
                    KNOWN.add(id(function))
                    FUNCTIONS.append((name + "." + key, function))
                    found.append(function)
        for noted, now in EXCHANGEABLE:
            noted += map(now, found)

    def is_same(self):
        """Whether nothing of it has changed: by identity, so without code that the patch may have brought."""
        contents = vars(self.holder)
        keys, parts = list(contents), list(contents.values())
        same_parts = all(map(IS_SAME, self.parts, parts)) and all(map(IS_SAME, self.keys, keys))
        return same_parts and len(keys) == len(self.keys) and self.kind == _kind(self.holder)

    def changes(self, holder):
        """Name of each part that has become something else, and the files that its replacement is from."""
        if holder is not self.holder or _kind(holder) != self.kind:
            return [(self.name, files_of(holder))]
        if self.is_same():
            return []
        parts, now = self.contents, vars(holder)
        changed = [key for key, part in parts.items() if now.get(key, ABSENT) is not part and _works(part)]
        if isinstance(holder, type):
            changed += [key for key in list(now) if key not in parts and _matters(holder, key, now[key])]
        return [(self.name + "." + key, files_of(now.get(key))) for key in changed]


def replaced_parts(note_anew=False):
    """Name of each part that has become something else, and the files that its replacement is from. For a module of a runner
    that was imported later: each function that is neither Python's nor the runner's. `note_anew`: what has changed counts as
    not noted from then on.
    """
    found, modules = [], _modules()
    for name, module in modules:
        noted, classes = PARTS.get(name, (None, []))
        is_same = noted is not None and noted.holder is module and noted.is_same()
        changes = _of_all(classes) if is_same else _changes(name, module, noted, classes)
        found += changes
        if note_anew and (changes or not is_same):
            PARTS.pop(name, None)
    gone = [(name, ()) for name in PARTS if name not in dict(modules)]
    return found + _exchanged() + gone


def _changes(name, module, noted, classes):
    """What has changed in a module that is not the same, and in its classes."""
    found = noted.changes(module) if noted else _foreign_parts(name, module)
    known = {one.name: one for one in classes}
    for class_name, thing in _classes(name, module):
        one = known.pop(class_name, None)
        found += one.changes(thing) if one else _foreign_parts(class_name, thing)
    return found + _of_all(known.values())


def _of_all(classes):
    return [change for one in classes for change in one.changes(one.holder)]


def _exchanged():
    """The functions of which something was exchanged that they keep, as their code."""
    functions, found = [function for _, function in FUNCTIONS], set()
    for noted, now in EXCHANGEABLE:
        if not all(map(IS_SAME, noted, map(now, functions))):
            found.update(key for key, function in enumerate(functions) if now(function) is not noted[key])
    return [(FUNCTIONS[key][0], files_of(functions[key])) for key in sorted(found)]


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
