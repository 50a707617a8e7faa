"""The only module that knows the swesmith package (0.0.9): for each repository in another language than Python it has a profile with the
command that runs the tests, and the parser of their log.

Its modules import packages that call GitHub, and constants of swebench 4. Empty ones replace these during the import.
"""

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Generator, Mapping
from types import ModuleType
from typing import Any

from workers.grading.packages import NotInPackage, root_of, stand_in

PREFIX = "swesmith:"  # of the names of its parsers in tasks
_ROOT = root_of("swesmith", "swesmith==0.0.9")
_PROFILES = "swesmith.profiles"
_ABSENT = {"dotenv": ("load_dotenv",), "ghapi": (), "ghapi.all": ("GhApi",)}
_CONSTANTS = "swebench.harness.constants"
_OF_SWEBENCH_4 = {"DOCKER_USER": "root", "DOCKER_WORKDIR": "/testbed", "KEY_INSTANCE_ID": "instance_id"}
# Languages of which a command that builds nothing runs the programs in the image, whatever a patch changes.
_COMPILED = frozenset(("c", "cpp"))
_BUILDS = re.compile(r"\b(?:make|ninja|bazel|meson)\b|\bcmake --build\b")
# CMake's target `test` builds nothing, either.
_ONLY_TESTS = re.compile(r"\bninja\b[^;&|]*\btest\b")
_TESTS = re.compile(r"test|check")
# How surefire ends the line of a test that failed, or that an exception ended. The parsers of Maven's logs take some of them for passes.
_SUREFIRE_FAILURE = re.compile(
    r"^(?:\[\w+\]\s+(?P<named>.*?)\s+--\s+|(?P<method>\w+)\((?P<class>[\w.$]+)\)\s+)Time elapsed:.*<<< (?:FAILURE|ERROR)!\s*$"
)


def command(repository: str, row: Mapping[str, object]) -> str:
    """The command that runs the tests of a row, in the repository's directory. Raises NotInPackage if there is none that could grade a
    patch.
    """
    profile = _profile(repository)
    try:
        found, _ = profile.get_test_cmd(row)
        profile.log_parser("")
    except Exception as error:
        raise NotInPackage(f"the profile of {repository} fails: {error}") from error
    if _language(profile) in _COMPILED:
        if not _BUILDS.search(_ONLY_TESTS.sub("", found)):
            raise NotInPackage(
                f"the command of {repository}, {found!r}, does not build what it tests: a patch would change no result"
            )
        if not _TESTS.search(found):
            raise NotInPackage(f"the command of {repository}, {found!r}, runs no tests")
    return found


def parsed(log_parser: str, _version: str, log: str) -> dict[str, str]:
    """Status by name, as the parser of the name `log_parser`, "swesmith:OWNER__REPO.COMMIT", reads a log. A test that failed or ended with
    an exception in a log of surefire is FAILED, whatever the parser says. Raises NotInPackage.
    """
    statuses = dict(_profile(log_parser.removeprefix(PREFIX)).log_parser(log))
    for line in log.split("\n"):
        if "<<< " in line and (found := _SUREFIRE_FAILURE.match(line.strip())):
            name = found["named"] or f"{found['class']}.{found['method']}"
            if name in statuses:
                statuses[name] = "FAILED"
    return statuses


def is_parser(log_parser: str) -> bool:
    """Whether the package has the parser of this name."""
    return _registered(log_parser.removeprefix(PREFIX)) is not None


def _language(profile: Any) -> str:
    return type(profile).__module__.rpartition(".")[2]


def _profile(repository: str) -> Any:
    """The profile of a repository, "OWNER__REPO.COMMIT" with eight digits of the commit. Raises NotInPackage."""
    found = _registered(repository)
    if found is None:
        raise NotInPackage(f"swesmith 0.0.9 has no repository {repository} in another language than Python")
    return found


@functools.cache
def _registered(repository: str) -> Any:
    """The profile of a repository, None if there is none."""
    stand_in(_PROFILES, _ROOT / "profiles")
    commit = repository.rpartition(".")[2]
    for path in sorted((_ROOT / "profiles").glob("*.py")):
        if path.stem != "python" and f'commit: str = "{commit}' in path.read_text():
            with _stand_ins():
                importlib.import_module(f"{_PROFILES}.{path.stem}")
            registry: Any = importlib.import_module(f"{_PROFILES}.base").registry
            if repository in registry:
                return registry.get(repository)
    return None


@contextlib.contextmanager
def _stand_ins() -> Generator[None]:
    """Modules that the profiles import, and that are not installed or are of another release, are replaced."""
    stand_in("swebench.harness", root_of("swebench", "swebench>=5,<6") / "harness")
    modules = {name: ModuleType(name) for name in (*_ABSENT, _CONSTANTS)}
    for name, attributes in _ABSENT.items():
        for attribute in attributes:
            setattr(modules[name], attribute, type(attribute, (), {}))
    modules[_CONSTANTS].__dict__.update(vars(importlib.import_module(_CONSTANTS)) | _OF_SWEBENCH_4)
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
