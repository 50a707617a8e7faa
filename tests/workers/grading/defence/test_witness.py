"""The witness in containers: that it speaks for every way to run tests, and is in nobody's way."""

import ast
import symtable
from collections.abc import Callable

import pytest

from tests.workers.attacks.patches import HONEST, new
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.grading.witnessed import task_of
from workers.grading.defence.witness import MODULES, PLUGIN, plugin_source
from workers.grading.grade import Grader

pytestmark = pytest.mark.docker

HIDDEN = """import subprocess, sys, unittest
import pytest
from calc import add

def test_add():
    assert add(3, 1) == 4

class Test(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(3, 1), 4)

    @unittest.skip("as ever")
    def test_skipped(self):
        pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""
# Runs of a runner inside of a test: cut short, failing, in the same process. All part of a test that passes.
INNER = """
def test_runs_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_x.py").write_text("import os\\ndef test_x(): os._exit(0)")
    assert subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]).returncode == 0
    (tmp_path / "test_y.py").write_text("def test_y(): assert 0")
    assert pytest.main(["-p", "no:cacheprovider", "test_y.py"]) == 1
    assert unittest.TextTestRunner().run(unittest.FunctionTestCase(lambda: 1 / 0)).errors
"""
SCRIPTS = {
    "plain": "python3 -m pytest tests/test_calc.py",
    "quiet": "python3 -m pytest -q tests",
    "very quiet, nowhere": "python3 -m pytest -qq tests >/dev/null",
    "without a plugin": "python3 -m pytest -p no:cacheprovider -W error tests",
    "from elsewhere": "cd tests && PYTHONPATH=.. python3 -m pytest",
    "without variables": 'env -i PATH="$PATH" python3 -m pytest tests',
    "with options of its own": "PYTEST_ADDOPTS=-x PYTEST_PLUGINS=_pytest.pytester python3 -m pytest tests",
    "without automatic plugins": "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest tests",
    "without user packages": "python3 -s -m pytest tests",
    "asked for its version": "python3 -m pytest --version && python3 -m pytest tests",
    "asked wrongly first": "python3 -m pytest --no-such-option || python3 -m pytest tests",
    "only collected first": "python3 -m pytest --collect-only && python3 -m pytest tests",
    "in two steps": "python3 -m pytest -k add tests\npython3 -m pytest -k expected tests",
    "through a wrapper": "sh -c 'exec timeout 60 python3 -m pytest tests'",
    "from Python": "python3 -c \"import pytest, sys; sys.exit(pytest.main(['tests']))\"",
    "as another user": 'chmod -R a+rwX . && python3 -c "import os; os.setgid(65534); os.setuid(65534);'
    " os.execvp('python3', ['python3', '-m', 'pytest', 'tests'])\"",
    "unittest": "python3 -m unittest tests/test_calc.py",
    "unittest, discovering": "PYTHONPATH=. python3 -m unittest discover -s tests",
    "a script of unittest's": "echo \"import unittest; unittest.main('tests.test_calc')\" >runtests.py; python3 runtests.py",
    "such a script that runs pytest": "echo \"import pytest, sys; sys.exit(pytest.main(['tests']))\" >runtests.py; python3 runtests.py",
    "the same, by another's hand": "echo \"import pytest\ndef run(): raise SystemExit(pytest.main(['tests']))\" >runner.py\n"
    "echo 'import unittest, calc, runner; runner.run()' >manage.py; python3 manage.py test",
    "no runner at all": "python3 -c 'from calc import add; assert add(3, 1) == 4'",
}


@pytest.mark.slow_but_for("without-automatic-plugins", "without-user-packages")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=[name.replace(" ", "-") for name in SCRIPTS])
async def test_a_right_fix_gets_its_pay_however_tests_are_run(
    grader: Grader, repo_image: RepoImage, script: str
) -> None:
    claim = make_claim(task_of(repo_image, script, HIDDEN))
    assert (await grader.grade(claim, HONEST)).decided_by == "exit status 0"
    assert (await grader.grade(claim, new("NOTE.txt", "done"))).value == 0.0


@pytest.mark.slow
async def test_unittest_tells_of_each_test(grader: Grader, repo_image: RepoImage) -> None:
    broken = HIDDEN.replace(
        "    @unittest.skip", "    def test_sub(self):\n        1 / 0\n\n    @unittest.skip"
    )
    expected = broken.replace("    def test_sub", "    @unittest.expectedFailure\n    def test_sub")
    for tests, value, outcome in ((broken, 0.0, "FAILED"), (expected, 1.0, "XFAIL")):
        reward = await grader.grade(make_claim(task_of(repo_image, SCRIPTS["unittest"], tests)), HONEST)
        assert reward.value == value
        assert {name.partition(" ")[0]: seen for name, seen in reward.tests.items()} == {
            "test_add": "PASSED",
            "test_skipped": "SKIPPED",
            "test_sub": outcome,
        }


OUTCOMES = """import unittest

class Test(unittest.TestCase):
    def test_error(self): 1 / 0

    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)

    @unittest.expectedFailure
    def test_unexpected(self): pass

    @unittest.expectedFailure
    def test_expected(self): 1 / 0

class Unprepared(unittest.TestCase):
    @classmethod
    def setUpClass(cls): 1 / 0

    def test_never(self): pass
"""


@pytest.mark.slow_but_for("7-pytest")
@pytest.mark.parametrize(
    ("script", "outcomes"),
    [
        (
            "python3 -m unittest tests/test_calc.py",
            {
                "test_error (tests.test_calc.Test.test_error)": "FAILED",
                "test_parts (tests.test_calc.Test.test_parts)": "FAILED",
                "test_unexpected (tests.test_calc.Test.test_unexpected)": "FAILED",
                "test_expected (tests.test_calc.Test.test_expected)": "XFAIL",
                "setUpClass (tests.test_calc.Unprepared)": "FAILED",
            },
        ),
        (
            "python3 -m pytest tests",
            {
                "tests/test_calc.py::Test::test_error": "FAILED",
                "tests/test_calc.py::Test::test_parts": "FAILED",
                "tests/test_calc.py::Test::test_unexpected": "FAILED",
                "tests/test_calc.py::Test::test_expected": "XFAIL",
                "tests/test_calc.py::Unprepared::test_never": "ERROR",
            },
        ),
    ],
    ids=["unittest", "pytest"],
)
@pytest.mark.parametrize("major", [7, 9])
async def test_every_way_in_which_a_case_ends_is_told(
    grader: Grader,
    repo_image_with_pytest: Callable[[int], RepoImage],
    major: int,
    script: str,
    outcomes: dict[str, str],
) -> None:
    task = task_of(repo_image_with_pytest(major), script, OUTCOMES)
    assert (await grader.run_tests(make_claim(task), HONEST)).outcomes.by_name == outcomes


@pytest.mark.slow
async def test_a_script_that_calls_pytest_changes_the_same_in_each_container(
    grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, SCRIPTS["the same, by another's hand"], HIDDEN)
    runs = [await grader.run_tests(make_claim(task), HONEST) for _ in range(2)]
    first, second = (run.outcomes.replaced for run in runs)
    assert first == second
    assert {"the runner, by manage.py", "the runner, by runner.py"} <= first


async def test_runs_inside_of_a_test_are_that_tests_business(grader: Grader, repo_image: RepoImage) -> None:
    claim = make_claim(task_of(repo_image, SCRIPTS["plain"], HIDDEN + INNER))
    reward = await grader.grade(claim, HONEST)
    assert reward.decided_by == "exit status 0"
    assert reward.tests == {
        "tests/test_calc.py::test_add": "PASSED",
        "tests/test_calc.py::Test::test_add": "PASSED",
        "tests/test_calc.py::Test::test_skipped": "SKIPPED",
        "tests/test_calc.py::test_expected_to_fail": "XFAIL",
        "tests/test_calc.py::test_runs_inside": "PASSED",
    }


OWN_TESTS = {
    "tests/test_skipped.py": "import pytest\ndef test_later(): pytest.skip('no network')",
    "tests/test_absent.py": "import pytest\npytest.importorskip('no_such_module')",
    "tests/__init__.py": "# a package",
    "tests/unit/conftest.py": "import pytest\n@pytest.fixture\ndef skipped(): pass",
    "tests/unit/test_more.py": "pytest_plugins = ['own_plugin']\ndef test_more(): pass",
    "own_plugin.py": "def pytest_collection_modifyitems(items): items.reverse()",
}


@pytest.mark.parametrize("script", ["python3 -m pytest tests", "PYTHONPATH=. python3 -m pytest -rA tests"])
async def test_a_fix_may_bring_tests_that_skip_themselves(
    grader: Grader, repo_image: RepoImage, script: str
) -> None:
    own = b"".join(new(path, text) for path, text in OWN_TESTS.items())
    reward = await grader.grade(make_claim(task_of(repo_image, script, HIDDEN)), HONEST + own)
    assert (reward.value, reward.decided_by) == (1.0, "exit status 0")
    assert (
        reward.tests["tests/test_absent.py"] == reward.tests["tests/test_skipped.py::test_later"] == "SKIPPED"
    )


@pytest.mark.parametrize("script", ["python3 -m pytest -qq tests", "python3 -m unittest discover -s tests"])
async def test_tests_that_change_the_runner_and_write_files_get_a_fix_its_pay(
    grader: Grader, repo_image: RepoImage, script: str
) -> None:
    busy = """import pathlib, unittest, unittest.mock
from calc import add

class Test(unittest.TestCase):
    maxDiff = None

    def assert_sum(self, a, b, sum):
        self.assertEqual(add(a, b), sum)

    def test_add(self):
        unittest.TestCase.assertSum = Test.assert_sum
        self.assertSum(3, 1, 4)
        pathlib.Path(__file__).with_name("expected.txt").write_text("4")
        pathlib.Path(__file__).with_name("test_made.py").write_text("x = 1")
        with unittest.mock.patch.object(unittest.TestCase, "assertTrue"):
            self.assertTrue(False)
"""
    task = task_of(repo_image, script, busy)
    assert (await grader.grade(make_claim(task), HONEST)).decided_by == "exit status 0"


@pytest.mark.parametrize("command", ["pytest", "unittest"])
@pytest.mark.parametrize(
    "spoiled", ["1s/.*/none/; 2s/.*/none/", "3s/.*/none/"], ids=["for-another-python", "for-this-python"]
)
async def test_the_witness_is_compiled_beforehand_for_one_python_and_on_the_way_for_others(
    grader: Grader, repo_image: RepoImage, command: str, spoiled: str
) -> None:
    script = f"sed -i '{spoiled}' /usr/local/lib/swerve_*\npython3 -m {command} tests/test_calc.py"
    bent = new("sitting.py", "import unittest\nunittest.TestCase.assertEqual = print\n")
    task = task_of(repo_image, script, HIDDEN.replace("import subprocess", "import sitting, subprocess"))
    reward = await grader.grade(make_claim(task), HONEST + bent)
    assert reward.decided_by.startswith(f"exit status 0, but {command} let a test pass that must fail")


async def test_the_repositorys_own_plugin_may_be_mended(grader: Grader, repo_image: RepoImage) -> None:
    setup = "echo 'x = 1' >plugin.py; echo \"pytest_plugins = ['plugin']\" >>conftest.py\n"
    task = task_of(repo_image, "python3 -m pytest tests", HIDDEN, setup_script=setup)
    hook = "import pytest\ndef pytest_runtest_setup(item):\n    if 'never' in item.name: pytest.skip('never')"
    mended = new("plugin.py", hook).replace(b"new file mode 100644\n--- /dev/null", b"--- a/plugin.py")
    mended = mended.replace(b"@@ -0,0 +1,3 @@\n", b"@@ -1 +1,3 @@\n-x = 1\n")
    assert (await grader.grade(make_claim(task), HONEST + mended)).decided_by == "exit status 0"


def test_the_plugin_in_one_file_is_whole_and_needs_nothing_of_ours() -> None:
    assert {f"{name}.py" for name in ("__init__", *MODULES)} == {file.name for file in PLUGIN.glob("*.py")}
    source = plugin_source()
    tree = ast.parse(source, feature_version=(3, 5))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == [], "modules of ours are joined, and Python's own imported whole"
    named = [name for node in tree.body for name in _defined(node)]
    assert sorted(set(named)) == sorted(named), "modules that are joined share their names"
    table = symtable.symtable(source, "plugin", "exec")
    inner = [table, *table.get_children()]
    for one in inner:
        inner += [child for child in one.get_children() if child not in inner]
    used = {symbol.get_name() for one in inner for symbol in one.get_symbols() if symbol.is_global()}
    own = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    builtins = vars(__import__("builtins")).keys() | {"__name__", "__file__"}
    assert used - own - builtins == set()


def _defined(node: ast.stmt) -> list[str]:
    """The name that a statement of a module gives to a function, a class or a constant."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
