"""Steps in a grading container, and the evidence about whose fault a failure is.

The steps are bash functions in steps.sh. Their inputs are files in GRADE_DIR, outside the repository, and arguments.
"""

import functools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import GraderError
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, is_starved

STEP_S = 300.0  # limit for each step before the tests, and for a parser
TAIL_BYTES = 500
STEPS = Path(__file__).with_name("steps.sh")
GRADE_DIR = "/swerve-grade"
PATCH = f"{GRADE_DIR}/model.diff"
TESTS = f"{GRADE_DIR}/tests.diff"
EVAL = f"{GRADE_DIR}/eval.sh"
PROTECTED = f"{GRADE_DIR}/protected"  # repository-relative paths, each with a NUL after it
TESTED = f"{GRADE_DIR}/tested"  # the same for other files that hold tests, and for files that tests read
TAMPERED = f"{GRADE_DIR}/tampered"  # the same for settings files that a patch may not keep
START = f"{GRADE_DIR}/start"  # made in the first step: files that are not older came with the patch
PARSER = f"{GRADE_DIR}/parser.py"
LOG = f"{GRADE_DIR}/stdout.log"
NO_LOG = f"{GRADE_DIR}/stderr.log"

APPLIED_BY = {70: "git apply", 71: "git apply --3way", 72: "patch --fuzz"}
DOES_NOT_APPLY = 73
TESTS_DO_NOT_APPLY = 74  # the hidden tests do not apply to the base commit either
NO_PYTHON = 75
IN_THE_WAY = 76  # the hidden tests apply to the base commit, but not with the patch


class StepFailed(GraderError):
    """A step in a container with a patch failed, or took too long on a machine that had CPU for it.

    It is the patch's fault if the same steps succeed without the patch. `output` is the end of what the step printed.
    """

    def __init__(self, how: str, output: str = "", cpu_s: float = 0.0) -> None:
        super().__init__(f"{how}: {output}" if output else how)
        self.how = how
        self.output = output
        self.cpu_s = cpu_s


def failed_step(doing: str, result: CommandResult) -> GraderError:
    """The error of a step that did not succeed: StepFailed, unless the machine had no CPU for it."""
    if result.exit_code is not None:
        return StepFailed(f"{doing} ended with status {result.exit_code}", tail(result))
    if is_starved(result):
        return GraderError(f"{doing} took too long on a machine without CPU for it: {tail(result)}")
    return StepFailed(f"{doing} took too long", tail(result))


def tail(result: CommandResult) -> str:
    """The end of the step's output."""
    return result.output[-TAIL_BYTES:].decode("utf-8", "replace").strip()


def step(name: str, **arguments: str | Iterable[str]) -> str:
    """The bash that calls the function `name` of steps.sh, with its arguments as variables; arguments with several values become arrays.
    Run it in the workdir.
    """
    functions = _functions()
    needed: dict[str, str] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in needed:
            needed[one] = functions[one]
            waiting += functions.keys() & set(re.findall(r"\w+", functions[one]))
    given = {"GRADE": GRADE_DIR, **arguments}
    said = [
        f"{key}={shlex.quote(value) if isinstance(value, str) else f'({shlex.join(value)})'}\n"
        for key, value in given.items()
        if any(re.search(rf"\b{key}\b", text) for text in needed.values())
    ]
    return "".join((GIT, *needed.values(), *said, f"{name}\n"))


def find_installations(places: Iterable[str] = ()) -> str:
    """The bash that sets `folders` to the package directories of the Pythons that it finds, including those in `places`."""
    return step("find_installations", PLACES=places)


@functools.cache
def _functions() -> dict[str, str]:
    """The functions of steps.sh by their names, without comments: sending bytes into a container takes time."""
    text = re.sub(r"^\s*#.*\n", "", STEPS.read_text("utf-8"), flags=re.MULTILINE)
    return {
        found[1]: found[0]
        for found in re.finditer(r"^(\w+)\(\) \{\n.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    }
