"""The tasks that are made of fixes of real packages, and the table of what they are worth."""

import subprocess
from pathlib import Path

from benchmarks.known_fixes import PACKAGES, MeasuredFix, Package, table, write_task
from pipeline.task import ExitCode
from workers.tasksets.fleet import IMPORTER

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.invalid")


def commit(repository: Path, files: dict[str, str], message: str) -> str:
    for path, text in files.items():
        (repository / path).write_text(text)
    subprocess.run([*GIT, "add", "-A"], cwd=repository, check=True)
    subprocess.run([*GIT, "commit", "-qm", message], cwd=repository, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True)
    return head.stdout.decode().strip()


def test_a_commit_becomes_a_task_with_its_tests_hidden_and_the_rest_as_the_known_fix(tmp_path: Path) -> None:
    repository = tmp_path / "mirror/acme+calc/repo"
    repository.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    commit(repository, {"calc.go": "a - b\n", "calc_test.go": "old\n"}, "first")
    fix = commit(repository, {"calc.go": "a + b\n", "calc_test.go": "new\n"}, "Add, not subtract")
    package = Package(
        name="calc",
        language="Go",
        repository="acme/calc",
        fix=fix,
        tests=("calc_test.go",),
        script="go test ./...\n",
        image="RUN go vet\n",
    )
    write_task(package, tmp_path / "calc", tmp_path / "mirror", "acme/base:1")

    (fields,) = IMPORTER.read(tmp_path / "calc", None)
    task, gold = IMPORTER.task_of(fields)
    assert isinstance(task.verdict, ExitCode)
    assert (task.id, task.image, task.problem) == (
        "fleet:calc",
        "swerve-known-fixes/calc:1",
        "Add, not subtract",
    )
    assert (task.workdir, task.verdict.protected_paths) == ("/workspace", ("calc_test.go",))
    assert task.verdict.eval_script == "set -e\ncd /workspace\ngo test ./...\n"
    assert "+a + b" in gold.patch
    assert "calc_test" not in gold.patch
    assert "+new" in gold.test_patch
    assert "calc.go" not in gold.test_patch
    dockerfile = (tmp_path / "calc/task_calc/Dockerfile").read_text()
    assert dockerfile.startswith("FROM acme/base:1\n")
    assert dockerfile.endswith("RUN go vet\n")
    assert task.base_commit in dockerfile


def test_the_table_has_a_row_for_each_package_and_says_below_it_why_a_fix_was_not_worth_1() -> None:
    held = MeasuredFix(
        name=PACKAGES[0].name,
        fix=PACKAGES[0].fix,
        ok=True,
        reason="",
        control="confirmed",
        num_tests=4,
        num_controlled=3,
        num_needing_fix=2,
        num_uncontrolled=0,
        rewards=[1.0, 1.0],
        controls={"confirmed": 2},
        whys=[],
        empty=0.0,
    )
    lost = MeasuredFix(
        name=PACKAGES[1].name,
        fix=PACKAGES[1].fix,
        ok=True,
        reason="",
        control="none",
        num_tests=0,
        num_controlled=0,
        num_needing_fix=0,
        num_uncontrolled=0,
        rewards=[1.0, 0.0],
        controls={"none": 2},
        whys=["exit status 1"],
        empty=None,
    )
    assert held.held
    assert not lost.held
    *_, first, second, why = table([held, lost]).splitlines()
    assert first.endswith("| confirmed | 0 of 2 | 3 of 4 (75.0%) | 2 of 2 | 2 confirmed | 0 |")
    assert second.endswith("| none | 0 of 0 | 0 of 0 (-) | 1 of 2 | 2 none | broken |")
    assert why == f"{PACKAGES[1].name}: exit status 1"
