"""Prints the test files that belong to the changes since `main`: `python infra/setup/touched.py [--most 40]`.

Changed test files come first, then those that import a changed module, directly or through modules of tests/; those that import few others
first. A file that a test reads and does not import is not seen: that is what `make test` is for.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

MOST = 40  # number of test files, which run in two or three minutes


def imported(path: Path) -> set[str]:
    """The names that a file imports anywhere: modules, and names that may be modules in them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def belonging(root: Path, changed: Iterable[Path], most: int = MOST) -> list[Path]:
    """The test files that belong to these files, all relative to `root`: every changed test, and at most `most` others."""
    changed = {path for path in changed if path.suffix == ".py" and (root / path).exists()}
    wanted = {module(path) for path in changed}
    helpers = {module(path.relative_to(root)): path for path in (root / "tests").rglob("*.py")}

    @cache
    def distance(path: Path) -> int:
        """1 for a file that imports a changed module, 2 if it imports a test helper that does; 0 for others."""
        names = imported(path)
        if names & wanted:
            return 1
        through = [name for name in names if name in helpers and not helpers[name].name.startswith("test_")]
        return 2 if any(imported(helpers[name]) & wanted for name in through) else 0

    tests = sorted(path for path in (root / "tests").rglob("test_*.py"))
    own = [path.relative_to(root) for path in tests if path.relative_to(root) in changed]
    found = sorted((path for path in tests if distance(path)), key=distance)
    others = [path.relative_to(root) for path in found if path.relative_to(root) not in own]
    return own + others[:most]


def changes(root: Path, base: str = "main") -> list[Path]:
    """The files that differ from the commit at which this branch left `base`, including uncommitted and untracked ones."""

    def lines(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    (left,) = lines("merge-base", base, "HEAD")
    return [
        Path(name)
        for name in (*lines("diff", "--name-only", left), *lines("ls-files", "-o", "--exclude-standard"))
    ]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="infra/setup/touched.py", description=__doc__)
    parser.add_argument("--most", type=int, default=MOST, help="test files that did not change themselves")
    arguments = parser.parse_args(words)
    root = Path(__file__).parents[2]
    for path in belonging(root, changes(root), arguments.most):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
