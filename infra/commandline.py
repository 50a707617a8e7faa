"""Command lines that end in another program's: our part, then ``--``, then flags passed on as they are."""

import argparse
import sys
from collections.abc import Sequence


def parse_own_part(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What ``parser`` makes of the arguments before the first ``--``; those after it are ``passed_on``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser.parse_args(arguments[:end])
    parsed.passed_on = arguments[end + 1 :]
    return parsed
