from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from pipeline import task as records  # pytest would take an imported TestsJson for a test
from workers.tasksets.rows import Fields, read_rows
from workers.tasksets.swe_bench_pro import RUN_SCRIPT, add_options, task_of, with_run_scripts

FIXTURES = Path(__file__).with_name("fixtures") / "swe_bench_pro"
RUN_SCRIPTS = FIXTURES / "run_scripts"


def bare_row(**change: Any) -> Fields:
    (fields,) = read_rows(FIXTURES / "rows.jsonl")
    return fields.having(**change)


def row(**change: Any) -> Fields:
    (fields,) = with_run_scripts([bare_row()], Namespace(run_scripts=RUN_SCRIPTS))
    return fields.having(**change)


def json_verdict(fields: Fields) -> records.TestsJson:
    verdict = task_of(fields)[0].verdict
    assert isinstance(verdict, records.TestsJson)
    return verdict


def test_a_row_is_judged_by_the_two_files_of_its_folder() -> None:
    task, gold = task_of(row())
    folder = RUN_SCRIPTS / row().text("instance_id")
    verdict = json_verdict(row())
    assert verdict.parser == (folder / "parser.py").read_text()
    script = records.File(path=RUN_SCRIPT, content=(folder / "run_script.sh").read_bytes(), mode=0o755)
    assert verdict.files == (script,)
    assert verdict.tests == (
        "tests/test_lengths.py::test_longest_of_nothing",
        "tests/test_lengths.py::test_in_metres[3m-3.0]",
        "tests/test_lengths.py::test_in_metres[2km-2000.0]",
        "tests/test_lengths.py::test_longest",
    )
    assert verdict.protected_paths == ("tests/test_lengths.py",)
    assert (task.workdir, task.base_commit) == ("/app", row().text("base_commit"))
    assert task.id == f"swe-bench-pro:{row().text('instance_id')}"
    assert (gold.patch, gold.test_patch) == (row().text("patch"), row().text("test_patch"))
    assert f"git checkout -q --force {row().text('base_commit')}\n" in task.setup_script


def test_the_script_brings_the_hidden_tests_and_runs_them() -> None:
    verdict = json_verdict(row(selected_test_files_to_run="['a.py', 'b c.py']"))
    assert verdict.eval_script.splitlines()[-3:] == [
        "cd /app",
        f"{row().text('before_repo_set_cmd').splitlines()[-1]} || exit 1",
        f"bash {RUN_SCRIPT} 'a.py,b c.py'",
    ]


def test_files_that_the_script_brings_are_protected_even_if_no_diff_names_them() -> None:
    command = "git checkout abc -- tests/a.py 'tests/b c.py'"
    verdict = json_verdict(row(before_repo_set_cmd=command, test_patch=""))
    assert verdict.protected_paths == ("tests/a.py", "tests/b c.py")


def test_the_agent_is_told_what_is_required_and_which_names_the_tests_call() -> None:
    parts = task_of(row())[0].problem.split("\n\n")
    assert parts[0] == row().text("problem_statement")
    assert parts[1] == f"Requirements:\n{row().text('requirements')}"
    assert parts[2] == f"New interfaces introduced:\n{row().text('interface')}"
    assert task_of(row(requirements=None, interface=" "))[0].problem == parts[0]


@pytest.mark.parametrize(
    ("change", "image"),
    [
        ({"image_name": "mirror/pro:1"}, "mirror/pro:1"),
        ({"dockerhub_tag": "acme.units-x"}, "jefzda/sweap-images:acme.units-x"),
        (
            {"dockerhub_tag": None, "repo": "NodeBB/NodeBB", "instance_id": "instance_NodeBB__NodeBB-1-vnan"},
            "jefzda/sweap-images:nodebb.nodebb-NodeBB__NodeBB-1",
        ),
        (
            {
                "dockerhub_tag": "",
                "repo": "element-hq/element-web",
                "instance_id": "instance_element-hq__element-web-2-v3",
            },
            "jefzda/sweap-images:element-hq.element-element-hq__element-web-2-v3",
        ),
        (
            {
                "dockerhub_tag": None,
                "repo": "element-hq/element-web",
                "instance_id": "instance_element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan",
            },
            "jefzda/sweap-images:element-hq.element-web-element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan",
        ),
    ],
    ids=["given", "tag", "rule", "element", "the other element"],
)
def test_the_image_is_the_given_one_or_follows_from_tag_or_id(change: dict[str, Any], image: str) -> None:
    assert task_of(row(**change))[0].image == image


def test_a_tag_by_rule_is_no_longer_than_a_registry_allows() -> None:
    image = task_of(row(dockerhub_tag=None, instance_id=f"instance_{'x' * 200}"))[0].image
    assert len(image.partition(":")[2]) == 128


def test_files_in_the_rows_own_columns_come_before_the_folders() -> None:
    fields = bare_row(run_script="mine\n", parser="mine too\n")
    (fields,) = with_run_scripts([fields], Namespace(run_scripts=RUN_SCRIPTS))
    verdict = json_verdict(fields)
    assert (verdict.files[0].content, verdict.parser) == (b"mine\n", "mine too\n")


def test_the_command_line_has_the_folder() -> None:
    parser = ArgumentParser()
    add_options(parser)
    assert parser.parse_args(["--run-scripts", "x"]).run_scripts == Path("x")
    assert with_run_scripts([bare_row()], parser.parse_args([])) == [bare_row()]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--run-scripts: .*none: no such directory"):
        with_run_scripts([bare_row()], Namespace(run_scripts=tmp_path / "none"))


def test_a_row_that_could_not_be_read_passes_the_folder_by() -> None:
    broken = Fields("x:1", {}, broken="not JSON")
    assert with_run_scripts([broken], Namespace(run_scripts=RUN_SCRIPTS)) == [broken]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: ""}, f"{name}: must be a non-empty string") for name in (
            "instance_id", "repo", "base_commit", "patch", "problem_statement", "before_repo_set_cmd",
        )),
        ({"fail_to_pass": "[]"}, "fail_to_pass: empty: a patch that does nothing would do"),
        ({"fail_to_pass": "[open(1)]"}, "fail_to_pass: neither JSON nor a Python literal"),
        ({"pass_to_pass": "{'a': 1}"}, "pass_to_pass: must be a list of strings"),
        ({"selected_test_files_to_run": "[]"}, "selected_test_files_to_run: empty"),
        ({"before_repo_set_cmd": "git checkout 'x"}, "before_repo_set_cmd: its last line is not a command"),
        ({"dockerhub_tag": None, "repo": "units"}, "dockerhub_tag: absent, and repo is not owner/name"),
        ({"run_script": ""}, "run_script: absent: --run-scripts DIR must have instance_Acme.*/run_script.sh"),
        ({"parser": None}, "parser: absent: --run-scripts DIR must have instance_Acme.*/parser.py"),
        ({"requirements": 5}, "requirements: must be a string"),
        ({"test_patch": "none"}, "test_patch: not a diff: it names no file"),
        ({"test_patch": '--- "a/x\n+++ b/x\n'}, "test_patch: not a name as git quotes it"),
    ],
)  # fmt: skip
def test_a_row_that_will_not_do_is_refused_by_row_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {message}"):
        task_of(row(**change))


def test_a_row_without_an_id_or_with_files_that_are_no_text_is_refused_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    for instance_id, content in (("latin", b"caf\xe9\n"), ("plain", b"pytest\n")):
        (tmp_path / instance_id).mkdir()
        (tmp_path / instance_id / "run_script.sh").write_bytes(content)
        (tmp_path / instance_id / "parser.py").write_text("print()\n")
    rows = [bare_row(instance_id=None), *(bare_row(instance_id=name) for name in ("latin", "plain"))]
    *refused, plain = with_run_scripts(
        [*rows[:2], bare_row(run_script=5), rows[2]], Namespace(run_scripts=tmp_path)
    )
    messages = (
        "instance_id: must be a non-empty string, is absent",
        f"run_script: {tmp_path}/latin/run_script.sh: not text in UTF-8",
        "run_script: must be a string, is 5",
    )
    for fields, message in zip(refused, messages, strict=True):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {message}"):
            task_of(fields)
    assert json_verdict(plain).files[0].content == b"pytest\n"


def test_a_row_without_its_files_is_refused(tmp_path: Path) -> None:
    (fields,) = with_run_scripts([bare_row()], Namespace(run_scripts=tmp_path))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: (run_script|parser): absent"):
        task_of(fields)
