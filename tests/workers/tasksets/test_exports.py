"""Every published shape in, every other tool's shape out, and in again."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from pipeline.task import ExitCode, SwebenchLog, Task
from pipeline.taskfile import Gold, gold_path, read_gold, read_tasks, write_gold, write_tasks
from workers.tasksets.__main__ import main

FIXTURES = Path(__file__).with_name("fixtures")
RUN_SCRIPTS = ("--run-scripts", str(FIXTURES / "swe_bench_pro/run_scripts"))
SOURCES: dict[str, tuple[str, ...]] = {
    "fleet": ("fleet",),
    "swe-bench": ("swe_bench/verified.jsonl",),
    "swe-gym": ("swe_gym/subset.jsonl",),
    "r2e-gym": ("r2e_gym/rows.jsonl",),
    "swe-smith": ("swe_smith/rows.jsonl",),
    "swe-bench-pro": ("swe_bench_pro/rows.jsonl", *RUN_SCRIPTS),
    "swe-rebench": ("swe_rebench/first.jsonl",),
    "multi-swe-bench": ("multi_swe_bench/rows.jsonl",),
}


def published(directory: Path, source: str, *path_and_options: str) -> Path:
    """A task file made of a fixture."""
    path, *options = path_and_options or SOURCES[source]
    out = directory / f"{source}.jsonl"
    assert main(["import", source, str(FIXTURES / path), *options, "--out", str(out)]) == 0
    return out


def exported(tasks: Path, kind: str, suffix: str, *options: str) -> Path:
    out = tasks.with_name(f"out-{kind}{suffix}")
    assert main(["export", kind, str(tasks), "--out", str(out), *options]) == 0
    return out


def imported(source: str, path: Path) -> tuple[list[Task], dict[str, Gold]]:
    out = path.with_name("again.jsonl")
    assert main(["import", source, str(path), "--out", str(out)]) == 0
    return read_tasks(out), read_gold(gold_path(out))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("kind", ["instances-jsonl", "evaluation-jsonl"])
@pytest.mark.parametrize("source", SOURCES)
def test_jsonl_keeps_every_field_of_every_source(tmp_path: Path, source: str, kind: str) -> None:
    tasks = published(tmp_path, source)
    again, golds = imported(source, exported(tasks, kind, ".jsonl"))
    assert len(again) == len(read_tasks(tasks)) > 0
    for one, other in zip(read_tasks(tasks), again, strict=True):
        for field in Task.__struct_fields__:
            assert getattr(other, field) == getattr(one, field), f"{source}: {field}"
    assert golds == read_gold(gold_path(tasks))


@pytest.mark.parametrize("path", ["swe_rebench/v2.json", "swe_bench/task_repository"])
def test_jsonl_keeps_every_field_of_the_other_shapes_of_a_source(tmp_path: Path, path: str) -> None:
    source = path.partition("/")[0].replace("_", "-")
    tasks = published(tmp_path, source, path)
    again, golds = imported(source, exported(tasks, "instances-jsonl", ".jsonl"))
    assert (again, golds) == (read_tasks(tasks), read_gold(gold_path(tasks)))


@pytest.mark.parametrize("source", SOURCES)
def test_a_line_is_what_the_trainer_of_old_reads(tmp_path: Path, source: str) -> None:
    tasks = published(tmp_path, source)
    lines = exported(tasks, "instances-jsonl", ".jsonl").read_text().splitlines()
    for task, line in zip(read_tasks(tasks), lines, strict=True):
        value = json.loads(line)
        instance = value["metadata"]["instance"]
        assert set(value) == {"text", "metadata"}
        assert set(value["metadata"]) == {"instance", "data_source"}
        assert value["text"] == instance["problem_statement"] == task.problem
        assert instance["instance_id"] == task.id.partition(":")[2]
        assert (instance["image_name"], instance["eval_script"]) == (task.image, task.verdict.eval_script)


def test_data_source_is_the_tasks_own_unless_it_is_named(tmp_path: Path) -> None:
    tasks = published(tmp_path, "swe-gym")
    for options, said in (
        ((), "swe-gym"),
        (("--data-source", "SumanthRH/SWE-Gym-Subset"), "SumanthRH/SWE-Gym-Subset"),
    ):
        out = exported(tasks, "instances-jsonl", ".jsonl", *options)
        assert json.loads(out.read_text().splitlines()[0])["metadata"]["data_source"] == said
    fleet = rows_of(exported(published(tmp_path, "fleet"), "parquet-flat", ".parquet"))
    assert fleet[0]["data_source"] == "swe-task-generator"


def test_ids_and_images_are_one_a_line(tmp_path: Path) -> None:
    tasks = published(tmp_path, "swe-smith")
    ids = exported(tasks, "instance-ids", ".txt").read_text()
    assert ids == "".join(f"acme__units.a1b2c3d4.func_basic__k3j2h1g{end}\n" for end in "012")
    assert exported(tasks, "docker-images", ".txt").read_text() == (
        "jyangballin/swesmith.x86_64.acme_1776_units.a1b2c3d4\nswebench/swesmith.x86_64.acme_1776_units.a1b2c3d4\n"
    )


def test_the_generators_parquet_has_four_columns_of_text(tmp_path: Path) -> None:
    tasks = published(tmp_path, "fleet")
    out = exported(tasks, "parquet-generator", ".parquet")
    schema = pyarrow.parquet.read_schema(out)
    assert [(field.name, str(field.type)) for field in schema] == [
        (name, "string") for name in ("data_source", "prompt", "env_class", "instance")
    ]
    for task, row in zip(read_tasks(tasks), rows_of(out), strict=True):
        assert json.loads(row["prompt"]) == [{"role": "user", "content": task.problem}]
        assert (row["data_source"], row["env_class"]) == ("swe-task-generator", "null")
        instance = json.loads(row["instance"])
        assert instance["gold_patch"] == instance["fix_patch"] + instance["test_patch"]


def test_the_flat_parquet_has_a_column_for_each_field(tmp_path: Path) -> None:
    tasks = published(tmp_path, "fleet")
    out = exported(tasks, "parquet-flat", ".parquet")
    assert set(pyarrow.parquet.read_schema(out).names) == {
        "data_source", "prompt", "env_class", "instance_id", "problem_statement", "eval_script", "image_name",
        "gold_patch", "test_patch", "fix_patch", "repo", "base_commit",
    }  # fmt: skip
    for task, row in zip(read_tasks(tasks), rows_of(out), strict=True):
        assert row["prompt"] == [{"role": "user", "content": task.problem}]
        assert row["instance_id"] == task.id.partition(":")[2]


@pytest.mark.parametrize("kind", ["parquet-generator", "parquet-flat"])
def test_parquet_keeps_every_field_of_a_task_that_the_generator_made(tmp_path: Path, kind: str) -> None:
    tasks = published(tmp_path, "fleet")
    before = read_tasks(tasks)
    if kind == "parquet-flat":  # it has no column for another workdir than the generator's own
        before = [task for task in before if task.workdir == "/workspace"]
        write_tasks(tasks, before)
    golds = read_gold(gold_path(tasks))
    again, golds_again = imported("fleet", exported(tasks, kind, ".parquet"))
    assert len(before) == len(again) > 0
    for one, other in zip(before, again, strict=True):
        for field in Task.__struct_fields__:
            assert getattr(other, field) == getattr(one, field), field
        assert golds_again[one.id] == golds[one.id]


@pytest.mark.parametrize("kind", ["parquet-generator", "parquet-flat"])
def test_a_script_that_hides_how_its_tests_ended_no_longer_does_in_parquet(tmp_path: Path, kind: str) -> None:
    tasks = published(tmp_path, "swe-bench")
    for task, row in zip(read_tasks(tasks), rows_of(exported(tasks, kind, ".parquet")), strict=True):
        script = (json.loads(row["instance"]) if kind == "parquet-generator" else row)["eval_script"]
        assert isinstance(task.verdict, SwebenchLog)
        assert script != task.verdict.eval_script
        assert script.splitlines()[-1].startswith("exit ")


def test_a_script_that_ends_as_its_tests_do_stays_as_it_is(tmp_path: Path) -> None:
    tasks = published(tmp_path, "fleet")
    for task, row in zip(
        read_tasks(tasks), rows_of(exported(tasks, "parquet-flat", ".parquet")), strict=True
    ):
        assert isinstance(task.verdict, ExitCode)
        assert row["eval_script"] == task.verdict.eval_script


@pytest.mark.parametrize("kind", ["parquet-generator", "parquet-flat"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("r2e-gym", "r2e-gym:units__.*: a r2e_expected verdict on it is not an exit status"),
        ("swe-bench-pro", "swe-bench-pro:instance_.*: a tests_json verdict on it is not an exit status"),
        ("swe-smith", "swe-smith:acme__.*: setup_patch: there is no column"),
    ],
)
def test_what_no_exit_status_can_judge_is_refused_in_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, message: str, kind: str
) -> None:
    tasks, out = published(tmp_path, source), tmp_path / "out.parquet"
    assert main(["export", kind, str(tasks), "--out", str(out)]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not out.exists()


def test_a_script_whose_tests_cannot_be_told_is_refused_in_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = published(tmp_path, "swe-rebench", "swe_rebench/v2.json")
    assert main(["export", "parquet-flat", str(tasks), "--out", str(tmp_path / "out")]) == 2
    assert "swe-rebench:acme__units-22: eval_script: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "tasks.jsonl: no tasks in it"),
        ("{}\n", "tasks.jsonl:1: not a Task"),
        (None, "No such file"),
    ],
)
def test_what_is_no_task_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    if content is not None:
        tasks.write_text(content)
    assert main(["export", "instance-ids", str(tasks), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_task_of_no_known_source_has_no_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Task(
        id="demo:1",
        repo="acme/units",
        base_commit="",
        image="x:1",
        workdir="/workspace",
        problem="It is wrong.",
        verdict=ExitCode(eval_script="pytest\n"),
    )
    write_tasks(tmp_path / "tasks.jsonl", [task])
    write_gold(gold_path(tmp_path / "tasks.jsonl"), [Gold(id=task.id, patch="")])
    assert (
        main(["export", "instances-jsonl", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "o")]) == 2
    )
    assert (
        "demo:1: 'demo' is not a source whose columns are known: fleet, swe-bench" in capsys.readouterr().err
    )
    assert main(["export", "instance-ids", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "o")]) == 0


def test_an_unknown_kind_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", "csv", "tasks.jsonl", "--out", "x"])
    assert left.value.code == 2
    assert "parquet-flat" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["instances-jsonl", "evaluation-jsonl", "parquet-generator", "parquet-flat"])
def test_columns_for_solutions_are_not_left_empty_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    tasks, out = published(tmp_path, "fleet"), tmp_path / "out"
    arguments = ["export", kind, str(tasks), "--out", str(out)]
    first, second = read_gold(gold_path(tasks)).values()
    write_gold(gold_path(tasks), [first])
    assert main(arguments) == 2
    assert f"{gold_path(tasks)}: no solution of {second.id}, and {kind} has" in capsys.readouterr().err
    gold_path(tasks).unlink()
    assert main(arguments) == 2
    assert f"{gold_path(tasks)}: no solution of {first.id} and 1 more, and" in capsys.readouterr().err
    assert not out.exists()


def test_lists_do_without_solutions(tmp_path: Path) -> None:
    tasks = published(tmp_path, "swe-smith")
    gold_path(tasks).unlink()
    assert len(exported(tasks, "instance-ids", ".txt").read_text().splitlines()) == len(read_tasks(tasks))
    assert "swesmith" in exported(tasks, "docker-images", ".txt").read_text()
