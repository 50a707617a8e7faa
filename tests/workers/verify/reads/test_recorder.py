"""What the recorder reports of one Python process, with and without audit hooks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.verify.fixed import RECORDER, Read, reads

REPO = {
    "pkg/__init__.py": "from pkg import core\n",
    "pkg/core.py": "def load(path):\n    return open(path).read()\n",
    "tests/test_it.py": """import importlib
import io
import os

import helper
from pkg.core import load

importlib.import_module("named")
load("tests/data.txt")
with open("out.txt", "w") as file:
    file.write(io.open("golden/../golden/link.txt").read())
try:
    open(os.path.abspath("tests/absent.txt"))
except FileNotFoundError:
    pass
""",
    "tests/helper.py": "",
    "tests/named.py": "",
    "tests/data.txt": "data",
    "golden/total.txt": "4",
}
WITHOUT_HOOKS = "import sys\ndel sys.addaudithook\n"
RUN = "import sys\nsys.path[:0] = ['.', 'tests']\nimport test_it\n"
TEST = "tests/test_it.py"
NAME = f"{TEST}::test_it"


def recorded(tmp_path: Path, before: str) -> set[Read]:
    """What the recorder reports of a process that runs the tests in a repository."""
    repo = tmp_path / "repo"
    for path, text in REPO.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    (repo / "golden/link.txt").symlink_to("total.txt")
    pipe = tmp_path / "notes"
    os.mkfifo(pipe)
    text = RECORDER.read_text().replace("@WORKDIR@", str(repo)).replace("/dev/swerve-notes", str(pipe))
    (tmp_path / "recorder.py").write_text(before + text)
    notes = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}]\nimport recorder\n{RUN}"
    variables = os.environ | {"PYTEST_CURRENT_TEST": f"{NAME} (call)"}
    subprocess.run([sys.executable, "-c", script], cwd=repo, check=True, env=variables)
    found = set(reads(os.read(notes, 1 << 16)))
    os.close(notes)
    return found


@pytest.mark.parametrize("before", ["", WITHOUT_HOOKS], ids=["audit-hooks", "none"])
def test_files_are_reported_with_the_code_that_opened_and_imported_them(tmp_path: Path, before: str) -> None:
    found = recorded(tmp_path, before)
    assert {
        Read("run", TEST, "", is_direct=False),
        Read("run", "tests/helper.py", TEST, is_direct=True),
        Read("run", "tests/named.py", TEST, is_direct=False),
        Read("run", "pkg/__init__.py", TEST, is_direct=True),
        Read("run", "pkg/core.py", "pkg/__init__.py", is_direct=True),
        Read("opened", "tests/data.txt", "pkg/core.py", is_direct=True, test=NAME),
        Read("opened", "golden/link.txt", TEST, is_direct=True, test=NAME),
        Read("opened", "golden/total.txt", TEST, is_direct=True, test=NAME),
        Read("missing", "tests/absent.txt", TEST, is_direct=True),
    } <= found
    assert {read.path for read in found} == {*REPO, "golden/link.txt", "tests/absent.txt"}
