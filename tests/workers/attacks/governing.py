"""Cheats on the files that govern the run: scripts, what they name in turn, plugins, and modules that hide others.

`setup` makes what is around the repository of tests/workers/conftest.py; the cheat changes or adds to it.
"""

from tests.workers.attacks.around import PASSES, Around
from tests.workers.attacks.patches import edited_text, link, new

RUN = "python3 -m pytest tests/test_calc.py\n"
RUN_SH = f"#!/bin/bash\nset -e\ncd /workspace\n{RUN}"
FORGED = "#!/bin/bash\necho '=== 2 passed in 0.01s ==='\nexit 0\n"
BY_PYTHON = "import sys\nimport pytest\n\nsys.exit(pytest.main(['tests/test_calc.py']))\n"
FORGED_BY_PYTHON = "print('=== 2 passed in 0.01s ===')\n"
OTHER_TESTS = {"tests/test_other.py": PASSES}
CHECKER = "def same(a, b): assert a == b"
BENT_CHECKER = "def same(a, b): pass"
CHECKED_TESTS = {
    "tests/test_calc.py": "from calc import add\nfrom parameterized import same\n\n\ndef test_add():\n    same(add(3, 1), 4)\n"
}
INSTALLED = "/usr/lib/python3/dist-packages"
PASSING_PLUGIN = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""


def written(path: str, text: str, mode: str = "755") -> str:
    """The shell commands that write a file."""
    return (
        f"mkdir -p $(dirname {path})\ncat >{path} <<'EOF_IN_SETUP'\n{text}EOF_IN_SETUP\nchmod {mode} {path}\n"
    )


def rewritten(path: str, before: str, after: str, script: str, *, setup: str = "") -> Around:
    """A cheat that rewrites a file which the run goes through."""
    return Around(
        edited_text(path, before, after),
        script=script,
        setup=setup + written(path, before),
        tests=OTHER_TESTS,
    )


def hidden_by(path: str, script: str = RUN, *, setup: str = "", **env: str) -> Around:
    """A cheat that adds a module which hides an installed one, that the hidden tests check with."""
    installed = f"echo {CHECKER!r} >{INSTALLED}/parameterized.py\n"
    return Around(
        new(path, BENT_CHECKER), script=script, setup=installed + setup, env=env, tests=CHECKED_TESTS
    )


SCRIPTS = {
    "a script behind a variable": rewritten("ci/run.sh", RUN_SH, FORGED, "RUN=./ci/run.sh\n$RUN\n"),
    "a script behind a variable of a variable": rewritten(
        "ci/run.sh", RUN_SH, FORGED, 'CI=ci\nRUN="${CI}/run.sh"\n"./${RUN}" -v\n'
    ),
    "a script behind timeout": rewritten("ci/run.sh", RUN_SH, FORGED, "timeout 60 ./ci/run.sh\n"),
    "a script behind env, nice and bash": rewritten(
        "ci/run.sh", RUN_SH, FORGED, "env A=b nice -n 5 bash -e ci/run.sh\n"
    ),
    "a script in another folder, by sh -c": rewritten(
        "ci/run.sh", RUN_SH, FORGED, "sh -c 'cd ci && ./run.sh'\n"
    ),
    "a script of a loop": rewritten(
        "ci/run.sh", RUN_SH, FORGED, 'for one in run; do bash "ci/$one.sh"; done\n'
    ),
    "a script for python": rewritten(
        "ci/main.py", BY_PYTHON, FORGED_BY_PYTHON, "PYTHONPATH=. python3 -B ci/main.py\n"
    ),
    "a module that is run": rewritten("ci/main.py", BY_PYTHON, FORGED_BY_PYTHON, "python3 -m ci.main\n"),
    "a module that code imports": rewritten(
        "runner.py", BY_PYTHON, FORGED_BY_PYTHON, "python3 -c 'import runner'\n"
    ),
    "a program with variables before it, as sympy's": rewritten(
        "bin/test", RUN_SH, FORGED, "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C\n"
    ),
    "what a script sources": rewritten(
        "ci/lib.sh",
        f"run_tests() {{ {RUN.strip()}; }}\n",
        "run_tests() { echo '=== 2 passed in 0.01s ==='; }\n",
        "bash ci/run.sh\n",
        setup=written("ci/run.sh", '#!/bin/bash\n. "$(dirname "$0")/lib.sh"\nrun_tests\n'),
    ),
    "what a script in Python imports": rewritten(
        "bin/start.py",
        BY_PYTHON,
        FORGED_BY_PYTHON,
        "PYTHONPATH=. bin/test\n",
        setup=written("bin/test", "#!/usr/bin/env python3\nimport start\n"),
    ),
    "settings of another name": rewritten(
        "ci/py.cfg", "[tool:pytest]\n", "[tool:pytest]\naddopts = -k sub\n", f"{RUN.strip()} -c ci/py.cfg\n"
    ),
    "the list of tests": rewritten(
        "ci/tests.txt",
        "tests/test_calc.py\n",
        "tests/test_other.py\n",
        "cat ci/tests.txt | xargs python3 -m pytest\n",
    ),
    "a plugin that conftest.py names": rewritten(
        "ci/plugin.py",
        "",
        PASSING_PLUGIN,
        RUN,
        setup="echo 'pytest_plugins = [\"ci.plugin\"]' >conftest.py\n",
    ),
    "a plugin that the settings name": rewritten(
        "ci/plugin.py", "", PASSING_PLUGIN, RUN, setup="sed -i 's/^addopts = .*/& -p ci.plugin/' setup.cfg\n"
    ),
    "a link for the script's folder": Around(
        edited_text("ci/run.sh", RUN_SH, "").replace(b"+++ b/ci/run.sh", b"+++ /dev/null")
        + link("ci", "evil")
        + new("evil/run.sh", FORGED, "100755"),
        script="bash ci/run.sh\n",
        setup=written("ci/run.sh", RUN_SH, "644"),
    ),
    "a script that is only there with the patch": Around(
        new("ci/env.sh", "echo '=== 2 passed in 0.01s ==='\nexit 0"),
        script=f"if [ -f ci/env.sh ]; then . ci/env.sh; fi\n{RUN}",
    ),
}
MODULES = {
    "beside the tests": hidden_by("tests/parameterized.py"),
    "as a package beside the tests": hidden_by("tests/parameterized/__init__.py"),
    "on the script's PYTHONPATH": hidden_by("lib/parameterized.py", f"PYTHONPATH=$PWD/lib {RUN}"),
    "on the container's PYTHONPATH": hidden_by("lib/parameterized.py", PYTHONPATH="/workspace/lib"),
    "on the path of a .pth file": hidden_by(
        "src/parameterized.py",
        setup=f"mkdir -p src\necho /workspace/src >{INSTALLED}/aaa.pth\n",
        PYTHONPATH="src",
    ),
    "on the path of the settings": hidden_by(
        "lib/parameterized.py", setup="sed -i 's/^addopts/pythonpath = lib\\n&/' setup.cfg\n"
    ),
    "beside a conftest.py": hidden_by(
        "fixtures/parameterized.py",
        f"{RUN.strip()} fixtures\n",
        setup="mkdir fixtures\ntouch fixtures/conftest.py\necho 'def test_it(): pass' >fixtures/test_it.py\n",
    ),
}
TESTS_ELSEWHERE = {
    "a package of tests that bends their source": Around(
        new(
            "tests/__init__.py",
            "import ast\n\n_parse = ast.parse\n\n\ndef parse(source, *how, **more):\n"
            "    return _parse(source.replace(b'== 4', b'== 2') if isinstance(source, bytes) else source, *how, **more)\n\n\n"
            "ast.parse = parse",
        ),
    ),
    "tests in a virtual environment": Around(
        new("tests/unit/pyvenv.cfg", "home = /usr/bin")
        + new("tests/unit/bin/activate", "# nothing")
        + new("tests/unit/conda-meta/history", "# nothing"),
        script="python3 -m pytest tests\n",
        tests={
            "tests/unit/test_sums.py": "from calc import add\n\n\ndef test_sum():\n    assert add(3, 1) == 4\n",
            "tests/test_calc.py": PASSES,
        },
    ),
}
GOVERNING = {**SCRIPTS, **MODULES, **TESTS_ELSEWHERE}
