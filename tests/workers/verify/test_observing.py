"""The values of expressions in test files, as one run of the known fix shows them."""

import ast
import json

import pytest

from pipeline.task import ExitCode, File, SwebenchLog, Task
from tests.workers.attacks.patches import HONEST
from tests.workers.attacks.test_attacks import task_of
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from workers.grading.controls.spans import read
from workers.grading.controls.values import ORIGINAL, Observed
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.observing import ObservableFile, Span, observe, read_notes

PATH = "tests/test_calc.py"
WORKDIR = "/workspace"
TESTS = '''"""Tests of calc."""

import dataclasses
import multiprocessing
import pathlib

import pytest

from calc import add, sub

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden.txt"
SHARED = HERE / "shared.txt"
SHARED.read_text()


@dataclasses.dataclass
class Point:
    x: int
    name: str


def numbers():
    yield from (add(1, 0), add(1, 1))


def test_same():
    assert add(1, 2) == add(2, 1), "not the same"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each(number):
    assert number + number == add(number, number)


def test_point():
    expected = Point(sub(3, 1), "two")
    assert Point(add(1, 1), "two") == expected


def test_files():
    assert str(add(2, 2)) in GOLDEN.read_text()
    assert SHARED.read_text()
    assert (HERE / "told.txt").read_text()


def test_others_files():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(pathlib.Path.read_text, [HERE / "told.txt"]) == ["told\\n"]


def test_order():
    assert add(1, 1) == 2 or sub(1)
    assert all(one in(1, 2) for one in numbers())
    with pytest.raises(TypeError):
        assert sub(add(9, 9))


def test_many():
    for number in range(1000):
        assert add(number, 5) == number + 5
'''
FILES = {
    PATH: TESTS,
    "tests/golden.txt": "one two 4\n",
    "tests/shared.txt": "shared\n",
    "tests/told.txt": "told\n",
}
PARTS = ("same", "each[1]", "each[2]", "each[3]", "point", "files", "others_files", "order", "many")
NAMES = [f"{PATH}::test_{part}" for part in PARTS]
UNITTESTS = """import unittest

from calc import add


class Adding(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""


def all_spans(text: str) -> list[Span]:
    file = read(text.encode())
    assert file is not None
    return [(file.start(node), file.end(node)) for node in ast.walk(file.tree) if isinstance(node, ast.expr)]


def observable(text: str, *passing: str) -> ObservableFile:
    return ObservableFile(text.encode(), all_spans(text), passing)


def by_text(text: str, seen: dict[Span, Observed]) -> dict[str, Observed]:
    """The expressions of `text` by their source, the last one of those that are alike."""
    return {text[start:end]: one for (start, end), one in sorted(seen.items())}


def with_files(image: RepoImage, command: str, **files: str) -> Task:
    verdict = ExitCode(
        eval_script=f"set -e\n{command}\n",
        files=tuple(File(path=path, content=text.encode()) for path, text in files.items()),
    )
    return task_of(image, verdict)


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.mark.docker
async def test_every_expression_of_a_test_file_can_be_observed(grader: Grader, repo_image: RepoImage) -> None:
    claim = make_claim(with_files(repo_image, f"python3 -W error -m pytest {PATH}", **FILES))
    seen = await observe(grader, claim, HONEST, {PATH: observable(TESTS, *NAMES)}, WORKDIR)
    values = by_text(TESTS, seen[PATH])
    assert values["add(2, 1)"] == Observed(
        near=values["add(2, 1)"].near, low=3, high=3, types=("int", "object"), num_values=1
    )
    assert values["add(2, 1)"].near[0] == "4"
    each = values["add(number, number)"]
    assert (each.low, each.high, each.num_values) == (2, 6, 3)
    assert each.near
    assert not {"2", "4", "6"} & {*each.near}
    point = values["expected"]
    assert point.types == ("test_calc.Point", "object")
    assert point.near[0] == f"__import__('dataclasses').replace(({ORIGINAL}), x=3)"
    assert "sub(1)" not in values  # never evaluated
    assert "sub(add(9, 9))" not in values  # never finished
    assert values["add(9, 9)"].low == 18
    assert values["one"].num_values == 2
    many = values["number + 5"]
    assert (many.low, many.high, many.num_values) == (5, 54, 50)
    files = {text: one.files for text, one in values.items() if one.files}
    assert files == {
        "GOLDEN.read_text()": ("tests/golden.txt",),
        "str(add(2, 2)) in GOLDEN.read_text()": ("tests/golden.txt",),
        "SHARED.read_text()": ("tests/shared.txt",),
    }


@pytest.mark.docker
async def test_of_a_file_whose_tests_do_not_pass_so_nothing_is_known(
    grader: Grader, repo_image: RepoImage
) -> None:
    strict = "import sys\n\n\ndef test_text():\n    assert '_swerve_see' not in open(__file__).read()\n    assert 1 == 1\n"
    plain = "def test_plain():\n    assert 'a' + 'b' == 'ab'\n"
    files = {"tests/test_strict.py": strict, "tests/test_plain.py": plain}
    claim = make_claim(
        with_files(repo_image, "python3 -m pytest tests/test_strict.py tests/test_plain.py", **files)
    )
    names = {"tests/test_strict.py": "test_text", "tests/test_plain.py": "test_plain"}
    wanted = {path: observable(files[path], f"{path}::{name}") for path, name in names.items()}
    seen = await observe(grader, claim, HONEST, wanted, WORKDIR)
    assert [*seen] == ["tests/test_plain.py"]
    assert by_text(plain, seen["tests/test_plain.py"])["'ab'"].near[0] == "'ac'"


@pytest.mark.docker
async def test_what_unittest_runs_is_observed_too(grader: Grader, repo_image: RepoImage) -> None:
    path = "tests/test_unit.py"
    claim = make_claim(with_files(repo_image, f"python3 -m unittest {path}", **{path: UNITTESTS}))
    seen = await observe(
        grader,
        claim,
        HONEST,
        {path: observable(UNITTESTS, "test_add (tests.test_unit.Adding.test_add)")},
        WORKDIR,
    )
    assert by_text(UNITTESTS, seen[path])["add(1, 2)"].high == 3


@pytest.mark.docker
async def test_tests_in_a_here_document_are_observed_too(grader: Grader, repo_image: RepoImage) -> None:
    tests = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    script = f"""cd /testbed
cat >{PATH} <<'EOF_114329324912'
{tests}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA {PATH}
: '>>>>> End Test Output'
"""
    name = f"{PATH}::test_add"
    verdict = SwebenchLog(
        eval_script=script,
        log_parser="parse_log_pytest",
        fail_to_pass=(name,),
        pass_to_pass=(),
        protected_paths=(),
    )
    claim = make_claim(task_of(repo_image, verdict, workdir="/testbed"))
    seen = await observe(grader, claim, HONEST, {PATH: observable(tests, name)}, "/testbed")
    assert by_text(tests, seen[PATH])["3"].types == ("int", "object")


def line(process: str, number: int, **changes: object) -> bytes:
    said: dict[str, object] = {
        "near": [],
        "low": None,
        "high": None,
        "types": ["object"],
        "values": [],
        "files": [],
    }

    return f"observed {process} {number} {json.dumps(said | changes)}".encode()


def test_what_several_processes_say_is_taken_together() -> None:
    notes = b"\n".join(
        [
            b"start secret pytest 1:2",
            line("a", 1, near=["1", "2"], low=3, high=4, types=["int", "object"], values=[1, 2]),
            line("b", 1, near=["2", "5"], low=2, high=3, types=["bool", "int", "object"], values=[2, 3]),
            line("a", 2, near=["wrong"], low=1, high=1),
            line("a", 2, near=["'right'"], low=None, high=None),
            line("b", 2, near=["'right'"], low=2, high=2),
        ]
    )
    assert read_notes(notes, WORKDIR) == {
        1: Observed(near=("2",), low=2, high=4, types=("int", "object"), num_values=3),
        2: Observed(near=("'right'",), types=("object",)),
    }


@pytest.mark.parametrize("text", ["1\n", "f(", f"{ORIGINAL} + {ORIGINAL}", "x" * 301, "a b", ""])
def test_what_is_no_short_expression_is_left_out(text: str) -> None:
    assert read_notes(line("a", 1, near=[text, "2"]), WORKDIR)[1].near == ("2",)


def test_lines_that_nobody_wrote_so_are_ignored() -> None:
    lines = [
        b"observed a x {}",
        b"observed a 1 {",
        b"observed a -1 {}",
        b"observed",
        b"own a",
        line("a", 1, low="x"),
    ]
    assert read_notes(b"\n".join([*lines, line("a", 9999999)]), WORKDIR) == {}


def test_a_file_is_ones_own_if_each_process_says_so() -> None:
    path = f'"{WORKDIR}/golden.txt"'
    notes = [
        line("a", 1, files=[f"{WORKDIR}/golden.txt", "/etc/passwd"]),
        f"opened a {path}".encode(),
        f"own a {path}".encode(),
    ]
    assert read_notes(b"\n".join(notes), WORKDIR)[1].files == ("golden.txt",)
    assert read_notes(b"\n".join([*notes, f"opened b {path}".encode()]), WORKDIR)[1].files == ()
