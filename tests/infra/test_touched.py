"""Which tests `make check` runs."""

import subprocess
from pathlib import Path

import pytest

from infra.setup.touched import belonging, changes

FILES = {
    "pipeline/queue.py": "",
    "pipeline/other.py": "",
    "pipeline/keys/__init__.py": "",
    "tests/claims.py": "from pipeline import queue\n",
    "tests/test_queue.py": "def test_one():\n    from pipeline.queue import push\n",
    "tests/test_claims.py": "from tests.claims import make\n",
    "tests/test_other.py": "import pipeline.other\n",
    "tests/test_keys.py": "from pipeline import keys\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(found: list[Path]) -> list[str]:
    return [str(path) for path in found]


def test_tests_that_import_a_module_come_before_those_that_do_through_a_helper(root: Path) -> None:
    found = belonging(root, [Path("pipeline/queue.py")])
    assert names(found) == ["tests/test_queue.py", "tests/test_claims.py"]
    assert names(belonging(root, [Path("pipeline/keys/__init__.py")])) == ["tests/test_keys.py"]


def test_a_changed_helper_and_a_changed_test_bring_their_tests(root: Path) -> None:
    assert names(belonging(root, [Path("tests/claims.py")])) == ["tests/test_claims.py"]
    assert names(belonging(root, [Path("tests/test_other.py")])) == ["tests/test_other.py"]


def test_the_bound_drops_the_furthest_and_no_test_that_changed(root: Path) -> None:
    changed = [
        Path("pipeline/queue.py"),
        Path("tests/test_other.py"),
        Path("README.md"),
        Path("tests/test_gone.py"),
    ]
    assert names(belonging(root, changed, most=1)) == ["tests/test_other.py", "tests/test_queue.py"]


def test_what_is_committed_changed_or_new_since_the_branch_counts(root: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "base")
    git("checkout", "-b", "work")
    (root / "pipeline/queue.py").write_text("# committed\n")
    git("commit", "-am", "one")
    (root / "pipeline/other.py").write_text("# changed\n")
    (root / "pipeline/new.py").write_text("# new\n")
    assert {*map(str, changes(root))} == {"pipeline/queue.py", "pipeline/other.py", "pipeline/new.py"}
