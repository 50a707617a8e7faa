from pathlib import Path
from typing import Any

import docker
import pytest
from msgspec.structs import replace

from infra.images.build import ensure_image
from pipeline.task import SwebenchLog, Task
from tests.workers.conftest import built
from tests.workers.languages.scenes import go
from tests.workers.languages.stage import IMAGE, Verified
from workers.grading import multi_swe_bench, swebench_rules
from workers.sandbox.docker import DockerSandboxes
from workers.tasksets.multi_swe_bench import task_of
from workers.tasksets.rows import Fields, read_rows
from workers.tasksets.swe_bench import START_MARK

ROWS = Path(__file__).with_name("fixtures") / "multi_swe_bench" / "rows.jsonl"
DOCKERFILE = """
FROM {base}
COPY repo /home/cli
COPY patches /home
WORKDIR /home/cli
ENV HOME=/tmp GOFLAGS=-mod=mod GOPROXY=off
RUN git init -q . && git config user.name t && git config user.email t@example.invalid && git add -A && git commit -qm base
"""


def row(**change: Any) -> Fields:
    return read_rows(ROWS)[0].having(**change)


def log_verdict(task: Task) -> SwebenchLog:
    assert isinstance(task.verdict, SwebenchLog)
    return task.verdict


def test_a_row_is_run_as_the_package_would() -> None:
    task, gold = task_of(row())
    verdict = log_verdict(task)
    assert task.id == "multi-swe-bench:cli__cli-9001"
    assert (task.image, task.workdir) == ("mswebench/cli_m_cli:pr-9001", "/home/cli")
    assert task.base_commit == "a2f37cf0000000000000000000000000000000aa"
    assert task.problem == "Add subtracts\n\n`Add(2, 3)` is -1.\n\n`Words` is always 0."
    before, _, tests = verdict.eval_script.partition(f"echo '{START_MARK}'\n")
    assert before.endswith("END_OF_HIDDEN_TESTS\ngit apply /home/test.patch || exit 1\n")
    assert "\ntrue\ngo test -v -count=1 ./...\n" in tests
    assert verdict.fail_to_pass == ("TestAdd", "TestWords", "TestWords/one_two", "TestWords/a_b_c")
    assert verdict.pass_to_pass == ("TestSub",)
    assert verdict.protected_paths == ("calc_test.go",)
    assert (gold.patch, gold.test_patch) == (row().text("fix_patch"), row().text("test_patch"))


def test_no_container_has_the_patches_of_the_image() -> None:
    task, _ = task_of(row())
    assert set(task.hidden_paths) == {"/home/fix.patch", "/home/test.patch"}
    assert task.setup_script == "rm -f /home/fix.patch /home/test.patch\n"


def test_a_test_without_a_value_is_of_another_row() -> None:
    task, _ = task_of(row(n2p_tests={"TestOther": None}, s2p_tests={"name": None, "fix": None}))
    assert log_verdict(task) == log_verdict(task_of(row())[0])


def test_rows_that_arrow_has_stored_say_the_same() -> None:
    task, _ = task_of(read_rows(ROWS)[1])
    assert task.problem == "Add subtracts\n\n`Add(2, 3)` is -1."
    verdict = log_verdict(task)
    assert verdict.fail_to_pass == ("TestAdd", "TestWords")  # one that failed, one that was not there
    assert verdict.pass_to_pass == ("TestSub",)


@pytest.mark.parametrize(
    ("org", "repo", "change", "log_parser"),
    [
        ("apache", "dubbo", {}, "multi_swe_bench:apache/dubbo"),
        ("OpenMathLib", "OpenBLAS", {}, "multi_swe_bench:OpenMathLib/OpenBLAS"),
        ("nlohmann", "json", {}, "multi_swe_bench:nlohmann/json"),
        ("libsdl-org", "SDL", {}, "multi_swe_bench:libsdl-org/SDL"),
        ("clap-rs", "clap", {}, "multi_swe_bench:clap-rs/clap"),
        ("conan-io", "conan", {"tag": "1.0.2"}, "multi_swe_bench:conan-io/conan_1_0_2"),
    ],
)
def test_each_repository_has_its_parser(org: str, repo: str, change: dict[str, str], log_parser: str) -> None:
    verdict = log_verdict(task_of(row(org=org, repo=repo, **change))[0])
    assert verdict.log_parser == log_parser
    swebench_rules.check(verdict)


def test_a_log_is_read_by_the_parser_of_the_pull_request() -> None:
    read = multi_swe_bench.parsed(
        "multi_swe_bench:cli/cli",
        "9001",
        "--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.0s)\n--- SKIP: TestC (0.0s)\n",
    )
    assert read == {"TestA": "PASSED", "TestB": "FAILED"}  # and none of a test that was skipped
    old, new = (
        multi_swe_bench.parsed("multi_swe_bench:expressjs/express", number, "✔ sends (3ms)\n")
        for number in ("4212", "1")
    )
    assert old != new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repo": "nothing"}, "repo: multi-swe-bench has no repository cli/nothing"),
        (
            {"org": "fastify", "repo": "fastify"},
            "repo: the class of fastify/fastify fails: Invalid type for passed_tests",
        ),
        (
            {"org": "matplotlib", "repo": "matplotlib"},
            "repo: the image of matplotlib/matplotlib has no test-run.sh",
        ),
        (
            {"org": "AMReX-Codes", "repo": "amrex"},
            "repo: the script of AMReX-Codes/amrex does not apply /home/test.patch once",
        ),
        ({"org": "pyscf", "repo": "pyscf"}, "repo: the class of pyscf/pyscf fails"),
        ({"number": "9001"}, "number: must be the number of the pull request, is '9001'"),
        ({"base": {}}, "base: sha must be the commit before the pull request, is None"),
        ({"resolved_issues": []}, "resolved_issues: says nothing"),
        ({"resolved_issues": {"title": None, "body": ["x"]}}, "resolved_issues: title and body must be lists"),
        ({"resolved_issues": {"title": ["x", "y"], "body": ["x"]}}, "resolved_issues: title and body must be lists"),
        ({"resolved_issues": "none"}, "resolved_issues: must be a list of issues"),
        ({"f2p_tests": {}}, "f2p_tests: empty"),
        ({"p2p_tests": {"name": [1]}}, "p2p_tests: its names of tests must be strings"),
        ({"test_patch": "none"}, "test_patch: not a diff"),
        ({"fix_patch": ""}, "fix_patch: must be a non-empty string"),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused_with_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(row(**change))


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_an_imported_task_is_verified_and_graded(
    docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    ensure_image(IMAGE)
    files = {
        "Dockerfile": DOCKERFILE,
        "patches/fix.patch": row().text("fix_patch"),
        "patches/test.patch": row().text("test_patch"),
        **{f"repo/{path}": text for path, text in go.SCENE.files.items()},
    }
    with built(docker_client, files, IMAGE.tag) as image:
        task, _ = task_of(row(image=image.tag, base={"sha": image.commit}))
        verified = await Verified.of(go.SCENE, replace(task, image=image.tag), sandboxes)
        assert verified.calibration.best_control == "confirmed"
        right = await verified.grade(go.SCENE.right_fixes["another form"])
        wrong = await verified.grade({"calc.go": f"{go.CALC}\n"})
        cheat = await verified.grade(go.SCENE.cheats["prints passes and exits"])
    assert (right.value, right.control) == (1.0, "confirmed"), right.decided_by
    assert (wrong.value, cheat.value) == (0.0, 0.0)
