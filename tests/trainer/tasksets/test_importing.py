import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.task import ExitCode, SwebenchLog
from pipeline.taskfile import gold_path, read_gold, read_tasks, write_tasks
from trainer.tasksets.__main__ import main

TEST_PATCH = (
    "diff --git a/tests/a.py b/tests/a.py\n--- a/tests/a.py\n+++ b/tests/a.py\n@@ -1 +1 @@\n-1\n+hidden\n"
)
FLEET: dict[str, Any] = {
    "instance_id": "acme-calc-7",
    "repo": "acme/calc",
    "base_commit": "abc",
    "problem_statement": "It is wrong.\n\n## Files Changed\n- `src/a.py`\n- `tests/a.py`\n\n## Notes\nHurry.",
    "gold_patch": "the gold",
    "fix_patch": "the fix",
    "test_patch": TEST_PATCH,
    "test_files": ["tests/b.py"],
    "image_name": "acme/task:latest",
    "eval_script": "pytest\n",
    "pr_number": 7,
}
SWE_BENCH: dict[str, Any] = {
    "instance_id": "acme__calc-7",
    "repo": "acme/calc",
    "version": "1.0",
    "base_commit": "abc",
    "problem_statement": "It is wrong.",
    "patch": "the gold",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["t::a"]',
    "PASS_TO_PASS": ["t::b"],
    "image": "acme/task:latest",
    "eval_script": "pytest\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}


def write_fleet(directory: Path, *records: dict[str, Any]) -> Path:
    for number, record in enumerate(records, 1):
        folder = directory / f"task_{number:03d}"
        folder.mkdir(parents=True)
        (folder / "task.json").write_text(json.dumps(record))
    return directory


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def run(tmp_path: Path, kind: str, source: Path) -> Path:
    out = tmp_path / "tasks.jsonl"
    assert main(["import", kind, str(source), "--out", str(out)]) == 0
    return out


def test_a_fleet_task_keeps_its_hidden_tests_and_loses_what_gives_it_away(tmp_path: Path) -> None:
    source = write_fleet(tmp_path / "fleet", FLEET)
    (task,) = read_tasks(run(tmp_path, "fleet", source))
    assert (task.id, task.image, task.workdir) == ("fleet:acme-calc-7", "acme/task:latest", "/workspace")
    assert task.problem == "It is wrong.\n\n## Notes\nHurry."
    assert task.verdict == ExitCode(
        eval_script="pytest\n",
        test_patch=TEST_PATCH.encode(),
        protected_paths=("tests/b.py", "tests/a.py"),
    )


def test_the_workdir_is_the_dockerfiles_last(tmp_path: Path) -> None:
    source = write_fleet(tmp_path / "fleet", FLEET)
    (source / "task_001/Dockerfile").write_text("FROM a\nWORKDIR /one\nRUN x\nworkdir /two\nCMD bash\n")
    assert read_tasks(run(tmp_path, "fleet", source))[0].workdir == "/two"


def test_a_swe_bench_row_becomes_a_log_verdict(tmp_path: Path) -> None:
    (task,) = read_tasks(run(tmp_path, "swe-bench", write_rows(tmp_path / "rows.jsonl", SWE_BENCH)))
    assert (task.id, task.workdir) == ("swe-bench:acme__calc-7", "/testbed")
    assert task.verdict == SwebenchLog(
        eval_script="pytest\n",
        log_parser="parse_log_pytest",
        fail_to_pass=("t::a",),
        pass_to_pass=("t::b",),
        repo="acme/calc",
        version="1.0",
        protected_paths=("tests/a.py",),
    )


@pytest.mark.parametrize("kind", ["fleet", "swe-bench"])
def test_solutions_lie_in_a_file_of_their_own(tmp_path: Path, kind: str) -> None:
    sources = {
        "fleet": write_fleet(tmp_path / "fleet", FLEET),
        "swe-bench": write_rows(tmp_path / "rows.jsonl", SWE_BENCH),
    }
    out = run(tmp_path, kind, sources[kind])
    (task,) = read_tasks(out)
    assert read_gold(gold_path(out))[task.id].patch == {"fleet": "the fix", "swe-bench": "the gold"}[kind]
    assert "the gold" not in out.read_text()
    assert "the fix" not in out.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({field: ""}, f"{field}: must be a non-empty string") for field in (
            "instance_id", "repo", "base_commit", "problem_statement", "gold_patch", "image_name",
            "eval_script", "test_patch",
        )),
        ({"repo": None}, "repo: must be a non-empty string, is absent"),
        ({"eval_script": " \n"}, "eval_script"),
        ({"test_files": "tests"}, "test_files: not JSON"),
        ({"test_files": [1]}, "test_files: must be a list of strings"),
        ({"instance_id": "other"}, "instance_id: 'other' is that of"),
    ],
)  # fmt: skip
def test_a_fleet_task_that_will_not_do_is_refused_by_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    source = write_fleet(tmp_path / "fleet", FLEET | {"instance_id": "other"}, FLEET | change)
    out = tmp_path / "tasks.jsonl"
    assert main(["import", "fleet", str(source), "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert "task_002/task.json" in told
    assert message in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, ":3: image: must be a non-empty string, is absent"),
        ({"eval_script": ""}, ":3: eval_script"),
        ({"log_parser": None}, ":3: log_parser"),
        ({"eval_type": "both"}, ":3: eval_type: must be one of"),
        ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}, ":3: FAIL_TO_PASS: empty"),
        ({"FAIL_TO_PASS": "t::a"}, ":3: FAIL_TO_PASS: not JSON"),
        ({"instance_id": "other"}, ":3: instance_id: 'other' was there before"),
    ],
)
def test_a_row_that_will_not_do_is_refused_by_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", SWE_BENCH | {"instance_id": "other"}, SWE_BENCH | change)
    assert main(["import", "swe-bench", str(source), "--out", str(tmp_path / "tasks.jsonl")]) == 1
    assert f"rows.jsonl{message}" in capsys.readouterr().err


def test_an_empty_or_absent_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "fleet", str(tmp_path), "--out", str(tmp_path / "t")]) == 1
    assert "no task_*/task.json" in capsys.readouterr().err
    assert main(["import", "swe-bench", str(tmp_path / "none"), "--out", str(tmp_path / "t")]) == 1


def test_a_task_file_says_which_line_is_no_task(tmp_path: Path) -> None:
    out = run(tmp_path, "fleet", write_fleet(tmp_path / "fleet", FLEET))
    tasks = read_tasks(out)
    out.write_bytes(out.read_bytes() + b'{"id": 5}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: not a Task: .*\$\.id"):
        read_tasks(out)
    with pytest.raises(ValueError, match="stands for two tasks"):
        write_tasks(out, tasks * 2)
