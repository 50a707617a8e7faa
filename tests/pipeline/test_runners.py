"""The table of test runners: which commands start one, and how each reports its end."""

import pytest

from pipeline.runners import LANGUAGES, RUNNERS, closing_fault, run_by, started_by

COMMANDS = {
    "pytest -q tests": "pytest",
    "py.test tests": "pytest",
    "/opt/env/bin/python3.9 -W ignore -m pytest": "pytest",
    "uv run pytest": "pytest",
    "python -m coverage run -m unittest tests.test_calc": "unittest",
    "python -m unittest.main": "unittest",
    "./manage.py test app": "django",
    "python tests/runtests.py -v 2": "django",
    "nosetests -v": "nose",
    "nose2": "nose2",
    "python setup.py test": "setuptools",
    "tox -e py311": "tox",
    "nox -s tests": "nox",
    "npx jest src": "jest",
    "npx -y jest@29.7 src": "jest",
    "npx grunt@1 test": "grunt",
    "vitest": "vitest",
    "node_modules/.bin/mocha": "mocha",
    "npx ava --tap": "ava",
    "tap test/*.js": "tap",
    "tape 'test/**/*.js'": "tape",
    "node --test test/": "node",
    "node --test-reporter=tap --test": "node",
    "karma start": "karma",
    "npm run test:unit": "npm",
    "yarn test": "yarn",
    "ctest": "ctest",
    "go test ./...": "go",
    "cargo test --all": "cargo",
    "cargo --offline nextest run": "nextest",
    "cargo +nightly-2026-03-01 test": "cargo",
    "mvn -q test": "maven",
    "mvn -B -pl core -am clean verify": "maven",
    "./mvnw -ntp test -Dtest=A": "maven",
    "./gradlew test": "gradle",
    "./gradlew --offline clean :core:test": "gradle",
    "dotnet test": "dotnet",
    "bundle exec rspec": "rspec",
    "bundle exec rake test": "rake",
    "phpunit": "phpunit",
    "prove -r t": "prove",
    "bazel test //...": "bazel",
    "just test": "just",
    "make -s check": "make",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_starts_a_runner_is_known_as_one(command: str) -> None:
    started = started_by(command)
    assert started is not None
    assert started.name == COMMANDS[command]
    assert started in run_by(f"cd lib && {command} 2>&1 | tail")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_shell_is_given_as_text_is_run(command: str) -> None:
    started = started_by(command)
    assert started is not None
    for text in (
        f"bash -c '{command}'",
        f'bash -lc "cd lib && {command}"',
        f"bash -euo pipefail -c '{command}' | tail",
    ):
        assert started in run_by(text)
        assert started.is_used_by(text)


@pytest.mark.parametrize("before", ["# once: ", "ls # ", "echo It was ", "cd lib && printf %s "])
def test_what_a_comment_or_a_printed_text_says_of_a_shell_is_not_run(before: str) -> None:
    assert list(run_by(f"{before}bash -c 'ctest'")) == []


@pytest.mark.parametrize(
    "command",
    [
        *("cat pytest.ini", "vim tests/pytest_plugin.py", "pip install pytest tox", "uv add --dev pytest"),
        *(
            "make",
            "npm install jest",
            "npm install -D jest@29.7",
            "npm i jest@29.7",
            "python -m pytest_cov",
            "go build",
            "node test.js",
            "which pytest",
            "echo pytest",
            "python -c 'import pytest'",
            'python -c "import os; import pytest"',
        ),
        *(
            "cargo build",
            "cargo tree",
            "cargo install cargo-nextest",
            "mvn -q compile",
            "gradle build",
            "java -jar a.jar",
        ),
    ],
)
def test_a_command_that_names_a_runner_does_not_run_it(command: str) -> None:
    assert started_by(command) is None
    assert list(run_by(command)) == []


def test_each_runner_belongs_to_a_known_language() -> None:
    assert {runner.language for runner in RUNNERS} <= {"", *(language.name for language in LANGUAGES)}
    assert len({runner.name for runner in RUNNERS}) == len(RUNNERS)


CONSOLE = (
    "Test run finished after 79 ms\n[         2 containers found      ]\n[         0 containers failed     ]\n"
    "[         {0} tests successful      ]\n[         {1} tests failed          ]\n"
)
GTEST = "[==========] Running 1 test from 1 test suite.\n[  PASSED  ] 1 test.\n"
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
        ("java -cp out:lib/* org.junit.platform.console.ConsoleLauncher -p a", CONSOLE.format(3, 0)),
        ("java -jar lib/junit-platform-console-standalone-1.9.2.jar -p a", f"\x1b[32m{CONSOLE.format(1, 0)}\x1b[0m\n"),
        ("java org.junit.runner.JUnitCore demo.T", "JUnit version 4.13.2\n..\nTime: 0.01\n\nOK (2 tests)\n\n"),
        ("echo pytest follows\n./run", ""),
        *((script, "") for script in (
            "cd ctest && make check", "rm -rf build/ctest; make check", "make check  # not ctest",
            "cp -r vendor/pytest . && go test ./...", "javac -cp junit-platform-console-standalone-1.9.jar T.java",
            "ctest -j2 -Q", "bash -c 'ctest -Q'", "/usr/bin/ctest --quiet",
            "java org.junit.platform.console.ConsoleLauncher --details=none -p a",
        )),
        ("ctest", "100% tests passed, 0 tests failed out of 3\n"),
        ("./a_test && ./b_test", GTEST + "[==========] Running 1 test from 1 test suite.\n[  PASSED  ] 0 tests.\n"),
    ],
)  # fmt: skip
def test_a_log_that_agrees_is_believed(script: str, log: str) -> None:
    assert closing_fault(script, log) is None


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
        ("cd x && python -m unittest -v", "Ran 0 tests in 0.0s\n\nOK\n", "did not report its end"),
        (
            "python -m unittest",
            "Ran 2 tests in 0.0s\n\nFAILED (errors=1)\n",
            "reported Ran 2 tests in 0.0s FAILED",
        ),
        ("pip install pytest && pytest tests", "", "did not report its end"),
        ("java -jar junit-platform-console-standalone.jar -p a", "", "did not report its end"),
        ("java org.junit.platform.console.ConsoleLauncher -p a", CONSOLE.format(2, 1), "1 tests failed"),
        ("java org.junit.platform.console.ConsoleLauncher -p a", CONSOLE.format(0, 0), "passed no test"),
        (
            "ctest && java org.junit.platform.console.ConsoleLauncher -p a",
            "100% tests passed, 0 tests failed out of 3\n",
            "junit did not report its end",
        ),
        ("ctest", "67% tests passed, 1 tests failed out of 3\n", "1 tests failed out of 3"),
        ("./a_test", GTEST.replace("[  PASSED  ] 1 test.\n", ""), "gtest did not report its end"),
        (
            "java org.junit.runner.JUnitCore demo.T",
            "FAILURES!!!\nTests run: 5,  Failures: 1\n",
            "Failures: 1",
        ),
    ],
)
def test_a_log_that_disagrees_is_told(script: str, log: str, why: str) -> None:
    told = closing_fault(script, log)
    assert told is not None
    assert why in told
