"""Tasks as their sources publish them, from import to verification."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.taskfile import fingerprint, read_tasks, read_verified, verified_path
from tests.workers.conftest import RepoImage
from tests.workers.verify.spans import FIX, MORE_CASES, NEW_TEST, verify
from workers.tasksets.__main__ import main as import_tasks

pytestmark = pytest.mark.docker

EXPECTED = {"empty": 0, "useless": 0, "tests_only": 0, "gold": 1, "agent": 1}
PYTEST = "#!/bin/bash\nset -e\ncd /workspace\npython3 -m pytest {}\n"
ROW_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout {commit} {checked_out}
git apply -v - <<'EOF_114329324912'
{test_patch}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA {path}
: '>>>>> End Test Output'
git checkout {commit} {checked_out}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A way in which hidden tests relate to the tests that the image has."""

    name: str
    path: str
    test_patch: str
    command: str  # pytest's arguments in the published eval script
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


SHAPES = (
    Shape(
        "new-cases",
        "tests/test_spans.py",
        MORE_CASES,
        "tests/test_spans.py",
        ("tests/test_spans.py::test_hours[1d-24]", "tests/test_spans.py::test_hours[2d-48]"),
        ("tests/test_spans.py::test_hours[1h-1]", "tests/test_spans.py::test_hours[3h-3]"),
    ),
    Shape(
        "new-test",
        "tests/test_days.py",
        NEW_TEST,
        "tests/test_days.py::test_a_day_has_24_hours",
        ("tests/test_days.py::test_a_day_has_24_hours",),
        (),
    ),
)


@pytest.fixture
def fleet_directory(tmp_path: Path, image: RepoImage) -> Path:
    """Both shapes as swe-task-generator publishes tasks: eval scripts without the hidden tests, diffs without last newlines."""
    for number, shape in enumerate(SHAPES, 1):
        record = {
            "instance_id": f"acme-spans-{number}",
            "repo": "acme/spans",
            "base_commit": image.commit,
            "problem_statement": "A day has 12 hours.",
            "gold_patch": FIX + shape.test_patch,
            "fix_patch": FIX.rstrip("\n"),
            "test_patch": shape.test_patch.rstrip("\n"),
            "test_files": [shape.path],
            "image_name": image.tag,
            "eval_script": PYTEST.format(shape.command),
        }
        folder = tmp_path / f"tasks/task_{number:03d}"
        folder.mkdir(parents=True)
        (folder / "task.json").write_text(json.dumps(record))
    return tmp_path / "tasks"


@pytest.fixture
def swe_bench_rows(tmp_path: Path, image: RepoImage) -> Path:
    """Both shapes as rows of a SWE-bench dataset, with the harness's own scripts."""
    rows: list[str] = []
    for shape in SHAPES:
        checked_out = shape.path if shape.pass_to_pass else "spans.py"  # the harness leaves new files out
        script = ROW_SCRIPT.format(
            commit=image.commit, checked_out=checked_out, test_patch=shape.test_patch, path=shape.path
        )
        row = {
            "instance_id": f"acme__spans-{shape.name}",
            "repo": "acme/spans",
            "version": "1.0",
            "base_commit": image.commit,
            "problem_statement": "A day has 12 hours.",
            "patch": FIX,
            "test_patch": shape.test_patch,
            "FAIL_TO_PASS": json.dumps(shape.fail_to_pass),
            "PASS_TO_PASS": json.dumps(shape.pass_to_pass),
            "image": image.tag,
            "eval_script": script.replace(f" {checked_out}\n", "\n") if not shape.pass_to_pass else script,
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
        }
        rows.append(json.dumps(row))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.slow
def test_a_repository_that_is_not_where_the_row_says_is_found_and_the_row_can_name_it(
    swe_bench_rows: Path, tmp_path: Path
) -> None:
    rows, tasks = tmp_path / "elsewhere.jsonl", tmp_path / "tasks.jsonl"
    row = json.loads(swe_bench_rows.read_text().splitlines()[0])

    def verified_of(row: dict[str, Any]) -> tuple[bool, str]:
        rows.write_text(json.dumps(row) + "\n")
        assert import_tasks(["import", "swe-bench", str(rows), "--out", str(tasks)]) == 0
        [line] = verify(tasks)[1].values()
        return line["ok"], line["reason"]

    is_ok, reason = verified_of(row | {"workdir": "/srv/units"})
    assert not is_ok
    assert "workdir: /srv/units of" in reason
    assert (
        "one is at /testbed and at /workspace" in reason or "one is at /workspace and at /testbed" in reason
    )
    assert "in the row's column workdir" in reason
    there = row | {"eval_script": row["eval_script"].replace("/testbed", "/workspace")}
    assert verified_of(there) == (True, ""), "the script enters the directory"
    assert verified_of(there | {"workdir": ""}) == (True, ""), "the image's own WORKDIR"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "kind"), [("fleet", "exit_code"), ("swe-bench", "swebench_log")])
def test_tasks_as_published_are_worth_something_for_the_fix_alone(
    source: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    published = request.getfixturevalue("fleet_directory" if source == "fleet" else "swe_bench_rows")
    tasks = tmp_path / "tasks.jsonl"
    assert import_tasks(["import", source, str(published), "--out", str(tasks)]) == 0
    status, lines = verify(tasks)
    assert [(line["states"], line["reason"], line["verdict_kind"]) for line in lines.values()] == [
        (EXPECTED, "", kind),
        (EXPECTED, "", kind),
    ]
    assert status == 0
    assert list(lines) == [task.id for task in read_tasks(tasks)], "in the order of the file"
    verified = read_verified(verified_path(tasks))
    assert {task.id: fingerprint(task) for task in read_tasks(tasks)} == {
        one.task: one.fingerprint for one in verified.values()
    }
    assert all(one.ok and one.verified_at > 0 for one in verified.values())
