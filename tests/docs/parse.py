"""Gives command lines to the real argument parsers, and stops right after the parse: run as a program.

Reads a JSON list of {"words": [...], "partial": bool} from standard input, and prints a list of what is wrong with each, "" if nothing.
The words are those after `python -m`. Of a partial one only the flags are looked at.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline import commandline

PARSES = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}


class Parsed(BaseException):
    """The command line was understood; the command itself must not run."""


class Reached(BaseException):
    """The flags that the command knows."""

    def __init__(self, flags: set[str]) -> None:
        self.flags = flags


def main() -> int:
    warnings.simplefilter("ignore")
    commandline.directory = Path  # the directories of an example are the reader's
    print(json.dumps([_wrong(**command) for command in json.load(sys.stdin)]))
    return 0


def _wrong(words: list[str], partial: bool) -> str:
    def replaced(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
        def parsed(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> argparse.Namespace:
            if partial:
                raise Reached(set(_flags(parser)))
            parse(parser, *arguments, **named)
            raise Parsed

        return parsed

    for name, parse in PARSES.items():
        setattr(argparse.ArgumentParser, name, replaced(parse))
    said = io.StringIO()
    sys.argv = ["-m", *words[1:]]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except Parsed:
        return ""
    except Reached as reached:
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - reached.flags - {"--"}
        return f"unknown: {' '.join(sorted(unknown))}" if unknown else ""
    except SystemExit as end:
        return "" if end.code == 0 and "--help" in words else said.getvalue() or f"exit status {end.code}"
    except ImportError as error:
        return str(error)
    return f"it never parsed its arguments: {said.getvalue()}"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _flags(one)


if __name__ == "__main__":
    sys.exit(main())
