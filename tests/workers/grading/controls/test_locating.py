"""The functions of tests are found by the names that runners and parsers give them."""

import pytest

from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Verdict
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import HIDDEN_TESTS
from workers.grading.controls.locating import locate
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

UNIT = b"import unittest\n\nclass T(unittest.TestCase):\n    def test_one(self): pass\n"
TREE = {
    "sub/tests/test_deep.py": b"def test_deep(): pass\n",
    "a/tests/test_twin.py": b"def test_a(): pass\n",
    "b/tests/test_twin.py": b"def test_b(): pass\n",
    "tests/app/tests.py": UNIT,
    "tests/pkg/__init__.py": UNIT,
    "docs/sums.rst": b">>> 1 + 1\n2\n",
}
SCRIPT = (
    "cat >tests/test_written.py <<'EOF'\ndef test_written():\n    pass\nEOF\n"
    "cat >docs/written.txt <<'EOF'\n>>> 1\n1\nEOF\npytest tests\n"
)


async def located(
    sandboxes: DockerSandboxes, image: RepoImage, verdict: Verdict, *names: str, **put: bytes
) -> dict[str, str]:
    """`path::function` by name."""
    task = make_task(image.tag, verdict=verdict)
    async with sandboxes.open(make_claim(task), role="grade") as sandbox:
        await sandbox.put([File(path=path, content=text) for path, text in (TREE | put).items()])
        found = await locate(sandbox, task, names)
    return {name: f"{place.path}::{place.function}" for name, place in found.items()}


@pytest.mark.slow_but_for("tests/test_calc.py::test*", "tests/test_calc.py::TestSub*")
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tests/test_calc.py::test_sub", "tests/test_calc.py::test_sub"),
        ("tests/test_calc.py::TestSub::test_sub[1-x::y]", "tests/test_calc.py::TestSub::test_sub"),
        ("../tests/test_calc.py::test_sub", "tests/test_calc.py::test_sub"),
        ("workspace/tests/test_calc.py::test_sub", "tests/test_calc.py::test_sub"),
        ("tests/test_deep.py::test_deep", "sub/tests/test_deep.py::test_deep"),
        ("tests/test_twin.py::test_a", None),
        ("a/tests/test_twin.py::test_a", "a/tests/test_twin.py::test_a"),
        ("tests/test_absent.py::test_a", None),
        ("README.md::README.md", None),
        ("docs/sums.rst::sums.rst", "docs/sums.rst::sums.rst"),
        ("../docs/sums.rst::sums.rst", "docs/sums.rst::sums.rst"),
        ("docs/sums.rst::test_sums", None),
        ("docs/written.txt::written.txt", "docs/written.txt::written.txt"),
        ("test_one (app.tests.T)", "tests/app/tests.py::T::test_one"),
        ("test_one (app.tests.T.test_one)", "tests/app/tests.py::T::test_one"),
        ("test_one (tests.pkg.T.Inner.test_one) (i=1)", "tests/pkg/__init__.py::T::Inner::test_one"),
        ("test_one (unittest.loader._FailedTest.test_one)", None),
        ("test_add", "tests/test_calc.py::test_add"),
        ("test_sub[1]", "tests/test_calc.py::test_sub"),
        ("test_written", "tests/test_written.py::test_written"),
        ("T.test_one", None),  # of no hidden test
        ("what a docstring says", None),
    ],
)
async def test_a_test_is_found_by_its_name(
    sandboxes: DockerSandboxes, repo_image: RepoImage, name: str, function: str | None
) -> None:
    verdict = ExitCode(eval_script=SCRIPT, test_patch=HIDDEN_TESTS.encode())
    with_hidden = TREE | {"tests/test_calc.py": b"def test_sub(): pass\ndef test_add(): pass\n"}
    found = await located(sandboxes, repo_image, verdict, name, **with_hidden)
    assert found.get(name) == function


async def test_a_bare_name_is_looked_for_in_files_that_the_script_copies(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    verdict = R2eExpected(
        eval_script="rm -rf r2e_tests\ncp -a /vault/r2e_tests r2e_tests\nbash /vault/run_tests.sh\n",
        expected={"T.test_one": "PASSED"},
        protected_paths=("r2e_tests",),
    )
    found = await located(
        sandboxes,
        repo_image,
        verdict,
        "T.test_one",
        "r2e_tests/test_1.py::T::test_one",
        **{"/vault/r2e_tests/test_1.py": UNIT},
    )
    assert set(found.values()) == {"r2e_tests/test_1.py::T::test_one"}


async def test_of_two_files_the_one_with_hidden_tests_is_meant(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    verdict = SwebenchLog(
        eval_script="pytest\n",
        log_parser="parse_log_pytest",
        fail_to_pass=(),
        pass_to_pass=(),
        protected_paths=("b/tests",),
    )
    name = "tests/test_twin.py::test_b"
    assert await located(sandboxes, repo_image, verdict, name) == {name: "b/tests/test_twin.py::test_b"}


async def test_a_test_of_a_visible_file_is_not_taken_for_the_program_of_the_only_hidden_file(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    verdict = ExitCode(
        eval_script="g++ -o /tmp/t tests/*.cpp -lgtest_main -lgtest\n/tmp/t\n",
        protected_paths=("tests/new_test.cpp",),
    )
    files = {
        "tests/new_test.cpp": b"TEST(New, Sums) {}\n",
        "tests/old_test.cpp": b"TEST(Old, Sums) {}\n",
    }
    names = ("New.Sums", "Old.Sums", "program")
    assert await located(sandboxes, repo_image, verdict, *names, **files) == {
        "New.Sums": "tests/new_test.cpp::New.Sums",
        "Old.Sums": "tests/old_test.cpp::Old.Sums",
        "program": "tests/new_test.cpp::main",
    }
