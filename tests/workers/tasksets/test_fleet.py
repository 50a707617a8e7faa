import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.task import ExitCode
from tests.workers.tasksets.published import FIXTURES, imported, write_lines
from workers.tasksets import fleet
from workers.tasksets.__main__ import main
from workers.tasksets.patches import paths_of

TASKS = FIXTURES / "fleet"
SOURCE, TESTS = "src/units/lengths.py", "tests/test_lengths.py"


def published() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(TASKS.glob("task_*/task.json"))]


def changed(**changes: Any) -> dict[str, Any]:
    return published()[0] | changes


def test_a_task_keeps_its_hidden_tests_and_loses_what_gives_it_away(tmp_path: Path) -> None:
    shutil.copytree(TASKS, tmp_path / "tasks")
    (tmp_path / "tasks/agentic_workspace").mkdir()
    (tmp_path / "tasks/summary.json").write_text("{}")
    tasks = imported(tmp_path, "fleet", tmp_path / "tasks")
    assert tasks == imported(tmp_path, "fleet", tmp_path)  # the repository that holds tasks/ will do
    assert list(tasks) == ["acme-units-12", "acme-units-14"]
    task, gold = tasks["acme-units-14"]
    as_published = published()[1]
    assert (task.id, task.repo, task.workdir) == ("fleet:acme-units-14", "acme/units", "/workspace")
    assert (task.image, task.base_commit) == (as_published["image_name"], as_published["base_commit"])
    assert task.hidden_paths == ("/eval_script.sh",)
    assert task.problem.startswith("# Issue #13: longest([]")
    assert task.problem.endswith("Fixes #13.")
    assert task.verdict == ExitCode(
        eval_script=as_published["eval_script"],
        test_patch=(as_published["test_patch"] + "\n").encode(),
        protected_paths=(TESTS,),
    )
    assert (gold.patch, gold.test_patch) == (as_published["fix_patch"], as_published["test_patch"] + "\n")


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_both_forms_of_prepared_rows_become_the_same_tasks(tmp_path: Path) -> None:
    from_directories = imported(tmp_path, "fleet", TASKS)
    kept = (
        "instance_id",
        "problem_statement",
        "eval_script",
        "image_name",
        "gold_patch",
        "test_patch",
        "fix_patch",
    )
    packed: list[dict[str, Any]] = []
    flat: list[dict[str, Any]] = []
    for task in published():
        prompt = [{"role": "user", "content": task["problem_statement"]}]
        head = {"data_source": "swe-task-generator", "env_class": "null"}
        packed.append(head | {"prompt": json.dumps(prompt), "instance": json.dumps(task)})
        flat.append(
            head | {"prompt": prompt, **{name: task[name] for name in (*kept, "repo", "base_commit")}}
        )
    for rows in (packed, flat):
        assert imported(tmp_path, "fleet", as_parquet(tmp_path / "train.parquet", rows)) == from_directories
        assert imported(tmp_path, "fleet", write_lines(tmp_path / "a.jsonl", *rows)) == from_directories


def test_the_workdir_is_the_dockerfiles_last(tmp_path: Path) -> None:
    shutil.copytree(TASKS, tmp_path / "tasks")
    (tmp_path / "tasks/task_001/Dockerfile").write_text(
        "FROM a\nWORKDIR /one\nRUN x\nworkdir /two\nCMD bash\n"
    )
    assert imported(tmp_path, "fleet", tmp_path / "tasks")["acme-units-12"][0].workdir == "/two"
    (tmp_path / "tasks/task_001/Dockerfile").write_text("FROM a\nARG WHERE=/three\nWORKDIR $WHERE\n")
    (tmp_path / "tasks/task_001/task.json").write_text(json.dumps(changed(workdir="/three")))
    assert imported(tmp_path, "fleet", tmp_path / "tasks")["acme-units-12"][0].workdir == "/three"


def test_a_task_may_name_its_user(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", changed(user="dev:staff"))
    ((task, gold),) = imported(tmp_path, "fleet", rows).values()
    assert task.user == "dev:staff"
    assert fleet.row_of(task, gold)["user"] == "dev:staff"


@pytest.mark.parametrize(
    "dockerfile", [None, "FROM a\n", "FROM a\nARG WHERE=/three\nWORKDIR $WHERE\n", "FROM a\nWORKDIR repo\n"]
)
def test_where_no_plain_workdir_is_written_down_it_is_the_images_own(
    tmp_path: Path, dockerfile: str | None
) -> None:
    shutil.copytree(TASKS, tmp_path / "tasks")
    file = tmp_path / "tasks/task_001/Dockerfile"
    file.unlink()
    if dockerfile is not None:
        file.write_text(dockerfile)
    task, _ = imported(tmp_path, "fleet", tmp_path / "tasks")["acme-units-12"]
    assert task.workdir == ""
    again = write_lines(tmp_path / "again.jsonl", changed(workdir=""))
    assert imported(tmp_path, "fleet", again)["acme-units-12"][0] == task


def test_a_dockerfile_in_another_encoding_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    shutil.copytree(TASKS, tmp_path / "tasks")
    folder = tmp_path / "tasks/task_001"
    (folder / "Dockerfile").write_bytes(b"FROM a\n# caf\xe9\nWORKDIR /one\n")
    (folder / "task.json").write_text(json.dumps(published()[0]), encoding="utf-8-sig")
    assert imported(tmp_path, "fleet", tmp_path / "tasks")["acme-units-12"][0].workdir == "/one"


def test_the_list_of_changed_files_goes_and_what_follows_it_stays(tmp_path: Path) -> None:
    problem = f"It is wrong.\r\n\r\n## Files Changed\r\n- `{SOURCE}`\r\n### More\r\n- {TESTS}\r\n\r\n## Notes\r\nHurry."
    rows = write_lines(tmp_path / "a.jsonl", changed(problem_statement=problem))
    assert (
        imported(tmp_path, "fleet", rows)["acme-units-12"][0].problem
        == "It is wrong.\r\n\r\n## Notes\r\nHurry."
    )


@pytest.mark.parametrize(
    "absent", [("fix_patch",), ("test_patch",), ("fix_patch", "test_patch"), ("test_patch", "test_files")]
)
def test_what_is_absent_is_taken_out_of_the_gold_patch(tmp_path: Path, absent: tuple[str, ...]) -> None:
    rows = write_lines(tmp_path / "a.jsonl", changed(**dict.fromkeys(absent)))
    task, gold = imported(tmp_path, "fleet", rows)["acme-units-12"]
    assert isinstance(task.verdict, ExitCode)
    assert task.verdict.test_patch == (published()[0]["test_patch"] + "\n").encode()
    assert gold.patch == published()[0]["fix_patch"]


def test_a_source_file_that_only_sounds_like_a_test_belongs_to_the_solution(tmp_path: Path) -> None:
    latest = "diff --git a/src/latest.py b/src/latest.py\n--- a/src/latest.py\n+++ b/src/latest.py\n@@ -1 +1 @@\n-a\n+b\n"
    row = changed(test_files=[TESTS, "src/latest.py"], test_patch=latest + published()[0]["test_patch"])
    task, gold = imported(tmp_path, "fleet", write_lines(tmp_path / "a.jsonl", row))["acme-units-12"]
    assert task.verdict.protected_paths == (TESTS,)
    assert paths_of(gold.test_patch) == (TESTS,)
    assert paths_of(gold.patch) == (SOURCE, "src/latest.py")


def test_where_every_path_sounds_like_a_test_only_those_in_their_place_are(tmp_path: Path) -> None:
    gold = "".join(
        published()[0][part].replace(before, after) + "\n"
        for part, before, after in (
            ("fix_patch", SOURCE, "src/_pytest/lengths.py"),
            ("test_patch", TESTS, "testing/lengths.py"),
        )
    )
    row = changed(gold_patch=gold, **dict.fromkeys(("fix_patch", "test_patch", "test_files")))
    task, solution = imported(tmp_path, "fleet", write_lines(tmp_path / "a.jsonl", row))["acme-units-12"]
    assert task.verdict.protected_paths == ("testing/lengths.py",)
    assert paths_of(solution.patch) == ("src/_pytest/lengths.py",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({field: ""}, f"{field}: must be a non-empty string") for field in (
            "instance_id", "repo", "base_commit", "problem_statement", "gold_patch", "image_name", "eval_script",
        )),
        ({"eval_script": " \n"}, "eval_script: must be"),
        ({"repo": None}, "repo: must be a non-empty string, is absent"),
        ({"test_patch": None, "gold_patch": published()[0]["fix_patch"]}, "test_patch: must be a non-empty"),
        ({"fix_patch": None, "gold_patch": published()[0]["test_patch"]}, "gold_patch: has nothing but tests"),
        ({"problem_statement": "## Files Changed\n- a\n"}, "problem_statement: says nothing but"),
        ({"test_files": "tests"}, "test_files: neither JSON"),
        ({"eval_script": "#!/bin/bash\r\npytest\r\n"}, "eval_script: its lines end in CRLF"),
        ({"workdir": "$WHERE"}, "workdir: must be an absolute path, is '$WHERE'"),
        ({"workdir": "repo"}, "workdir: must be an absolute path"),
        ({"gold_patch": "see the pull request"}, "gold_patch: not a diff: it names no file"),
        ({"fix_patch": "none"}, "fix_patch: not a diff"),
        ({"test_patch": "none"}, "test_patch: not a diff"),
        ({"test_files": [1]}, "test_files: must be a list of strings"),
        ({"instance_id": "other"}, "id: 'fleet:other' is that of"),
    ],
)  # fmt: skip
def test_a_task_that_will_not_do_is_refused_by_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    for number, task in enumerate((changed(instance_id="other"), changed(**change)), 1):
        (tmp_path / f"task_{number}").mkdir()
        (tmp_path / f"task_{number}/task.json").write_text(json.dumps(task))
    assert main(["import", "fleet", str(tmp_path), "--out", str(tmp_path / "tasks.jsonl")]) == 1
    assert f"task_2/task.json: {message}" in capsys.readouterr().err
    assert not (tmp_path / "tasks.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "must be a JSON object"), ("\xff", "not JSON")]
)
def test_a_file_that_is_no_task_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "task_1").mkdir()
    (tmp_path / "task_1/task.json").write_bytes(text.encode("latin-1"))
    assert main(["import", "fleet", str(tmp_path), "--out", str(tmp_path / "tasks.jsonl")]) == 1
    assert f"task_1/task.json: {message}" in capsys.readouterr().err


def test_a_directory_without_tasks_and_a_split_of_directories_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tasks.jsonl")
    assert main(["import", "fleet", str(tmp_path), "--out", out]) == 2
    assert "no task_*/task.json in it" in capsys.readouterr().err
    assert main(["import", "fleet", str(TASKS), "--out", out, "--split", "train"]) == 2
    assert "task directories have no splits" in capsys.readouterr().err
