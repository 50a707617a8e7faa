import subprocess
from pathlib import Path

import pytest

from workers.tasksets.eval_scripts import with_status_of_tests

PATCHES = "cat <<'EOF_1' >/dev/null\npytest in_a_patch.py\nexit 0\nEOF_1\n"


@pytest.fixture
def status(tmp_path: Path):
    """How a script ends whose `pytest` ends with the statuses given, one a call."""

    def run(script: str, *statuses: int) -> int:
        (tmp_path / "statuses").write_text("".join(f"{number}\n" for number in statuses))
        fake = "read -r status <statuses; sed -i 1d statuses; exit $status"
        tool = tmp_path / "pytest"
        tool.write_text(f"#!/bin/bash\n{fake}\n")
        tool.chmod(0o755)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, check=False).returncode

    return run


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/bash\nset -uxo pipefail\n" + PATCHES + "pytest -rA tests\ntrue checkout base tests\n",
        "pytest tests || true\n",
        "pytest tests ; true",
        "pytest tests\nexit 0\n",
        "pytest \\\n  tests\necho done\n",
        "pytest tests | cat\n",
        "#!/bin/bash\npytest tests 2>&1 | cat\ntrue\n",
        "set -e\npytest tests || true\necho done\n",
        "set -e\nset +e\ncd . && pytest tests\necho done\n",
    ],
)
def test_a_script_that_could_end_otherwise_than_its_tests_is_made_to_end_as_they_do(
    status, script: str
) -> None:
    assert status(script, 1) == 0
    assert status(with_status_of_tests(script), 1) != 0
    assert status(with_status_of_tests(script), 0) == 0


@pytest.mark.parametrize("statuses", [(1, 0), (0, 1), (4, 5)])
def test_each_of_several_tests_counts(status, statuses: tuple[int, int]) -> None:
    assert status(with_status_of_tests("pytest a\npytest b\n"), *statuses) != 0
    assert status(with_status_of_tests("pytest a\npytest b\n"), 0, 0) == 0


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/bash\npip install pytest\n" + PATCHES + "pytest tests",
        "#!/bin/bash\nset -e\npytest a\ngit checkout base tests\n",
        "set -euxo pipefail\npytest a\npytest b\n",
        "set -e\n(\npytest a\n)\ngit checkout base tests\n",
        "pytest tests\nrc=$?\ngit checkout base tests\nexit $rc\n",
        "if pytest tests; then\n  exit 0\nelse\n  exit 1\nfi\n",
        'if [ -f tox.ini ]; then\n  export A=1\nfi\nread -r _ <<< "x"\npytest tests\n',
    ],
)
def test_a_script_that_ends_as_its_tests_do_stays_as_it_is(script: str) -> None:
    assert with_status_of_tests(script) == script


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo nothing\n", "runs no tests"),
        ("cd x && pip install pytest\n" + PATCHES, "runs no tests"),
        ("if true; then\n  pytest tests\nfi\ngit checkout base tests\n", "in an if, a loop"),
        ("set -e\nif pytest tests; then\n  echo good\nfi\n", "in an if, a loop"),
        ("(\nset -e\npytest tests\n)\necho done\n", "in an if, a loop"),
        ("for t in a b; do\n  pytest $t\ndone\n", "in an if, a loop"),
        ("run() {\n  pytest tests\n}\nrun\necho done\n", "in an if, a loop"),
    ],
)
def test_a_script_that_is_not_understood_is_refused(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_status_of_tests(script)
