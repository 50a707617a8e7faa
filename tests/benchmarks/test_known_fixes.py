"""The tasks that are made of fixes of real packages, and the table of what they are worth."""

import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.known_fixes import (
    OTHER_FIXES,
    PACKAGES,
    MeasuredFix,
    OtherFix,
    Package,
    main,
    table,
    write_task,
)
from pipeline.task import ExitCode
from workers.tasksets.fleet import IMPORTER
from workers.tasksets.patches import paths_of

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
        others=[
            OtherFix(file="a.patch", rewards=[1.0] * 3, controls={"confirmed": 3}, whys=[]),
            OtherFix(file="a.2.patch", rewards=[1.0] * 3, controls={"confirmed": 2, "partial": 1}, whys=[]),
            OtherFix(file="a.wrong.patch", rewards=[0.0], controls={"": 1}, whys=["a test failed"]),
        ],
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
    assert first.endswith(
        "| confirmed | 0 of 2 | 3 of 4 (75.0%) | 2 of 2 | 2 confirmed | 0 | 6 of 6 | 5 confirmed, 1 partial | 1 of 1 |"
    )
    assert second.endswith("| none | 0 of 0 | 0 of 0 (-) | 1 of 2 | 2 none | broken | - | - | - |")
    assert why == f"{PACKAGES[1].name}: exit status 1"

    refuted = OtherFix(file="a.patch", rewards=[1.0, 0.0], controls={"confirmed": 2}, whys=["exit status 1"])
    missed = OtherFix(file="a.wrong.patch", rewards=[1.0], controls={"confirmed": 1}, whys=[])
    with_others = structs.replace(held, others=[refuted, missed])
    assert not with_others.held
    *_, row, right, wrong = table([with_others]).splitlines()
    assert row.endswith("| 1 of 2 | 2 confirmed | 0 of 1 |")
    assert right == f"{PACKAGES[0].name}: a.patch: exit status 1"
    assert wrong == f"{PACKAGES[0].name}: a.wrong.patch: worth 1"


def test_each_other_fix_is_of_a_package_says_how_it_differs_and_touches_no_tests() -> None:
    packages = {one.name: one for one in PACKAGES}
    files = sorted(OTHER_FIXES.iterdir())
    assert len({file.name.partition(".")[0] for file in files if ".wrong." not in file.name}) >= 10
    for file in files:
        says, _, diff = file.read_text().partition("diff --git ")
        paths = paths_of(f"diff --git {diff}")
        assert 1 <= len(says.splitlines()) <= 2, file
        assert paths, file
        assert not set(paths) & set(packages[file.name.partition(".")[0]].tests), file


@pytest.mark.parametrize(
    ("flag", "says"),
    [("--repeats=1", "cannot change to"), ("--others", "call this command without --others")],
)
def test_a_package_that_cannot_be_measured_does_not_end_the_others(
    flag: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["uuid", "mux", flag, "--mirror", str(tmp_path / "missing"), "--out", str(tmp_path / "out")]
    )

    assert status == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("uuid: ")
    assert second.startswith("mux: ")
    assert says in first
    assert says in second
