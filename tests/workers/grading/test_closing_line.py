import pytest

from workers.grading.closing_line import closing_line_fault, each_must_pass

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
    assert closing_line_fault(script, log) is None


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
    told = closing_line_fault(script, log)
    assert told is not None
    assert why in told


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
