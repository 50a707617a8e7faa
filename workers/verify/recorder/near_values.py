"""Expressions for other values of a value's type, found in the process of the tests, where the value exists.

HOLE is the placeholder for the expression that gave the value. Every expression is tried on the value: results of another type, or not
clearly unequal to it in both directions, are left out. A value is never changed, and no reference to it is kept.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import builtins
import copy
import sys
from numbers import Number

HOLE = "\0"
MOST_NEAR = 8
LONGEST_CHARS = 300
LONGEST_STRING = 200
MOST_LEAVES = 80
MOST_DEPTH = 3
MOST_ELEMENTS = 10_000  # elements of an array for which near values are computed
MOST_ATTRIBUTES = 12
MOST_CODES = 2000
CODES = {}  # compiled expressions
LEAVES = (type(None), bool, int, float, complex, str, bytes)
SEQUENCES = (list, tuple)
SETS = (set, frozenset)
# Builtin classes, each with another class that is unrelated to it.
OTHER_CLASSES = {
    int: "str",
    float: "str",
    str: "bytes",
    bytes: "str",
    list: "dict",
    tuple: "dict",
    dict: "list",
}


def near_values(value, depth=0):
    """Expressions for other values of the type of `value`, the most natural first."""
    found = []
    for propose in PROPOSALS:
        if found and propose is of_objects:
            break
        try:
            for text in propose(value, depth):
                if len(text) <= LONGEST_CHARS and text not in found and is_near(text, value):
                    found.append(text)
                if len(found) == MOST_NEAR:
                    return found
        except Exception:
            pass
    return found


def is_near(text, value):
    """Whether the expression gives another value of the type of `value`."""
    try:
        other = eval(compiled(text), {"value": value})
        return other is not value and are_alike(other, value) and differ(other, value)
    except Exception:
        return False


def compiled(text):
    if len(CODES) >= MOST_CODES:
        CODES.clear()
    if text not in CODES:
        CODES[text] = compile(text.replace(HOLE, "value"), "<near value>", "eval")
    return CODES[text]


def are_alike(one, other):
    """Whether two values have the same type; arrays also have the same element type."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, numpy.dtype):  # each has a class of its own
        return isinstance(other, numpy.dtype)
    if isinstance(one, type):
        return isinstance(other, type)
    return type(one) is type(other) and says(getattr(one, "dtype", 0) == getattr(other, "dtype", 0), True)


def differ(one, other):
    """Whether two values are clearly unequal, in both directions."""
    if is_of(one, "pandas") and hasattr(one, "equals"):
        return not one.equals(other) and not other.equals(one)
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return True
    if type(one) in SEQUENCES and len(one) == len(other) and not is_plain(one):
        places = range(len(one))
    elif type(one) is dict and one.keys() == other.keys() and not is_plain(one):
        places = list(one)
    else:
        places = ()
    if places:
        return any(differ(one[place], other[place]) for place in places if one[place] is not other[place])
    unequal, equal = (one != other, other != one), (one == other, other == one)
    if hasattr(unequal[0], "any"):  # the comparison returned an array
        are_numbers = (one == one) | (other == other)
        return all(bool((answer & are_numbers).any()) for answer in unequal)
    if says(one != one, True) and says(other != other, True):  # neither is a number
        return False
    return all(says(answer, True) for answer in unequal) and all(says(answer, False) for answer in equal)


def is_of(value, library):
    return type(value).__module__.partition(".")[0] == library


def says(answer, expected):
    return answer is expected or (type(answer).__name__ in ("bool", "bool_") and bool(answer) is expected)


def is_plain(value):
    """Whether the value consists of a few builtin values, so that its `repr` is an expression for it."""
    left, num_leaves = [value], 0
    while left:
        one = left.pop()
        kind = type(one)
        num_leaves += 1
        if num_leaves > MOST_LEAVES or (
            kind in (str, bytes, *SEQUENCES, *SETS, dict) and len(one) > LONGEST_STRING
        ):
            return False
        if kind in (*SEQUENCES, *SETS):
            left.extend(one)
        elif kind is dict:
            left.extend(one.keys())
            left.extend(one.values())
        elif kind not in LEAVES or one != one or one in (float("inf"), float("-inf")):
            return False
    return True


def variants(value):
    """Plain values of the type of `value`, a plain value, in which one leaf is changed."""
    kind = type(value)
    if kind is bool:
        return [not value]
    if kind is int:
        return [value + 1, value - 1 if value > 0 else value + 2, value + 10]
    if kind is float:
        return float_variants(value)
    if kind is complex:
        return [value + 1]
    if kind is str:
        return string_variants(value)
    if kind is bytes:
        return [text.encode("latin-1") for text in string_variants(value.decode("latin-1"))]
    if kind in SEQUENCES:
        return sequence_variants(value)
    if kind in SETS:
        return [kind(items) for items in sequence_variants(sorted(value, key=repr))]
    if kind is dict:
        return dict_variants(value)
    return []


def float_variants(value):
    text = repr(value)
    digits = 17 if "e" in text else len(text.partition(".")[2])
    found = [round(value + 1.0, digits), round(value * 2.0, digits), round(value - 0.5, max(digits, 1))]
    return [one for one in found if one != value and one - one == 0.0]


def string_variants(text):
    """The text with one character changed."""
    if not text:
        return ["x"]
    places = [place for place in range(len(text)) if text[place].isalnum() and text[place] < "\x7f"]
    chosen = [places[-1], places[0], places[len(places) // 2]] if places else [len(text) - 1]
    return [
        text[:place] + other_character(text[place]) + text[place + 1 :] for place in dict.fromkeys(chosen)
    ]


def other_character(character):
    for characters in ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        if character in characters:
            number = characters.index(character)
            return characters[number + 1] if number + 1 < len(characters) else characters[number - 1]
    return "y" if character == "x" else "x"


def sequence_variants(items):
    kind, found = type(items), []
    for place in ends_first(len(items)):
        for other in variants(items[place])[:1]:
            found.append(items[:place] + kind([other]) + items[place + 1 :])
        if len(found) == 3:
            break
    return found or [items + (items[-1:] or kind([0]))]


def dict_variants(items):
    keys = list(items)
    found = []
    for place in ends_first(len(keys)):
        for other in variants(items[keys[place]])[:1]:
            found.append({key: other if key is keys[place] else items[key] for key in keys})
        if len(found) == 3:
            break
    if found:
        return found
    if not keys:
        return [{"a": 1}]
    return [dict([*list(items.items())[:-1], (other, items[keys[-1]])]) for other in variants(keys[-1])[:1]]


def ends_first(length):
    """The indices of a sequence: the last, the first, the middle, the others."""
    first = [length - 1, 0, length // 2] if length else []
    return list(dict.fromkeys(first + list(range(min(length, LONGEST_STRING)))))


def literals(value, depth):
    return [repr(other) for other in variants(value)] if is_plain(value) else []


def of_singles(value, depth):
    """Near values of values that are not a collection, or are a collection of characters or bytes."""
    if isinstance(value, bool):
        yield "not (\0)"
    elif isinstance(value, (str, bytes)):
        yield from of_text(value)
    elif isinstance(value, (float, complex)) and value - value != 0:  # not finite
        yield from ("1.0", "(\0) * 0")
    elif isinstance(value, (bytearray, memoryview)):
        yield from ("(\0) + b'x'", "memoryview(bytes((\0)) + b'x')")
    elif isinstance(value, range):
        yield f"range({value.start}, {value.stop + value.step}, {value.step})"
    elif isinstance(value, slice):
        yield f"slice({value.start!r}, {(value.stop or 0) + 1!r}, {value.step!r})"


def of_text(value):
    is_bytes = isinstance(value, bytes)
    mark, letters = ("b", value.decode("latin-1")) if is_bytes else ("", value)
    forms = [f"(\0)[:-1] + {mark}'x'", f"(\0)[:-1] + {mark}'y'", f"(\0) + {mark}'x'"]
    for letter in [letter for letter in "eatoinsr1023" if letter in letters][:1]:
        forms.insert(0, f"(\0).replace({mark}'{letter}', {mark}'{other_character(letter)}', 1)")
    yield from forms if type(value) in (str, bytes) else (once("type((\0))(" + form + ")") for form in forms)


def of_collections(value, depth):
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields[:MOST_ATTRIBUTES]:
            yield from with_changed(
                "(\0)._replace(" + name + "=\1)", getattr(value, name), "v." + name, depth
            )
    elif isinstance(value, (list, tuple)):
        yield from of_sequence(value, depth)
    elif isinstance(value, dict):
        yield from of_dict(value, depth)
    elif isinstance(value, (set, frozenset)):
        items = sorted(list(value)[:LONGEST_STRING], key=repr)
        changed = [other for item in items[:3] if is_plain(item) for other in variants(item)]
        yield from (f"(\0) | {{{other!r}}}" for other in [*changed, 0])
        if type(value) not in SETS:
            yield from (once(f"type((\0))((\0) | {{{other!r}}})") for other in [*changed, 0])


def of_sequence(value, depth):
    whole = "[%s]" if isinstance(value, list) else "(%s,)"
    if type(value) not in SEQUENCES:
        whole = "type((\0))([%s])"
    if value:
        yield from with_changed(whole % "*(\0)[:-1], \1", value[-1], "v[-1]", depth)
        yield from with_changed(whole % "\1, *(\0)[1:]", value[0], "v[0]", depth)
        yield "(\0)[:-1]"
    yield once(whole % "*(\0), 0")


def of_dict(value, depth):
    keys = [key for key in list(value)[:LONGEST_STRING] if is_plain(key)]
    for key in [keys[place] for place in ends_first(len(keys))][:MOST_ATTRIBUTES]:
        form = f"{{**(\0), {key!r}: \1}}"
        if type(value) is not dict and is_copied(value):
            form = f"(lambda v: (dict.update(v, {{{key!r}: \1}}), v)[1])(__import__('copy').copy((\0)))"
        yield from with_changed(form, value[key], f"v[{key!r}]", depth)
    if type(value) is dict:
        yield "{**(\0), 'a': 1}"


def of_numbers(value, depth):
    """Near values of values to which a number can be added: numbers, arrays, addresses."""
    is_other = isinstance(value, (str, bytes, list, tuple, bool)) or not hasattr(type(value), "__add__")
    size = getattr(value, "size", 1)
    if not is_other and isinstance(size, int) and size <= MOST_ELEMENTS:
        yield from ("(\0) + 1", "(\0) - 1", "(\0) * 2 + 1")
    if not is_other and isinstance(value, Number) and type(value) not in LEAVES:
        yield once("type((\0))((\0) + 1)")


def of_times(value, depth):
    kinds = [kind.__module__ + "." + kind.__name__ for kind in type(value).__mro__]
    if "datetime.date" in kinds or "datetime.timedelta" in kinds:
        yield "(\0) + __import__('datetime').timedelta(days=1)"
        yield "(\0) - __import__('datetime').timedelta(days=1)"
    elif "datetime.time" in kinds:
        yield f"(\0).replace(hour={(value.hour + 1) % 24})"
    elif "datetime.timezone" in kinds:
        yield "__import__('datetime').timezone(__import__('datetime').timedelta(hours=1))"
        yield "__import__('datetime').timezone(__import__('datetime').timedelta(hours=2))"


def of_library(value, depth):
    """Near values of classes of the standard library, and of members of enumerations."""
    kinds = [kind.__module__ + "." + kind.__name__ for kind in type(value).__mro__]
    if "enum.Enum" in kinds:
        yield from ("type((\0))." + name for name in list(type(value).__members__)[:MOST_ATTRIBUTES])
    elif "pathlib.PurePath" in kinds or "pathlib._local.PurePath" in kinds:
        yield from (f"(\0).with_name({other!r})" for other in string_variants(value.name))
        yield "(\0) / 'x'"
    elif "collections.deque" in kinds:
        yield once("type((\0))([*(\0), 0])")
    elif kinds[0] == "uuid.UUID":
        yield once("type((\0))(int=(\0).int ^ 1)")
    elif kinds[0] in ("re.Pattern", "_sre.SRE_Pattern"):
        added = "b'x'" if isinstance(value.pattern, bytes) else "'x'"
        yield once(f"__import__('re').compile((\0).pattern + {added}, (\0).flags)")


def of_arrays(value, depth):
    """Near values of numpy and pandas objects: one element changed, or one left out."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.kind == "b":
            yield "~(\0)"
        if isinstance(value, numpy.ndarray) and value.size and depth < MOST_DEPTH:
            first = value.flat[0] if value.dtype.kind == "O" else value.flat[0].item()
            for near in near_values(first, depth + 1)[:1]:
                changed = f"a.flat.__setitem__(0, {near.replace(HOLE, 'a.flat[0]')})"
                yield f"(lambda a: ({changed}, a)[1])((\0).copy())"
        if isinstance(value, numpy.ndarray):
            yield "(\0)[:-1]"
    elif numpy is not None and isinstance(value, numpy.dtype):
        yield from ("__import__('numpy').dtype('float32')", "__import__('numpy').dtype('int16')")
    elif is_of(value, "pandas"):
        yield from ("(\0).iloc[:-1]", "(\0)[:-1]", "(\0).iloc[:0]")


def of_records(value, depth):
    """Near values of instances of data classes and of attrs classes, with another value in one field."""
    kind = type(value)
    for attribute, function in (
        ("__dataclass_fields__", "__import__('dataclasses').replace"),
        ("__attrs_attrs__", "__import__('attr').evolve"),
    ):
        fields = getattr(kind, attribute, None) or ()
        for field in list(fields.values() if isinstance(fields, dict) else fields)[:MOST_ATTRIBUTES]:
            argument = field.name.lstrip("_") if attribute == "__attrs_attrs__" else field.name
            form = function + "((\0), " + argument + "=\1)"
            yield from with_changed(form, getattr(value, field.name), "v." + field.name, depth)


def of_objects(value, depth):
    """Near values of other objects: a copy with another value for one attribute."""
    kind = type(value)
    library = any(
        is_of(value, name) for name in ("builtins", "unittest", "mock", "numpy", "pandas", "_pytest")
    )
    # Methods that may use up or end what a copy shares
    owning = {"__del__", "__exit__", "__call__", "__next__"}
    owns = any(not owning.isdisjoint(vars(one)) for one in kind.__mro__)
    if library or owns or isinstance(value, (type, BaseException)) or not is_copied(value):
        return
    copied = "(__import__('copy').copy((\0)))"
    for name in list(getattr(value, "__dict__", ()))[:MOST_ATTRIBUTES]:
        if name.isidentifier():
            form = f"(lambda v: (v.__dict__.update({name}=\1), v)[1]){copied}"
            yield from with_changed(form, vars(value)[name], "v." + name, depth)
    slots = [name for one in kind.__mro__ for name in as_names(getattr(one, "__slots__", ()))]
    for name in slots[:MOST_ATTRIBUTES]:
        if hasattr(value, name) and not name.startswith("__"):
            form = f"(lambda v: (object.__setattr__(v, {name!r}, \1), v)[1]){copied}"
            yield from with_changed(form, getattr(value, name), "v." + name, depth)


def is_copied(value):
    """Whether a copy shares nothing with the value that setting an attribute would change."""
    other = copy.copy(value)
    attributes = getattr(value, "__dict__", None)
    return other is not value and (attributes is None or other.__dict__ is not attributes)


def of_classes(value, depth):
    """Another class for a class, and another message for an exception."""
    if isinstance(value, type):
        errors = ["KeyError", "ZeroDivisionError"] if issubclass(value, BaseException) else []
        for name in [*errors, OTHER_CLASSES.get(value, "complex"), "bytearray"]:
            other = getattr(builtins, name)
            if not issubclass(value, other) and not issubclass(other, value):
                yield name
    elif isinstance(value, BaseException) and is_plain(value.args):
        for args in variants(value.args):
            yield "type((\0))(" + ", ".join(repr(argument) for argument in args) + ")"


def with_changed(form, part, place, depth):
    """Expressions for the value with its `part` changed: `form` has \1 for the new part, and `place` is the path to it from `v`."""
    if depth >= MOST_DEPTH:
        return
    for near in near_values(part, depth + 1)[:2]:
        if HOLE in near and form.startswith("(lambda v: "):
            yield form.replace("\1", near.replace(HOLE, place))
        elif HOLE in near:
            yield in_function(form).replace("\1", near.replace(HOLE, place))
        else:
            yield once(form.replace("\1", near))


def once(form):
    """An expression in which HOLE occurs once."""
    return form if form.count(HOLE) == 1 else in_function(form)


def in_function(form):
    """An expression in which HOLE occurs once, as an argument."""
    return "(lambda v: " + form.replace("(\0)", "v") + ")((\0))"


def as_names(names):
    return [names] if isinstance(names, str) else list(names)


PROPOSALS = (
    literals,
    of_times,
    of_singles,
    of_records,
    of_collections,
    of_numbers,
    of_arrays,
    of_library,
    of_classes,
    of_objects,
)
