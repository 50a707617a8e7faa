import pytest

from workers.grading.runner import contradiction, same_pytest_settings, touches_runner

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
    assert touches_runner(f"junk\n{header}\n@@ -1 +1 @@\n".encode())


def test_an_ordinary_patch_touches_nothing_of_the_runner() -> None:
    assert not touches_runner(
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
    assert same_pytest_settings(name, old, new) is same
