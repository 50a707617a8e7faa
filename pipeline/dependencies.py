"""A command started without its packages names the missing one in one line, instead of a traceback.

Each package calls `name_missing_packages()` in its `__init__.py`, which Python runs before the first line of any command in it, and
so before that command's own imports can fail. It applies to `python -m ...` only (and to `swerve`, which does the same): a program
that imports us gets the ordinary ModuleNotFoundError.
"""

import importlib.util
import sys
from types import TracebackType

OURS = {"benchmarks", "infra", "pipeline", "trainer", "workers"}
FIX = "enter the environment (. .venv/bin/activate) or run make setup"
MISUSE = 2


def name_missing_packages() -> None:
    """From now on, a package that the command lacks ends it with one line and exit status 2."""
    # Python sets argv[0] to this while it looks for the module to run, which is when it imports that module's package.
    if sys.argv[0] == "-m":
        sys.excepthook = _on_uncaught


def missing_package(error: BaseException) -> str | None:
    """The package that has to be installed, if that is what `error` is about. A module that one of our own or an installed package
    lacks is a defect: None, for its traceback is wanted.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return package if package not in OURS and importlib.util.find_spec(package) is None else None


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    package = missing_package(error)
    if package is None:
        sys.__excepthook__(kind, error, traceback)
        return
    # Whoever raises it with words of its own knows a better fix than ours.
    is_pythons = str(error).startswith("No module named")
    print(f"error: {package} is not installed: {FIX}" if is_pythons else f"error: {error}", file=sys.stderr)
    sys.exit(MISUSE)  # the interpreter takes it as the process's status
