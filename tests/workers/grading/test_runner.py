import pytest

from workers.grading.runner import Control, contradiction, each_must_pass, hides_names, same_runner_settings

PASSED = "=========== test session starts ===========\n...\n=========== 3 passed in 0.05s ===========\n"


@pytest.mark.parametrize(
    ("script", "log"),
    [
        ("pytest -q", "3 passed in 0.05s\n"),
        ("python -m pytest tests", PASSED),
        ("pytest", PASSED.replace("3 passed", "3 passed, 1 skipped, 2 xfailed, 1 warning")),
        ("pytest", "\x1b[32m=== \x1b[1m3 passed\x1b[0m, 1 warning\x1b[32m in 62.10s (0:01:02)\x1b[0m ===\n"),
        ("pytest", "1 failed in 0.1s\n" + PASSED),
        ("pytest", PASSED.replace("\n", "\r\n")),
        ("py.test", "=== 12 passed, 2 deselected in 3.14 seconds ===\n"),
        ("pip install pytest\nmake check", "all is well\n"),
        ("# pytest would be nice\n./run", ""),
        ("python -m unittest", "..\n----\nRan 2 tests in 0.001s\n\nOK (skipped=1)\n"),
        ("npm test", ""),
    ],
)  # fmt: skip
def test_a_log_that_agrees_is_believed(script: str, log: str) -> None:
    assert contradiction(script, log) is None


@pytest.mark.parametrize(
    ("script", "log", "why"),
    [
        ("pytest", "", "did not report its end"),
        ("set -e\npytest -x", "=== test session starts ===\ncollected 4 items\n", "did not report its end"),
        ("./run", "=== test session starts ===\n", "did not report its end"),
        ("pytest", PASSED + "=== 1 failed, 3 passed in 0.05s ===\n", "1 failed, 3 passed"),
        ("pytest", "=== 2 passed, 1 error in 0.05s ===\n", "1 error"),
        ("pytest", "=== 3 skipped in 0.05s ===\n", "passed no test"),
        ("pytest", "=== no tests ran in 0.05s ===\n", "did not report its end"),
        ("pytest", "we saw 3 passed in 0.05s, honestly\n", "did not report its end"),
        ("cd x && python -m unittest -v", "Ran 0 tests in 0.0s\n\nOK\n", "did not report OK"),
        ("python -m unittest", "Ran 2 tests in 0.0s\n\nFAILED (errors=1)\n", "did not report OK"),
    ],
)
def test_a_log_that_disagrees_is_told(script: str, log: str, why: str) -> None:
    told = contradiction(script, log)
    assert told is not None
    assert why in told


@pytest.mark.parametrize(
    "header",
    [
        "+++ b/conftest.py",
        "+++ b/a b/conftest.py\t2025-01-01",
        "diff --git a/tests/conftest.py b/tests/conftest.py",
        "rename from tests/conftest.py",
        "--- a/lib/evil.pth",
        "+++ b/.gitattributes\r",
        'diff --git "a/\\303\\251/x.py" "b/\\303\\251/x.py"',
        '+++ "b/with \\" quote/pyproject.toml"',
        "Index: setup.cfg",
    ],
)
def test_files_that_govern_the_runner_are_seen_in_any_header(header: str) -> None:
    assert Control("pytest\n", "/workspace").touched_by(f"junk\n{header}\n@@ -1 +1 @@\n".encode())


def test_an_ordinary_patch_touches_nothing_of_the_runner() -> None:
    assert not Control("pytest\n", "/workspace").touched_by(
        b"--- a/myconftest.py\n+++ b/docs/pytest.ini.rst\n@@ -1 +1 @@\n-import conftest.py\n+x\n"
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("pyproject.toml", None, b"[tool.ruff]\n", True),
        ("pyproject.toml", b"[project]\nname='a'\n", b"[project]\nname='b'\n", True),
        ("pyproject.toml", None, b"[tool.pytest.ini_options]\naddopts='-k x'\n", False),
        ("pyproject.toml", b"", b'tool."pyt\\u0065st".ini_options.addopts="-k x"\n', False),
        ("pyproject.toml", b"[tool.pytest.ini_options]\nx=1\n", None, False),
        ("pyproject.toml", b"", b"[broken", False),
        ("setup.cfg", b"[metadata]\nname=a\n", b"[metadata]\nname=b\n[options]\nrequires=pytest\n", True),
        ("setup.cfg", b"", b"[tool:pytest]\naddopts=-k x\n", False),
        ("setup.cfg", b"[tool:pytest]\n", b"[tool:pytest]\naddopts=-k x\n", False),
        ("setup.cfg", b"[tool:pytest]\n", None, False),
        ("setup.cfg", None, b"\xff", False),
    ],
)  # fmt: skip
def test_only_what_is_said_to_pytest_counts(
    name: str, old: bytes | None, new: bytes | None, same: bool
) -> None:
    assert same_runner_settings(name, old, new) is same


@pytest.mark.parametrize(
    "header",
    [
        "+++ b/argparse.py",
        "+++ b/src/json/__init__.py",
        "rename to pluggy.py",
        "+++ b/deep/_pytest/__init__.py",
        "+++ b/pluggy",
        "+++ b/evil.egg-info/entry_points.txt",
        "+++ b/src/evil-1.dist-info/METADATA",
        "+++ b/noxfile.py",
        "+++ b/.env",
        "+++ b/Makefile",
        "+++ b/ci/run_tests.sh",
        "+++ b/package.json",
    ],
)
def test_modules_that_python_may_take_for_the_runners_are_seen(header: str) -> None:
    control = Control(
        "make test\nnox -s tests\npipenv run bash ci/run_tests.sh\nbash ci/run_tests.sh\n", "/workspace"
    )
    assert control.touched_by(f"{header}\n".encode())
    assert not Control("pytest\n", "/workspace").touched_by(
        b"+++ b/Makefile\n+++ b/run_tests.sh\n+++ b/.env\n"
    )


def test_only_scripts_that_are_tests_by_their_name_are_the_runners() -> None:
    script = (
        "set -e\ncd /workspace\nsource activate testbed && ./ci/run_tests.sh -v; bash /workspace/check.sh\n"
    )
    script += "bash install.sh\n. tests/env.sh | tee log\nsource ./env\n"
    assert Control(script, "/workspace").paths == ("check.sh", "ci/run_tests.sh", "tests/env.sh")


def test_of_python_projects_what_the_script_sources_and_what_chooses_its_tests_are_the_runners() -> None:
    sources = "source activate x\n. ./.env\nsource /opt/conda/bin/activate && . 'ci/env.sh'\n"
    assert Control(f"{sources}python3.9 -m pytest\n", "/workspace").paths == (".env", "ci/env.sh")
    assert "*/tests/__init__.py" in Control("python -m unittest\n", "/workspace").paths
    assert Control("python -m unittest\n", "/workspace").touched_by(b"+++ b/lib/tests/__init__.py\n")


@pytest.mark.parametrize(
    ("script", "num_runs", "must"),
    [
        ("#!/bin/bash\nset -euo pipefail\ncd x\npytest a\npython -m unittest b\n", 2, True),
        ("set -e\npytest a\n", 2, False),
        ("pytest a\npytest b\n", 2, False),
        ("set -e\npytest a | tee log\npytest b\n", 2, False),
        ("set -e\npytest a && echo well\npytest b\n", 2, False),
        ("set -e\nset +e\npytest a\npytest b\n", 2, False),
        ("set -e\nif pytest a; then pytest b; fi\n", 2, False),
    ],
)
def test_a_run_must_pass_only_where_the_script_tolerates_nothing(
    script: str, num_runs: int, must: bool
) -> None:
    assert each_must_pass(script, num_runs) is must


def test_directories_that_the_script_enters_or_runs_from_are_known() -> None:
    script = 'cd /workspace/lib\ncd "tests" && x\nexport PATH=$PWD/bin:/usr/bin:${PWD}/tools:$PATH\n'
    control = Control(script, "/workspace")
    assert control.directories == (".", "lib", "src", "tests")
    assert control.program_directories == ("bin", "tools")


MAKEFILE = "CC = gcc\nTESTS = tests\n\nall: a.o\n\tgcc a.o\n\ntest: all\n\tpytest $(TESTS)\n"


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("all: a.o", "all: a.o b.o", True),
        ("CC = gcc", "CC = clang", True),
        ("pytest $(TESTS)", "true", False),
        ("TESTS = tests", "TESTS = --version", False),
        ("CC = gcc", "SHELL = /bin/true", False),
        ("CC = gcc", "-include evil.mk", False),
        ("CC = gcc", "export PYTEST_ADDOPTS = -k sub", False),
        ("all: a.o", "test:\n\ttrue\n\nall: a.o", False),
    ],
)
def test_of_a_makefile_only_what_is_made_counts(old: str, new: str, same: bool) -> None:
    changed = MAKEFILE.replace(old, new)
    assert same_runner_settings("Makefile", MAKEFILE.encode(), changed.encode(), "make -s test\n") is same


def test_what_is_no_settings_file_any_more_is_not_the_same() -> None:
    for name, text in (
        ("pyproject.toml", "tool = 3"),
        ("package.json", "[" * 100_000),
        ("package.json", "[]"),
    ):
        assert isinstance(same_runner_settings(name, b"", text.encode()), bool)
    scripts = b'{"scripts": {"test": "jest"}}'
    assert same_runner_settings("package.json", scripts, b'{"scripts": {"test": "jest"}, "version": "2"}')
    assert not same_runner_settings("package.json", scripts, b'{"scripts": {"test": "exit 0"}}')
    entry_points = b"[options.entry_points]\npytest11 =\n  evil = evil\n"
    assert not same_runner_settings("setup.cfg", b"[metadata]\n", entry_points)
    assert not same_runner_settings(
        "pyproject.toml", b"", b"[project.entry-points.pytest11]\nevil = 'evil'\n"
    )


def test_letters_written_as_numbers_are_seen() -> None:
    assert hides_names(b'+++ "b/\\056git/config"\n')
    assert not hides_names(b'+++ "b/\\303\\251.py"\n')
