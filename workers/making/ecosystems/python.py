"""Repositories in Python: tests are pytest's, dependencies come from a package index.

Packages are fetched on this machine, as wheels alone, with the registries in pip's own configuration, so that builds need no network and no
code of the repository or its dependencies runs outside of containers. Where the repository can be installed, it is installed in editable
form by its own build backend, without a network.
"""

import ast
import configparser
import contextlib
import hashlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workers.grading.controls.spans import read
from workers.harness.building import PackageError, run, wheels_for
from workers.making.ecosystems.ecosystem import BaseEnvironment, Declaration, Declared
from workers.making.history import Fallen, GitError, History

TEST_MODULE = re.compile(r"(?:[\w.+-]+/)*(?:test_[\w.+-]*|[\w.+-]*_test)\.py", re.ASCII)
_METADATA = re.compile(
    r"(?:pyproject\.toml|setup\.(?:cfg|py)|tox\.ini|(?:[\w-]+/)?[\w.-]*requirements[\w.-]*\.(?:txt|in)|requirements/[\w.-]+\.(?:txt|in)"
    r"|(?:poetry|uv|pdm)\.lock|Pipfile(?:\.lock)?)"
)
_REQUIREMENTS_FILE = re.compile(
    r"requirements\.txt|(?=.*(?:test|dev|base|ci)).*requirements[\w.-]*\.txt|requirements/(?:base|ci|tests?|testing|dev)\.txt"
)
_EXTRAS = ("test", "tests", "testing", "dev")
REQUIREMENT = re.compile(
    r"([A-Za-z0-9][\w.-]*)\s*(?:\[[\w,. -]*\])?\s*\(?(?:[<>=!~][\w.*+!<>=~, ]*)?\)?\s*(?:;.*)?", re.ASCII
)
_NO_NETWORK = re.compile(
    r"Retrying \(|ConnectionError|Connection (?:refused|reset)|timed out|SSLError|ProxyError"
)
_PROBE = """import importlib.util, json, sys, sysconfig
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "site": sysconfig.get_path("purelib"),
 "has_pytest": importlib.util.find_spec("pytest") is not None}))"""
_PERIOD = """FROM {base}
COPY bin /usr/local/bin
COPY site {site}
ENV PYTHONDONTWRITEBYTECODE=1
"""
# The version that backends which ask git for it are given.
_INSTALL = """RUN SETUPTOOLS_SCM_PRETEND_VERSION=99.0 PBR_VERSION=99.0 python3 -m pip install --quiet --no-index --no-deps \\
 --no-build-isolation --no-cache-dir --no-compile --break-system-packages --root-user-action=ignore --disable-pip-version-check \\
 --editable .
"""


class PythonEcosystem:
    """The ecosystem of Python."""

    language = "Python"
    ending = ".py"
    module_names = "test_*.py or *_test.py"
    base_image = "swerve/task-base:1"
    base_needs = "git and python3"
    probe = f"git --version >&2 && exec python3 -c '{_PROBE}' 2>/dev/null"

    def is_module(self, path: str) -> bool:
        return TEST_MODULE.fullmatch(path) is not None

    def meaning(self, source: bytes) -> str | bytes | None:
        return _meaning(source)

    def names(self, source: bytes) -> frozenset[str]:
        return names_in_code(source)

    def declarations(self, source: bytes) -> Iterator[Declaration]:
        file = read(source)
        return _declarations(file.tree, _classes(file.tree)) if file else iter(())

    def namespace(self, path: str) -> str:
        return path

    def may_leave_out(self, test: str) -> bool:
        return "::" in test

    def eval_script(
        self, modules: Iterable[str], left_out: Iterable[str] = (), run: Iterable[str] = ()
    ) -> str:
        # A name that begins like an option would be one.
        modules, out = [f"./{path}" if path.startswith("-") else path for path in modules], tuple(left_out)
        words = [*(f"--deselect={name}" for name in out), *modules]
        kept = sorted({*run} - {*out})
        # pytest leaves out every test whose name begins so; where that is one too many, all that stay are named.
        is_known = all(name.partition("::")[0] in modules for name in kept)
        if is_known and any(name.startswith(out) for name in kept):
            words = kept
        return (
            f"#!/bin/bash\ncd /workspace || exit 1\npython3 -m pytest {' '.join(map(shlex.quote, words))}\n"
        )

    def declared(self, history: History, commit: str, extra: Iterable[str]) -> Declared:
        return declared(history, commit, extra)

    def fetch(self, needs: Declared, base: BaseEnvironment, until: str, context: Path) -> tuple[str, str]:
        versions = _fetch(needs, base, until, context)
        return _PERIOD.format(base=base.image, site=base.found["site"]), versions

    def install(self, needs: Declared) -> str:
        return _INSTALL if needs.build else ""


ECOSYSTEM = PythonEcosystem()


def _meaning(source: bytes) -> str | None:
    """The code without layout, comments and docstrings, but with log lines, messages and annotations, which tests may notice; None if it
    does not parse.
    """
    file = read(source)
    if file is None:
        return None
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                    node.body = rest
                case _:
                    pass
    try:
        return ast.dump(file.tree)
    except RecursionError:
        return source.decode("utf-8", "replace")


def names_in_code(source: bytes) -> frozenset[str]:
    """The names in Python source; none if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name", "asname"):
            if isinstance(value := getattr(node, name, None), str):
                found.update(value.split("."))
    return frozenset(found)


def _classes(tree: ast.AST) -> dict[str, ast.ClassDef]:
    """The classes of a module by their names."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _declarations(
    parent: ast.AST, classes: Mapping[str, ast.ClassDef], owner: str = ""
) -> Iterator[Declaration]:
    """What the statements of a module or class declare, those inside of other statements included. `classes` are those of the module."""
    for node in _statements(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node, owner)
        elif isinstance(node, ast.ClassDef):
            yield Declaration(node.name, f"`class {node.name}{_constructor(node, classes)}`", owner)
            yield from _declarations(node, classes, node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _assigned(node, owner)
        elif isinstance(node, ast.ImportFrom) and not owner:
            source = f"{'.' * node.level}{node.module or ''}"
            for alias in node.names:
                name = alias.asname or alias.name
                yield Declaration(name, f"`{name}`, imported from `{source}`", imported_from=source)


def _statements(parent: ast.AST) -> Iterator[ast.AST]:
    """What is in a module or class, in order, with what is inside of other statements. A thousand branches of an `if` are as deep."""
    waiting = [*ast.iter_child_nodes(parent)][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _BLOCKS):
            waiting += [*ast.iter_child_nodes(node)][::-1]


_BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With, ast.ExceptHandler, ast.For, ast.While, ast.Match, ast.match_case)  # fmt: skip
_PROPERTIES = frozenset(("property", "cached_property"))
_DATA_CLASSES = frozenset(("dataclass", "define", "frozen", "mutable", "attrs", "s", "NamedTuple"))
"""The last names of decorators and bases that make a constructor of a class's fields."""
_FIELDS = frozenset(("field", "ib", "attrib"))
_DEFAULTS = frozenset(("default", "default_factory", "factory"))
"""What makes a field, and its arguments that give it a default."""


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Iterator[Declaration]:
    """A function, how a property is read or set, and the attributes that it sets. An overload is another view of a function."""
    decorators = frozenset(_decorators(node))
    if "overload" in decorators:
        return
    text = f"`{'def' if isinstance(node, ast.FunctionDef) else 'async def'} {node.name}({_parameters(node.args)})`"
    if not _PROPERTIES.isdisjoint(decorators):
        text = f"property `{node.name}`"
    elif accessor := decorators & {"setter", "deleter"}:
        text = f"{min(accessor)} of the property `{node.name}`"
    yield Declaration(node.name, text, owner)
    yield from _attributes(node, owner)


def _constructor(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> str:
    """The parameters of the call of a class in brackets; nothing if it does not say them itself."""
    for name in ("__init__", "__new__"):
        for made in node.body:
            if isinstance(made, ast.FunctionDef) and made.name == name:
                return f"({_parameters(made.args, is_bound=True)})"
    decorating = _data_decorator(node)
    is_made = decorating is not None and _is_given(decorating, "init", default=True)
    return f"({_as_parameters(_fields(node, classes))})" if is_made or _is_named_tuple(node) else ""


def _assigned(statement: ast.Assign | ast.AnnAssign, owner: str) -> Iterator[Declaration]:
    """The names and attributes that a statement gives values to, with how they are called where it says so."""
    value = statement.value
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    called, fields = "", list[str]()
    if isinstance(value, ast.Lambda):
        called = f"({_parameters(value.args)})"
    elif isinstance(value, ast.Call) and _last_name(value.func) in ("namedtuple", "NamedTuple"):
        fields = _written_fields(value)
        called = f"({', '.join(fields)})" if fields else ""
    for node in (found for target in targets for found in ast.walk(target)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield Declaration(name, f"`{name}{called}`", owner, is_keyword=bool(owner))
                yield from (Declaration(field, f"`{field}`", name) for field in fields)
            case ast.Attribute(value=ast.Name(id=of), attr=name, ctx=ast.Store()):
                yield Declaration(name, f"attribute `{name}`", of)
            case _:
                pass


def _written_fields(call: ast.Call) -> list[str]:
    """The fields of a named tuple that a call makes; none if they are not written there."""
    try:
        written: object = ast.literal_eval(call.args[1])
    except (IndexError, ValueError, TypeError, RecursionError, MemoryError):
        pairs = (
            call.args[1].elts if len(call.args) > 1 and isinstance(call.args[1], ast.List | ast.Tuple) else []
        )
        written = [one.elts[0].value for one in pairs if isinstance(one, ast.Tuple) and one.elts
                   and isinstance(one.elts[0], ast.Constant)]  # fmt: skip
    if isinstance(written, str):
        return written.replace(",", " ").split()
    names = list(cast("Iterable[object]", written)) if isinstance(written, list | tuple) else []
    return [one for one in names if isinstance(one, str)]


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    """The last name of each decorator."""
    for one in node.decorator_list:
        yield _last_name(one.func if isinstance(one, ast.Call) else one)


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` and of `c[d]`; empty for another expression."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _data_decorator(node: ast.ClassDef) -> ast.expr | None:
    """The decorator that makes a data class; None if there is none."""
    names = zip(_decorators(node), node.decorator_list, strict=True)
    return next((one for name, one in names if name in _DATA_CLASSES), None)


def _is_named_tuple(node: ast.ClassDef) -> bool:
    return any(_last_name(one) == "NamedTuple" for one in node.bases)


def _is_given(node: ast.expr, name: str, *, default: bool) -> bool:
    """The truth value that a call gives to a keyword; the default for one without it, and for what is no call."""
    keywords = node.keywords if isinstance(node, ast.Call) else []
    given = (one.value for one in keywords if one.arg == name)
    return next((bool(one.value) for one in given if isinstance(one, ast.Constant)), default)


@dataclass(frozen=True, slots=True)
class _Field:
    """What a field of a data class is as a parameter of its constructor."""

    has_default: bool
    is_keyword_only: bool


def _fields(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, _Field]:
    """The parameters of a data class's constructor, those of its bases in the same module first."""
    found: dict[str, _Field] = {}
    others = {name: one for name, one in classes.items() if name != node.name}
    for base in reversed(node.bases):
        parent = others.get(_last_name(base))
        if parent and _data_decorator(parent) is not None:
            found |= _fields(parent, others)
    decorating = _data_decorator(node)
    is_keyword_only = decorating is not None and _is_given(decorating, "kw_only", default=False)
    is_attrs = decorating is not None and next(_decorators(node)) != "dataclass"
    for one in node.body:
        value = one.value if isinstance(one, ast.Assign | ast.AnnAssign) else None
        made = value if isinstance(value, ast.Call) and _last_name(value.func) in _FIELDS else None
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name, kind = one.target.id, _last_name(one.annotation)
        elif made and isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            name, kind = one.targets[0].id, ""
        else:
            continue
        if kind == "KW_ONLY":
            is_keyword_only = True
        elif kind != "ClassVar" and (made is None or _is_given(made, "init", default=True)):
            keywords = {keyword.arg for keyword in made.keywords} if made else set[str | None]()
            has_default = not keywords.isdisjoint(_DEFAULTS) if made else value is not None
            name = name.lstrip("_") if is_attrs else name
            only = is_keyword_only if made is None else _is_given(made, "kw_only", default=is_keyword_only)
            found[name] = _Field(has_default, only)
    return found


def _as_parameters(fields: Mapping[str, _Field]) -> str:
    """The fields as parameters, each default as three dots."""
    plain, only = (
        [
            f"{name}=..." if one.has_default else name
            for name, one in fields.items()
            if one.is_keyword_only == is_only
        ]
        for is_only in (False, True)
    )
    return ", ".join([*plain, "*", *only] if only else plain)


def _attributes(function: ast.AST, owner: str) -> Iterator[Declaration]:
    """The attributes that a function sets: those of `self` are of the class."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=of), attr=name, ctx=ast.Store()):
                yield Declaration(name, f"attribute `{name}`", owner if of == "self" else of)
            case _:
                pass


def _parameters(arguments: ast.arguments, *, is_bound: bool = False) -> str:
    """The parameters without annotations, each default as three dots; without the first if the call does not give it."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(one.arg) for one in arguments.posonlyargs],
        args=[ast.arg(one.arg) for one in arguments.args],
        vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
        kwonlyargs=[ast.arg(one.arg) for one in arguments.kwonlyargs],
        kw_defaults=[one and ast.Constant(...) for one in arguments.kw_defaults],
        kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
        defaults=[ast.Constant(...) for _ in arguments.defaults],
    )
    if is_bound:
        del (bare.posonlyargs or bare.args)[:1]
    return ast.unparse(bare)


def declared(history: History, commit: str, extra: Iterable[str] = ()) -> Declared:
    """The requirements in the metadata of `commit`, and `extra` ones."""
    blobs = {path: sha for path, sha in history.files(commit).items() if _METADATA.fullmatch(path)}
    texts: dict[str, str] = {}
    for path, sha in blobs.items():
        with contextlib.suppress(GitError):
            texts[path] = history.blob(sha).decode("utf-8", "replace")
    name, found, build = _project(texts)
    for path in sorted(texts):
        if _REQUIREMENTS_FILE.fullmatch(path):
            found += [re.split(r"\s#|\s--hash", line)[0].rstrip(" \\") for line in texts[path].splitlines()]
    lines = [one for one in found if one and not one.startswith(("#", "--hash", "-r", "-c", "-e .", " "))]
    plain = {one: match for one in (*lines, *extra) if (match := REQUIREMENT.fullmatch(one))}
    return Declared(
        requirements=tuple(sorted(one for one, match in plain.items() if _normal(match[1]) != _normal(name))),
        build=tuple(one for one in build if REQUIREMENT.fullmatch(one)),
        left_out=tuple(dict.fromkeys(one for one in lines if one not in plain)),
        fingerprint=hashlib.sha256(repr(sorted(blobs.items())).encode()).hexdigest(),
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _project(texts: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """The name, the requirements and those of the build backend, from pyproject.toml, setup.cfg and setup.py."""
    try:
        pyproject: dict[str, Any] = tomllib.loads(texts.get("pyproject.toml", ""))
    except (ValueError, RecursionError):  # of what is no TOML, of numbers that are too long, of deep nesting
        pyproject = {}
    project = _table(pyproject.get("project"))
    found = [*_strings(project.get("dependencies"))]
    for table in (_table(project.get("optional-dependencies")), _table(pyproject.get("dependency-groups"))):
        found += [one for extra in _EXTRAS for one in _strings(table.get(extra))]
    config = configparser.ConfigParser(interpolation=None, strict=False)
    with contextlib.suppress(configparser.Error):
        config.read_string(texts.get("setup.cfg", ""))
    for section, keys in (
        ("options", ("install_requires", "tests_require")),
        ("options.extras_require", _EXTRAS),
    ):
        found += [line.strip() for key in keys for line in config.get(section, key, fallback="").splitlines()]
    found += _in_setup(texts.get("setup.py", ""))
    system = _table(pyproject.get("build-system"))
    can_install = bool(system or project or "setup.py" in texts or config.has_section("metadata"))
    build = [*_strings(system.get("requires")), "wheel"] if system else ["setuptools", "wheel"]
    if any(one.startswith("hatchling") for one in build):
        build.append("editables")
    name = project.get("name") or config.get("metadata", "name", fallback="")
    return str(name), found, ["pip", *build] if can_install else []


def _in_setup(source: str) -> Iterator[str]:
    """The requirements that setup.py writes out in its call of `setup`."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setup"):
                for keyword in node.keywords:
                    with contextlib.suppress(ValueError):
                        if keyword.arg in ("install_requires", "tests_require"):
                            yield from _strings(ast.literal_eval(keyword.value))
                        elif keyword.arg == "extras_require":
                            extras = _table(ast.literal_eval(keyword.value))
                            yield from (one for extra in _EXTRAS for one in _strings(extras.get(extra)))


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _strings(value: object) -> list[str]:
    values = (
        [value] if isinstance(value, str) else cast("list[object]", value) if isinstance(value, list) else []
    )
    return [one.strip() for one in values if isinstance(one, str)]


def _fetch(needs: Declared, base: BaseEnvironment, until: str, context: Path) -> str:
    """Puts packages and their programs into `context`. Returns how versions were limited. Raises Fallen, PackageError."""
    site, programs = context / "site", context / "bin"
    for directory in (site, programs):
        directory.mkdir(mode=0o755)
    wanted = [*needs.requirements, *needs.build, *([] if base.found["has_pytest"] else ["pytest"])]
    if not wanted:
        return ""
    (context / "wanted.txt").write_text("".join(f"{one}\n" for one in wanted))
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    words += [
        *wheels_for(base.found["version"]),
        f"--target={site}",
        f"--requirement={context / 'wanted.txt'}",
    ]
    versions = ""
    if until and not (versions := _unlimited()):
        versions = until
        words.append(f"--uploaded-prior-to={until}")
    try:
        run(words)
    except PackageError as error:
        if _NO_NETWORK.search(str(error)):
            raise
        if "upload-time" not in str(error):
            raise Fallen("dependencies cannot be installed", _last_line(str(error))) from error
        versions = "not limited: the package index does not say when a file was uploaded"
        run(words[:-1])
    for file in sorted((site / "bin").glob("*")):
        first, _, rest = file.read_bytes().partition(b"\n")
        (programs / file.name).write_bytes(
            (b"#!/usr/bin/env python3" if first[:2] == b"#!" else first) + b"\n" + rest
        )
        (programs / file.name).chmod(0o755)
        file.unlink()
    return versions


def _last_line(text: str) -> str:
    return text.strip().split("\n")[-1][-300:]


def _unlimited() -> str:
    """Why pip cannot limit versions by a date; "" if it can."""
    words = (sys.executable, "-m", "pip", "install", "--help")
    shown = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    return "" if "--uploaded-prior-to" in shown else "not limited: pip here is older than 26.0, update it"
