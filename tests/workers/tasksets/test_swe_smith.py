import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest
from msgspec.structs import replace

from infra.images.build import ensure_image
from pipeline.task import SwebenchLog
from tests.workers.conftest import built
from tests.workers.languages.scenes import go
from tests.workers.languages.stage import IMAGE, Verified
from workers.grading import swe_smith, swebench_rules
from workers.sandbox.docker import DockerSandboxes
from workers.tasksets.patches import reversed_patch
from workers.tasksets.rows import Fields, read_rows
from workers.tasksets.swe_smith import task_of

FIXTURES = Path(__file__).with_name("fixtures")
GSON = "google__gson.dd2fe59c"
TESTS = ("tests/test_lengths.py::test_longest_of_nothing",)
# A Go repository whose working code is the fix of the scene.
OF_GO: dict[str, Any] = {
    "instance_id": "joho__godotenv.3a7a1902.func_pm__a1b2c3d4",
    "repo": "swesmith/joho__godotenv.3a7a1902",
    "patch": reversed_patch(go.SCENE.patch(go.SCENE.fix).decode()),
    "FAIL_TO_PASS": ["TestAdd", "TestWords", "TestWords/one_two", "TestWords/a_b_c"],
    "PASS_TO_PASS": ["TestSub", "TestWords/#00"],
    "problem_statement": "Add subtracts, and Words is always 0.",
    "image_name": "",
}
DOCKERFILE = """
FROM {base}
COPY repo /testbed
WORKDIR /testbed
ENV HOME=/tmp GOFLAGS=-mod=mod GOPROXY=off
RUN git init -q . && git config user.name t && git config user.email t@example.invalid && git add -A && git commit -qm base
"""


def row(**change: Any) -> Fields:
    return read_rows(FIXTURES / "swe_smith/rows.jsonl")[0].having(**change)


def log_verdict(fields: Fields) -> SwebenchLog:
    verdict = task_of(fields)[0].verdict
    assert isinstance(verdict, SwebenchLog)
    return verdict


def test_the_rows_patch_is_the_bug_and_its_reverse_the_solution(tmp_path: Path) -> None:
    task, gold = task_of(row())
    assert task.setup_patch.decode() == row().text("patch")
    assert gold.test_patch == ""
    subprocess.run(["cp", "-r", FIXTURES / "repository", tmp_path / "repository"], check=True)
    file = tmp_path / "repository/src/units/lengths.py"
    buggy = file.read_text()
    for patch, has_bug in ((gold.patch.encode(), False), (task.setup_patch, True)):
        subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path / "repository", check=True)
        assert (file.read_text() == buggy) is has_bug


def test_tests_that_the_bug_breaks_are_hidden_and_all_are_protected() -> None:
    task, _ = task_of(row(PASS_TO_PASS=["tests/test_other.py::test_a", *TESTS]))
    verdict = task.verdict
    assert isinstance(verdict, SwebenchLog)
    assert task.hidden_paths == ("tests/test_lengths.py",)
    assert verdict.protected_paths == ("tests/test_lengths.py", "tests/test_other.py")
    assert "-rpsxXEf tests/test_lengths.py tests/test_other.py\n" in verdict.eval_script
    assert (task.id, task.workdir, task.base_commit) == (
        "swe-smith:acme__units.a1b2c3d4.func_basic__k3j2h1g0",
        "/testbed",
        "",
    )
    assert "git fetch" not in verdict.eval_script + task.setup_script


def test_names_with_spaces_reach_pytest_whole() -> None:
    verdict = log_verdict(row(FAIL_TO_PASS=["tests/a b's.py::test"], PASS_TO_PASS=[]))
    assert """-rpsxXEf 'tests/a b'"'"'s.py'\n""" in verdict.eval_script


def test_the_script_is_one_that_swebench_can_judge_and_a_missing_test_fails() -> None:
    verdict = log_verdict(row())
    swebench_rules.check(verdict)
    marks = swebench_rules.Marks()
    marks.in_script(verdict.eval_script)
    start, end = ">>>>> Start Test Output\n", ">>>>> End Test Output\n>>>>> Test Exit Code: 0\n"
    passed = "".join(f"PASSED {test}\n" for test in (*verdict.fail_to_pass, *verdict.pass_to_pass))
    assert swebench_rules.report(verdict, "t", start + passed + end).resolved
    for missing in (*verdict.fail_to_pass, *verdict.pass_to_pass):
        log = start + passed.replace(f"PASSED {missing}\n", "") + end
        assert not swebench_rules.report(verdict, "t", log).resolved


def test_a_row_in_another_language_is_run_as_the_packages_profile_says() -> None:
    task, gold = task_of(row(**OF_GO))
    verdict = log_verdict(row(**OF_GO))
    assert task.image == "swebench/swesmith.x86_64.joho_1776_godotenv.3a7a1902"
    assert "\ncd /testbed\n" in verdict.eval_script
    assert "\n(\ngo test -v ./...\n)\n" in verdict.eval_script
    assert verdict.log_parser == "swesmith:joho__godotenv.3a7a1902"
    swebench_rules.check(verdict)
    assert (verdict.protected_paths, task.hidden_paths) == ((), ())
    assert (verdict.fail_to_pass, verdict.pass_to_pass) == (
        tuple(OF_GO["FAIL_TO_PASS"]),
        tuple(OF_GO["PASS_TO_PASS"]),
    )
    assert gold.patch.encode() == go.SCENE.patch(go.SCENE.fix)


@pytest.mark.parametrize(
    ("repository", "log", "read"),
    [
        ("spf13__pflag.1c62fb28", "--- PASS: TestA (0.00s)\n    --- FAIL: TestA/b (0.0s)\n", {"TestA": "PASSED", "TestA/b": "FAILED"}),
        ("rayon-rs__rayon.5b4eb339", "test a::b ... ok\ntest c ... FAILED\n", {"a::b": "PASSED", "c": "FAILED"}),
        ("jqlang__jq.b9e19de7", "PASS: tests/jqtest\nFAIL: tests/mantest\n", {"tests/jqtest": "PASSED", "tests/mantest": "FAILED"}),
        ("hapijs__joi.481e270e", "  ✔ 1) any is any (3 ms)\n", {"1) any is any": "PASSED"}),
        (GSON, "[INFO] a -- Time elapsed: 0.1 s\n[ERROR] b -- Time elapsed: 0.1 s <<< ERROR!\n", {"a": "PASSED", "b": "FAILED"}),
        (GSON, "a(c.D)  Time elapsed: 0 sec\nb(c.D)  Time elapsed: 0 sec  <<< FAILURE!\n", {"c.D.a": "PASSED", "c.D.b": "FAILED"}),
    ],
)  # fmt: skip
def test_a_log_is_read_by_the_repositorys_parser(repository: str, log: str, read: dict[str, str]) -> None:
    assert swe_smith.parsed(f"swesmith:{repository}", "", log) == read


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("jquery__jquery.c28c26ae", "the profile of jquery__jquery.c28c26ae fails: name 'parse_log_qunit'"),
        ("google__draco.b91aa918", "the command of google__draco.b91aa918, .* does not build what it tests"),
        ("keepassxreboot__keepassxc.5bd42c47", "the command of keepassxreboot__keepassxc.5bd42c47, .* does not build what it tests"),
        ("LibreSprite__LibreSprite.85ced3b6", "the command of LibreSprite__LibreSprite.85ced3b6, .* runs no tests"),
        ("valkey-io__valkey.fc7c04e4", "the command of valkey-io__valkey.fc7c04e4, .* does not build what it tests"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_grade_is_refused(repository: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"instance_id: {message}"):
        task_of(row(**{**OF_GO, "instance_id": f"{repository}.x"}))


def test_a_test_that_did_not_run_is_no_other_test_whose_name_begins_like_it() -> None:
    log = ">>>>> Start Test Output\n  ✔ parses [ and ] (3 ms)\n>>>>> End Test Output\n>>>>> Test Exit Code: 0\n"
    verdict = SwebenchLog(
        eval_script=">>>>> End Test Output",
        log_parser="swesmith:hapijs__joi.481e270e",
        fail_to_pass=("parses [",),
        pass_to_pass=("parses [ and ]",),
        repo="hapijs/joi",
    )
    found = swebench_rules.report(verdict, "id", log)
    assert (found.fail_to_pass.passed, found.pass_to_pass.passed) == (0, 1)
    assert found.tests == {"parses [": "FAILED", "parses [ and ]": "PASSED"}


def test_the_packages_import_leaves_no_empty_module_behind() -> None:
    code = (
        "import sys; before = {*sys.modules}; from workers.grading import swe_smith;"
        " assert swe_smith.is_parser('swesmith:jqlang__jq.b9e19de7');"
        " assert not {'dotenv', 'ghapi', 'ghapi.all'} & {*sys.modules} - before;"
        " from swebench.harness import constants; assert not hasattr(constants, 'DOCKER_USER')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("number", "image"),
    [
        (0, "jyangballin/swesmith.x86_64.acme_1776_units.a1b2c3d4"),
        (1, "jyangballin/swesmith.x86_64.acme_1776_units.a1b2c3d4"),
        (2, "swebench/swesmith.x86_64.acme_1776_units.a1b2c3d4"),
    ],
    ids=["given", "given as it was built", "by rule"],
)
def test_the_image_is_the_given_one_or_follows_from_the_id(number: int, image: str) -> None:
    assert task_of(read_rows(FIXTURES / "swe_smith/rows.jsonl")[number])[0].image == image


@pytest.mark.parametrize(
    "name", ["units:dev", "swe-smith.units:a1", "by.example:5000/swesmith.x86_64.acme__units.a1b2c3d4"]
)
def test_only_a_name_as_swe_smith_builds_images_gets_a_publisher(name: str) -> None:
    assert task_of(row(image_name=name))[0].image == name


def test_a_repository_with_dots_and_capitals_has_an_image_by_rule_too() -> None:
    fields = row(image_name=None, instance_id="Pylons__WebOb.js.1a2b3c4d.lm_rewrite__a1")
    assert task_of(fields)[0].image == "swebench/swesmith.x86_64.pylons_1776_webob.js.1a2b3c4d"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: ""}, f"{name}: must be a non-empty string") for name in (
            "instance_id", "repo", "patch", "problem_statement",
        )),
        ({"patch": "no diff"}, "patch: not a diff: it names no file"),
        ({"patch": "diff --git a/x b/x\n--- a/x"}, r"patch: cannot be taken back: line 2: no line \+\+\+ after it"),
        ({"patch": '--- "a/x\n+++ "b/x\n@@ -1 +1 @@\n-a\n+b\n'}, "patch: not a name as git quotes it: '\"a/x'"),
        ({"patch": "diff --git a/a b/b\ncopy from a\ncopy to b\n"}, "patch: cannot be taken back: line 2: a copy"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: empty: the bug breaks no test"),
        ({"FAIL_TO_PASS": "x::"}, "FAIL_TO_PASS: neither JSON nor"),
        ({"FAIL_TO_PASS": ["TestX/TestY"]}, "FAIL_TO_PASS: 'TestX/TestY' names no test file"),
        ({"FAIL_TO_PASS": ["test_a (tornado.test.web.WebTest)"]}, "FAIL_TO_PASS: .* names no test file"),
        ({"FAIL_TO_PASS": ["../dev/test.py::test"]}, "FAIL_TO_PASS: .* names no test file"),
        ({"FAIL_TO_PASS": ["/dev/test.py::test"]}, "FAIL_TO_PASS: .* names no test file"),
        ({"FAIL_TO_PASS": ["--ignore=x.py::test"]}, "FAIL_TO_PASS: .* names no test file"),
        ({"FAIL_TO_PASS": [".git/a.py::test"]}, "FAIL_TO_PASS: .* names no test file"),
        ({"FAIL_TO_PASS": ["a.py::test\0"]}, "FAIL_TO_PASS: .* names no test file"),
        ({**OF_GO, "PASS_TO_PASS": [""]}, "PASS_TO_PASS: a test has no name"),
        ({"image_name": "--privileged"}, "image_name: image '--privileged'"),
        ({"PASS_TO_PASS": "[" * 100_000}, "PASS_TO_PASS: neither JSON nor"),
        ({"PASS_TO_PASS": ["a.py::b", "c"]}, "PASS_TO_PASS: 'c' names no test file"),
        ({"image_name": "", "instance_id": "acme"}, "image_name: absent, and instance_id is not"),
        ({"image_name": 5}, "image_name: must be a string"),
    ],
)  # fmt: skip
def test_a_row_that_will_not_do_is_refused_by_row_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {message}"):
        task_of(row(**change))


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_task_in_another_language_is_verified_and_graded(
    docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    ensure_image(IMAGE)
    working = {**go.SCENE.files, **go.SCENE.fix, **go.SCENE.hidden}
    files = {"Dockerfile": DOCKERFILE, **{f"repo/{path}": text for path, text in working.items()}}
    with built(docker_client, files, IMAGE.tag) as image:
        task, _ = task_of(row(**OF_GO))
        verified = await Verified.of(go.SCENE, replace(task, image=image.tag), sandboxes)
        assert verified.calibration.best_control == "confirmed"
        right = await verified.grade(go.SCENE.right_fixes["another form"])
        wrong = await verified.grade({"calc.go": f"{go.CALC}\n"})
        cheats = [await verified.grade(cheat) for cheat in go.SCENE.cheats.values()]
    assert (right.value, right.control) == (1.0, "confirmed"), right.decided_by
    assert [wrong.value, *(cheat.value for cheat in cheats)] == [0.0] * (len(cheats) + 1)
