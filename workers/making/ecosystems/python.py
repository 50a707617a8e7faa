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
        return _declarations(file.tree) if file else iter(())

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


def _declarations(parent: ast.AST, owner: str = "") -> Iterator[Declaration]:
    """What the statements of a module or class declare, those inside of other statements included."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            word = "def" if isinstance(node, ast.FunctionDef) else "async def"
            called = f"`{word} {node.name}({_parameters(node.args)})`"
            is_property = not _PROPERTIES.isdisjoint(_decorators(node))
            yield Declaration(node.name, f"property `{node.name}`" if is_property else called, owner)
            yield from _attributes(node, owner)
        elif isinstance(node, ast.ClassDef):
            made = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
            called = ""
            if isinstance(made, ast.FunctionDef):
                called = f"({_parameters(made.args, is_bound=True)})"
            elif not _DATA_CLASSES.isdisjoint((*_decorators(node), *map(_last_name, node.bases))):
                called = f"({', '.join(_fields(node))})"
            yield Declaration(node.name, f"`class {node.name}{called}`", owner)
            yield from _declarations(node, node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield Declaration(target.id, f"`{target.id}`", owner, is_keyword=bool(owner))
        elif isinstance(node, ast.ImportFrom) and node.level and not owner:
            for alias in node.names:
                name = alias.asname or alias.name
                yield Declaration(
                    name, f"`{name}`, imported from `{'.' * node.level}{node.module or ''}`", owner
                )
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _declarations(node, owner)


_PROPERTIES = frozenset(("property", "cached_property"))
_DATA_CLASSES = frozenset(("dataclass", "define", "frozen", "mutable", "attrs", "s", "NamedTuple"))
"""The last names of decorators and bases that make a constructor of a class's fields."""


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    """The last name of each decorator."""
    for one in node.decorator_list:
        yield _last_name(one.func if isinstance(one, ast.Call) else one)


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; empty for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a data class, as parameters of its constructor."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield f"{one.target.id}=..." if one.value else one.target.id


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
