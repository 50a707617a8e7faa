"""Code that all commands share: their names, directories as arguments, and the meanings of exit statuses (docs/operate.md has the table).

A command that lacks a package names it in one line, instead of a traceback; one that Ctrl-C ends prints nothing. Each package calls
`name_missing_packages()` in its `__init__.py`, which Python runs before the first line of any command in it, and so before that command's
own imports can fail. It applies to `python -m ...` only (and to `swerve`, which does the same): a program that imports us gets the ordinary
ModuleNotFoundError.

Some command lines contain another program's flags: our own flags, then `--`, then flags that are passed on unchanged.
"""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

FAILED = 1
"""The requested work did not succeed, or a service that it needs does not answer: the same command may succeed later."""

MISUSE = 2
"""The user made a mistake, and the same command would fail again."""


class NotAnswering(Exception):
    """A service that a command needs does not answer. The command ends with the exit status FAILED."""


_front: tuple[str, tuple[str, ...], str] | None = None
"""The module, its first arguments and the word by which `swerve` started it."""


def started_by_swerve(module: str, first: tuple[str, ...], word: str) -> None:
    """Usage lines of `module` name the command `swerve WORD` from now on. `first` are the arguments that WORD replaces."""
    global _front
    _front = module, first, word


def program(module: str, *first: str) -> str:
    """The name of a command in its usage line, as the user started it. `first` are its first arguments if the parser is theirs alone."""
    if _front is None or _front[0] != module:
        return " ".join(("python -m", module, *first))
    _, stood_for, word = _front
    if first or not stood_for:
        return f"swerve {word}"
    return "swerve"  # argparse adds the first argument


class _VerbParser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


VERB_PARSER: type[argparse.ArgumentParser] = _VerbParser
"""The parser of one verb, for `add_subparsers`. It refuses an argument that it does not know itself: argparse leaves that to the parser of
all verbs, whose usage line does not mention this verb or `swerve WORD`.
"""


def status_of(error: Exception) -> int:
    """The exit status of a command that `error` ended."""
    return FAILED if isinstance(error, NotAnswering) else MISUSE


def directory(text: str) -> Path:
    """A directory that exists, as a type for argparse. Without this type, a missing directory would be reported as empty."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory")
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


OURS = {"benchmarks", "infra", "pipeline", "trainer", "workers"}
FIX = "enter the environment (. .venv/bin/activate) or run make setup"


def name_missing_packages() -> None:
    """Makes the error of a missing package end the command with one line and exit status 2."""
    # Python sets argv[0] to this while it looks for the module to run, which is when it imports that module's package.
    if sys.argv[0] == "-m":
        sys.excepthook = _on_uncaught


def missing_package(error: BaseException) -> str | None:
    """The package that has to be installed, if that is what `error` is about. A module that one of our own or an installed package lacks is
    a defect: None, so that its traceback is printed.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return package if package not in OURS and importlib.util.find_spec(package) is None else None


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)  # the interpreter takes it as the process's status
    package = missing_package(error)
    if package is None:
        sys.__excepthook__(kind, error, traceback)
        return
    # If the error has another text, whoever raised it knows a better fix than ours.
    is_pythons = str(error).startswith("No module named")
    print(f"error: {package} is not installed: {FIX}" if is_pythons else f"error: {error}", file=sys.stderr)
    sys.exit(MISUSE)


def parse_own_part(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments before the first `--`; those after it become `passed_on`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser.parse_args(arguments[:end])
    parsed.passed_on = arguments[end + 1 :]
    return parsed


def refuse(error: ValueError) -> NoReturn:
    """End the process with the user's mistake in one line."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(MISUSE) from error
