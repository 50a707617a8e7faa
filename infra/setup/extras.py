"""Prints the requirements in pyproject.toml, one a line: the base packages and those of the extras named.

python infra/setup/extras.py workers dev | pip install --constraint constraints.txt --requirement /dev/stdin
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(extras: Sequence[str]) -> Iterator[str]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    yield from project["dependencies"]
    for extra in extras:
        yield from project["optional-dependencies"][extra]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
