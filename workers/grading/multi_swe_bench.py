"""The only module that knows the multi-swe-bench package (1.1): for each repository it has a class with the name of the image, the script
that runs the tests, and the parser of their log. Each class is in a module of its own.
"""

import contextlib
import functools
import importlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.grading.packages import NotInPackage, root_of, stand_in

PREFIX = "multi_swe_bench:"  # of the names of its parsers in tasks
_PACKAGE = "multi_swe_bench"
_TEST_RUN = "test-run.sh"  # the file that applies the hidden tests and runs the tests
_ROOT = root_of(_PACKAGE, "multi-swe-bench>=1.1,<2")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and how the tests of a pull request run."""

    image: str
    test_run: str  # the script, which expects the hidden tests in /home/test.patch


def environment(org: str, repo: str, number: int, registered: str) -> Environment:
    """The environment of a pull request. `registered` is the name of the repository's class, without the organization. Raises
    NotInPackage.
    """
    found = _instance(org, repo, number, registered)
    try:
        image = found.dependency()
        scripts = [file.content for file in image.files() if file.name == _TEST_RUN]
        _read(found, "")
    except Exception as error:
        raise NotInPackage(f"the class of {org}/{registered} fails: {error}") from error
    if not scripts:
        raise NotInPackage(f"the image of {org}/{registered} has no {_TEST_RUN}")
    return Environment(image.image_full_name(), scripts[0])


def parsed(log_parser: str, version: str, log: str) -> dict[str, str]:
    """Status by name, as the parser of the name `log_parser`, "multi_swe_bench:ORG/REPO", reads the log of the pull request
    whose number is `version`. Raises NotInPackage.
    """
    org, _, registered = log_parser.removeprefix(PREFIX).partition("/")
    return _read(_instance(org, registered, int(version), registered), log)


def is_parser(log_parser: str) -> bool:
    """Whether the package has the parser of this name."""
    org, _, registered = log_parser.removeprefix(PREFIX).partition("/")
    try:
        _class(org, registered)
    except NotInPackage:
        return False
    return True


def _read(instance: Any, log: str) -> dict[str, str]:
    with contextlib.redirect_stdout(io.StringIO()):  # some parsers print
        found = instance.parse_log(log)
    # A skipped test does not count as one that passes.
    by_status = {"PASSED": found.passed_tests, "FAILED": found.failed_tests}
    return {name: status for status, names in by_status.items() for name in names}


def _instance(org: str, repo: str, number: int, registered: str) -> Any:
    """The object of a pull request, of which the package reads nothing but these names and the number here."""
    found = _class(org, registered)
    pull_requests: Any = importlib.import_module(f"{_PACKAGE}.harness.pull_request")
    images: Any = importlib.import_module(f"{_PACKAGE}.harness.image")
    pull_request = pull_requests.PullRequest(
        org=org,
        repo=repo,
        number=number,
        state="",
        title="",
        body="",
        base=pull_requests.Base(label="", ref="", sha=""),
        resolved_issues=[],
        fix_patch="",
        test_patch="",
    )
    return found(pull_request, images.Config(need_clone=False, global_env=None, clear_env=False))


@functools.cache
def _class(org: str, registered: str) -> Any:
    """The class that is registered for a repository. Raises NotInPackage."""
    registration = re.compile(
        rf"""^@Instance\.register\(\s*["']{re.escape(org)}["'],\s*["']{re.escape(registered)}["']""",
        re.MULTILINE,
    )
    for path in _files_of(org):
        if registration.search(path.read_text()):
            instances: Any = importlib.import_module(f"{_PACKAGE}.harness.instance")
            importlib.import_module(".".join((_PACKAGE, *path.relative_to(_ROOT).with_suffix("").parts)))
            return instances.Instance._registry[f"{org}/{registered}"]
    raise NotInPackage(f"multi-swe-bench has no repository {org}/{registered}")


def _files_of(org: str) -> Iterator[Path]:
    """The modules of an organization's repositories; stand-ins for the packages around them are in place."""
    letters = re.compile(r"[\W_]+")
    folder = letters.sub("", org).lower()
    for language in sorted((_ROOT / "harness" / "repos").iterdir()):
        for found in sorted(language.iterdir()) if language.is_dir() else ():
            if letters.sub("", found.name).lower() == folder:
                _stand_in(*found.relative_to(_ROOT).parts)
                yield from sorted(found.rglob("*.py"))


def _stand_in(*parts: str) -> None:
    """Replaces the package of these parts, and the packages that it is in."""
    for num_parts in range(len(parts) + 1):
        stand_in(".".join((_PACKAGE, *parts[:num_parts])), _ROOT.joinpath(*parts[:num_parts]))
