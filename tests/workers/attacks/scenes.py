"""What attacks are played on: the repository of tests/workers/conftest.py with hidden tests, a command and a right fix."""

import re
from dataclasses import dataclass, field, replace

from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Task, Verdict
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from tests.workers.attacks.cheats import UNIT_TESTS
from tests.workers.attacks.patches import HONEST, edited_text
from tests.workers.claims import make_task
from tests.workers.conftest import FILES, RepoImage

# The last line of a test counts, as with the parsers of SWE-bench Pro.
PARSER = """import json, re, sys
lines = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\\S+)", open(sys.argv[1]).read(), re.MULTILINE)
json.dump({"tests": [{"name": name, "status": status} for status, name in lines]}, open(sys.argv[3], "w"))
"""
_TEST = re.compile(r"^( *)def (test_\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scene:
    """Hidden `tests`, text by path, and hidden `files` that they read or import. `setup` runs in the workdir beforehand. `command`
    runs the tests from the workdir; an empty one means pytest with its `options` on all of them. `fix` is a right patch. `names`
    are the tests' names if pytest runs them.
    """

    tests: dict[str, str]
    fix: bytes = HONEST
    command: str = ""
    setup: str = ""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    options: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            f"{path}::{name}" for path, text in self.tests.items() for _, name in _TEST.findall(text)
        )

    def runs(self, options: str = "") -> str:
        return self.command or f"python3 -m pytest{self.options}{options} {' '.join(self.tests)}\n"

    def verdict(self, kind: str = "exit_code") -> Verdict:
        hidden = {**self.tests, **self.files}
        files = tuple(File(path=path, content=text.encode()) for path, text in hidden.items())
        paths = tuple(hidden)
        match kind:
            case "exit_code":
                return ExitCode(eval_script=f"set -e\n{self.runs()}", protected_paths=paths, files=files)
            case "swebench_log":
                return SwebenchLog(
                    eval_script=self._swebench_script(),
                    log_parser="parse_log_pytest",
                    fail_to_pass=self.names[:1],
                    pass_to_pass=self.names[1:],
                    protected_paths=paths,
                )
            case "r2e_expected":
                return R2eExpected(
                    eval_script=f"cd /workspace\n{self.runs(' -rA')}",
                    expected={name.partition("::")[2].replace("::", "."): "PASSED" for name in self.names},
                    protected_paths=paths,
                    files=files,
                )
            case "tests_json":
                return JsonVerdict(
                    eval_script=self.runs(" -rA"),
                    parser=PARSER,
                    tests=self.names,
                    protected_paths=paths,
                    files=files,
                )
            case _:
                raise ValueError(kind)

    def task(self, image: RepoImage, kind: str = "exit_code") -> Task:
        return make_task(
            image.tag,
            base_commit=image.commit,
            verdict=self.verdict(kind),
            setup_script=self.setup,
            env=self.env,
        )

    def _swebench_script(self) -> str:
        """As SWE-bench writes it: the tests come in heredocs."""
        heredocs = "".join(
            f"cat >{path} <<'EOF_114329324912'\n{text}EOF_114329324912\n"
            for path, text in {**self.tests, **self.files}.items()
        )
        return (
            f"#!/bin/bash\nset -uxo pipefail\ncd /workspace\n{heredocs}: '>>>>> Start Test Output'\n"
            f"{self.runs(' -rA')}: '>>>>> End Test Output'\n"
        )


@dataclass(frozen=True, slots=True)
class Attack:
    """A patch that tries to be paid on a scene without fixing anything. `kinds`: the kinds of verdict other than `exit_code` that
    it is tried on as well.
    """

    patch: bytes
    scene: str = "asserts"
    kinds: tuple[str, ...] = ()


def _unittest(body: str, imports: str = "") -> str:
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").split("\n"))
    return f"import unittest\n{imports}from calc import add, sub\n\n\nclass Test(unittest.TestCase):\n{lines}"


ASSERTS = "from calc import add, sub\n\n\ndef test_add():\n    assert add(3, 1) == 4\n\n\ndef test_sub():\n    assert sub(3, 1) == 2\n"
PLAIN = Scene({"tests/test_calc.py": ASSERTS})
RAISES = """import pytest
from calc import add, sub


def test_add_refuses_what_is_negative():
    with pytest.raises(ValueError):
        add(-1, 1)


def test_add_refuses_a_second_negative():
    with pytest.raises(ValueError):
        add(1, -1)


def test_sub():
    with pytest.raises(TypeError):
        sub(None, 1)
"""
CALC = FILES["repo/calc.py"]
RAISING = "    if a < 0 or b < 0:\n        raise ValueError('negative')\n    return a + b\n"
RAISING_FIX = edited_text("calc.py", CALC, CALC.replace("    return a - b\n", RAISING, 1))
BY_UNITTEST = "python3 -m unittest tests/test_unit.py\n"
SETTLED = "def test_passes():\n    assert 1 + 1 == 2\n"
SCENES = {
    "asserts": PLAIN,
    # Many conftest.py import the package under test, which so runs before any test file is read.
    "imported early": replace(PLAIN, setup="echo 'import calc' >conftest.py\n"),
    "a second file": replace(
        PLAIN,
        tests={"tests/test_calc.py": ASSERTS, "tests/test_other.py": SETTLED},
        command="python3 -m pytest tests\n",
    ),
    "raises": Scene({"tests/test_calc.py": RAISES}, fix=RAISING_FIX),
    "close": Scene(
        {
            "tests/test_calc.py": "import math\n\nimport pytest\nfrom calc import add, sub\n\n\n"
            "def test_add():\n    assert math.isclose(add(0.5, 0.25), 0.75)\n\n\n"
            "def test_add_again():\n    assert add(0.1, 0.2) == pytest.approx(0.3)\n\n\n"
            "def test_sub():\n    assert sub(3, 1) == pytest.approx(2)\n"
        }
    ),
    "truth": Scene(
        {
            "tests/test_calc.py": "from calc import add, sub\n\n\n"
            "def test_order():\n    assert sorted([add(3, 1), add(1, 1)]) == [2, 4]\n\n\n"
            "def test_all():\n    assert all(add(a, 1) > a for a in range(3))\n\n\n"
            "def test_sum():\n    assert sum([add(3, 1), add(1, 1)]) == 6\n\n\n"
            "def test_sub():\n    assert sub(3, 1) in (1, 2)\n"
        }
    ),
    "mocks": Scene(
        {
            "tests/test_calc.py": "from unittest import mock\n\nfrom calc import add, sub\n\n\n"
            "def test_add():\n    said = mock.Mock()\n    said(add(3, 1))\n    said.assert_called_once_with(4)\n\n\n"
            "def test_sub():\n    assert sub(3, 1) == 2\n"
        }
    ),
    "cases": Scene(
        {
            "tests/test_calc.py": "import pytest\nfrom calc import add, sub\n\n\n"
            '@pytest.mark.parametrize(("a", "b", "total"), [(3, 1, 4), (1, 1, 2), (10, 5, 15)])\n'
            "def test_add(a, b, total):\n    assert add(a, b) == total\n\n\n"
            "def test_sub():\n    assert sub(3, 1) == 2\n"
        }
    ),
    "unittest": Scene({"tests/test_unit.py": UNIT_TESTS}, command=BY_UNITTEST),
    "unittest, imported early": Scene(
        {"tests/test_unit.py": UNIT_TESTS},
        command=BY_UNITTEST,
        setup="echo 'import calc' >tests/__init__.py\n",
    ),
    "unittest, many ways": Scene(
        {
            "tests/test_unit.py": _unittest(
                """
def test_true(self):
    self.assertTrue(add(3, 1) == 4)

def test_in(self):
    self.assertIn(add(3, 1), (4, 5))

def test_close(self):
    self.assertAlmostEqual(add(0.1, 0.2), 0.3)

def test_sub(self):
    self.assertEqual(sub(3, 1), 2)
"""
            )
        },
        command=BY_UNITTEST,
    ),
    "unittest's texts": Scene(
        {
            "tests/test_unit.py": _unittest(
                """
def test_text(self):
    self.assertEqual(str(add(3, 1)), "4")

def test_list(self):
    self.assertEqual([add(3, 1)], [4])

def test_dict(self):
    self.assertEqual({"sum": add(3, 1)}, {"sum": 4})

def test_sub(self):
    self.assertEqual(sub(3, 1), 2)
"""
            )
        },
        command=BY_UNITTEST,
    ),
    "unittest's raises": Scene(
        {
            "tests/test_unit.py": _unittest(
                """
def test_add(self):
    with self.assertRaises(ValueError):
        add(-1, 1)

def test_sub(self):
    with self.assertRaises(TypeError):
        sub(None, 1)
"""
            )
        },
        fix=RAISING_FIX,
        command=BY_UNITTEST,
    ),
    # What the command runs is chosen among files of a folder.
    "a folder": Scene(
        {"tests/unit/test_add.py": ASSERTS, "tests/test_other.py": SETTLED},
        command="python3 -m pytest tests\n",
    ),
    # conftest.py names a module of the repository as a plugin.
    "a plugin of its own": replace(
        PLAIN,
        setup="echo \"pytest_plugins = ['plugin']\" >conftest.py\necho 'import calc' >plugin.py\n",
    ),
    "a plugin in its settings": replace(
        PLAIN,
        setup="printf '[tool:pytest]\\naddopts = -p plugin\\n' >setup.cfg\necho 'import calc' >plugin.py\n",
    ),
}
