"""Prints the requirements of the named lists in pyproject.toml (base, or an extra), one per line.

python infra/setup/extras.py base workers | pip install --constraint constraints.txt --requirement /dev/stdin
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(names: Sequence[str]) -> Iterator[str]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    lists = {"base": project["dependencies"], **project["optional-dependencies"]}
    for name in names:
        yield from lists[name]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
