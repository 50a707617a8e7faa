"""Command lines that end in another program's: our own flags, then `--`, then flags that are passed on unchanged."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

MISUSE = 2  # exit status


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
