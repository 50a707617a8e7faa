"""Records the parts of the test runner, and finds those that have changed since the start."""
# pyright: basic, reportOptionalMemberAccess=false

import builtins
import functools
import operator
import os
import sys
import types

# The code of this plugin has its own copy of the builtins, so that later replacements do not affect it.
__builtins__ = dict(vars(builtins))
RUNNERS = ("_pytest", "pluggy", "pytest", "unittest")
# Modules of Python that runners are built on and whose functions and classes must not change.
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
    "typing",  # one of its classes is a base of many classes of pytest
)
WITH_CODE = (types.FunctionType, types.MethodType, property, staticmethod, classmethod, functools.partial)
ASSERTION_ERROR = AssertionError
LIBRARY = os.path.dirname(os.__file__) + os.sep
# Very old versions of pytest have their own AssertionError in this module.
REINTERPRETING = "_pytest.assertion.reinterpret"
ABSENT = object()
# Attributes that Python itself adds to a class.
LAZY = ("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__signature__")
IS_SAME = operator.is_
PARTS = {}  # name of a module -> the module and its classes as they were
FUNCTIONS = []  # the functions among the parts: name of the part, and the function
KNOWN = set()  # their ids
# Attributes of a function that can be replaced while the function stays: recorded values, in the order of FUNCTIONS, and a getter.
EXCHANGEABLE = [([], operator.attrgetter(name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]


def of_runner(path):
    folders = [folder for name in RUNNERS for folder in getattr(sys.modules.get(name), "__path__", ())]
    return path.startswith(tuple(folder + os.sep for folder in folders))


def note_parts():
    """Records each part of the runner that is not recorded yet."""
    for name, module in _modules():
        if name not in PARTS:
            PARTS[name] = (_Noted(name, module), [_Noted(*one) for one in _classes(name, module)])


def _modules():
    """Name and object of each module with parts of the runner, or of the modules that runners build on."""
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if (name in FOUNDATIONS or name.partition(".")[0] in RUNNERS) and isinstance(module, types.ModuleType)
    ]


def _classes(name, module):
    """Name and object of each class that the module of this name defines."""
    if name in ("ast", "builtins"):  # the methods of their classes are not written in Python
        return []
    things = [thing for thing in list(vars(module).values()) if isinstance(thing, type)]
    return [(name + "." + thing.__name__, thing) for thing in things if thing.__module__ == name]


class _Noted:
    """A module or a class in the state in which it was recorded."""

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
        """Whether no part has changed. Parts are compared by identity, which runs no code that the patch may have added."""
        contents = vars(self.holder)
        keys, parts = list(contents), list(contents.values())
        same_parts = all(map(IS_SAME, self.parts, parts)) and all(map(IS_SAME, self.keys, keys))
        return same_parts and len(keys) == len(self.keys) and self.kind == _kind(self.holder)

    def changes(self, holder):
        """Lists the name of each part that was replaced, with the files of its replacement."""
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
    """Lists the name of each part that was replaced, with the files of its replacement.

    For a module of the runner that was imported later, it lists each function that is neither Python's nor the runner's. With
    `note_anew`, parts that have changed count as not recorded from then on.
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
    """Lists the changed parts of a module and of its classes. `noted` is None for a module that was imported later."""
    found = noted.changes(module) if noted else _foreign_parts(name, module)
    known = {one.name: one for one in classes}
    for class_name, thing in _classes(name, module):
        one = known.pop(class_name, None)
        found += one.changes(thing) if one else _foreign_parts(class_name, thing)
    return found + _of_all(known.values())


def _of_all(classes):
    return [change for one in classes for change in one.changes(one.holder)]


def _exchanged():
    """Lists the functions of which an attribute, such as the code object, was replaced while the function stayed the same object."""
    functions, found = [function for _, function in FUNCTIONS], set()
    for noted, now in EXCHANGEABLE:
        if not all(map(IS_SAME, noted, map(now, functions))):
            found.update(key for key, function in enumerate(functions) if now(function) is not noted[key])
    return [(FUNCTIONS[key][0], files_of(functions[key])) for key in sorted(found)]


def shadowed(thing, own=()):
    """Lists the methods of `thing` that an instance attribute hides, each with the files of the attribute."""
    attributes = getattr(thing, "__dict__", None) or {}
    return [
        (type(thing).__name__ + "." + key, files_of(attributes[key]))
        for key in list(attributes)
        if key not in own and isinstance(getattr(type(thing), key, None), types.FunctionType)
    ]


def _works(part):
    """Whether the part is code, as opposed to a value that may change."""
    return callable(part) or hasattr(type(part), "__get__") or isinstance(part, types.ModuleType)


def _matters(holder, key, part):
    """Whether an addition to a class changes what the class did: by a method that Python calls by itself, by a part that hides an inherited
    one, or by one that guards an attribute.
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
    """The files of the code of `part`: the file in the code, and the file of the module in which it was compiled."""
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
