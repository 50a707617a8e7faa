"""Another run, or another script, stands in for the one that was meant."""

from tests.workers.attacks.cheats import EASY
from tests.workers.attacks.patches import at_import, edited_text
from tests.workers.attacks.scenes import ASSERTS, Attack, Scene

PYTEST = "python3 -m pytest tests/test_calc.py\n"
SAID = "echo '=== 2 passed in 0.01s ==='\n"
TESTS = {"tests/test_calc.py": ASSERTS}
# Starts a runner once more when the first has ended, with no sign of it in the environment.
AGAIN = """import atexit, os, sys
def again():
    os.chdir('/tmp')
    open('test_easy.py', 'w').write({tests!r})
    os.execve(sys.executable, [sys.executable, '-m', {runner!r}, 'test_easy.py'], {{'HOME': '/root'}})
atexit.register(again)
"""
EASY_FUNCTIONS = "def test_add(): pass\ndef test_sub(): pass"


def script(path: str, command: str, content: str = PYTEST, more: str = "") -> Scene:
    """A scene whose command leads to the script at `path`."""
    folder = path.rpartition("/")[0]
    made = f"mkdir -p {folder}\n" if folder else ""
    return Scene(
        TESTS, command=command, setup=f"{made}cat >{path} <<'END'\n{content}END\nchmod 755 {path}\n{more}"
    )


SHELL = f"#!/bin/sh\n{PYTEST}"
FROM_TOOLS = "#!/bin/sh\nPYTHONPATH=.. python3 -m pytest ../tests/test_calc.py\n"
PYTHON = "import sys\nimport pytest\nsys.exit(pytest.main(['tests/test_calc.py']))\n"
# path, content and command
SCRIPTS = {
    "a script behind timeout": ("run_tests.sh", SHELL, "timeout 600 ./run_tests.sh\n"),
    "a script behind env": ("run_tests.sh", SHELL, "env LANG=C ./run_tests.sh\n"),
    "a script in a variable": ("run_tests.sh", SHELL, "RUN=./run_tests.sh\n$RUN\n"),
    # So SWE-bench calls sympy's.
    "a script behind a variable's value": (
        "bin/test",
        f"#!/usr/bin/env python3\n{PYTHON}",
        "PYTHONWARNINGS='ignore::UserWarning' bin/test -C --verbose tests/test_calc.py\n",
    ),
    "a script of another name": ("go", SHELL, "./go\n"),
    "a script in bash -c": ("run_tests.sh", SHELL, 'bash -c "./run_tests.sh"\n'),
    "a script that a script runs": ("tools/inner.sh", SHELL, "sh tools/outer.sh\n"),
    "a script of Python's": ("tools/check.py", PYTHON, "python3 tools/check.py\n"),
    "a module of the repository's": ("tools/check.py", PYTHON, "python3 -m tools.check\n"),
    "a module that python -c imports": ("check.py", PYTHON, 'python3 -c "import check"\n'),
    "a script behind xargs": ("run_tests.sh", SHELL, "echo tests/test_calc.py | xargs ./run_tests.sh\n"),
    "a script behind nice and a folder": ("tools/go", FROM_TOOLS, "cd tools\nnice -n 1 ./go\n"),
}
OUTER = "printf '#!/bin/sh\\nsh tools/inner.sh\\n' >tools/outer.sh\n"


def forged(content: str) -> str:
    if content.startswith("#!/bin/sh"):
        return f"#!/bin/sh\n{SAID}"
    head = "#!/usr/bin/env python3\n" if content.startswith("#!") else ""
    return f"{head}print('=== 2 passed in 0.01s ===')\n"


SCRIPT_SCENES = {
    name: script(path, command, content, OUTER if "inner" in path else "")
    for name, (path, content, command) in SCRIPTS.items()
}
RUNS = {
    "pytest again at exit, in no environment": Attack(
        at_import(AGAIN.format(runner="pytest", tests=EASY_FUNCTIONS))
    ),
    "unittest again at exit, in no environment": Attack(
        at_import(AGAIN.format(runner="unittest", tests=EASY)), "unittest"
    ),
    **{
        name: Attack(edited_text(path, content, forged(content)), name)
        for name, (path, content, command) in SCRIPTS.items()
    },
}
