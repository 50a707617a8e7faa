"""The hidden tests find their place whatever the patch did to it: by a rename, a deletion, or something in the way."""

import asyncio

import pytest

from pipeline.errors import TaskBroken
from pipeline.task import ExitCode, File, SwebenchLog, Verdict
from tests.workers.attacks.patches import gone, link
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import FIX, HIDDEN_TESTS, NOTE, edited, new_file
from workers.grading import steps
from workers.grading.defence.governing import GoverningFiles, hidden_paths
from workers.grading.defence.survey import Surveyed
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

ADDED_TEST = "".join(HIDDEN_TESTS.splitlines(keepends=True)[3:])
RENAMED_TESTS = f"""diff --git a/tests/test_calc.py b/tests/unit/test_sums.py
similarity index 50%
rename from tests/test_calc.py
rename to tests/unit/test_sums.py
--- a/tests/test_calc.py
+++ b/tests/unit/test_sums.py
{ADDED_TEST}"""
MOVED_AWAY = """diff --git a/tests/test_calc.py b/tests/test_old.py
similarity index 100%
rename from tests/test_calc.py
rename to tests/test_old.py
"""
TESTS = "from calc import add, sub\n\n\ndef test_add():\n    assert add(3, 1) == 4\n\n\ndef test_sub():\n    assert sub(3, 1) == 2\n"
RUN = "python3 -m pytest -rA tests/unit/test_sums.py\n"


def swe_bench(test_patch: str, run: str, names: tuple[str, str]) -> SwebenchLog:
    """As the official harness renders it; of the files that the patch renames it checks out none."""
    script = f"set -x\ngit apply -v - <<'EOF_1'\n{test_patch}EOF_1\n: '>>>>> Start Test Output'\n{run}: '>>>>> End Test Output'\n"
    return SwebenchLog(
        eval_script=script, log_parser="parse_log_pytest", fail_to_pass=names[:1], pass_to_pass=names[1:]
    )


RENAMING: dict[str, Verdict] = {
    "a test patch": ExitCode(eval_script=RUN, test_patch=RENAMED_TESTS.encode()),
    "a patch in the script": swe_bench(
        RENAMED_TESTS, RUN, ("tests/unit/test_sums.py::test_add", "tests/unit/test_sums.py::test_sub")
    ),
    "a pure rename in the script": swe_bench(
        MOVED_AWAY + new_file("tests/unit/test_sums.py", TESTS).decode(),
        RUN,
        ("tests/unit/test_sums.py::test_add", "tests/unit/test_sums.py::test_sub"),
    ),
}
FILE_IN_PLACE = ExitCode(
    eval_script=RUN, files=(File(path="/workspace/tests/unit/test_sums.py", content=TESTS.encode()),)
)
OBSTACLES = {
    "the renamed file edited": edited("tests/test_calc.py", "assert sub(3, 1) == 2", "assert sub(3, 2) == 1"),
    "the renamed file deleted": gone("tests/test_calc.py"),
    "a file where a folder is wanted": new_file("tests/unit", "x"),
    "a link where a folder is wanted": link("tests/unit", "/tmp"),
    "a link to nothing where a folder is wanted": link("tests/unit", "nowhere"),
    "a folder where a file is wanted": new_file("tests/unit/test_sums.py/x", "x"),
    "a file for the folder of tests": gone("tests/test_calc.py") + new_file("tests", "x"),
    "the tests themselves": new_file("tests/unit/test_sums.py", TESTS.replace("add(3, 1) == 4", "True")),
}


async def value(grader: Grader, image: RepoImage, verdict: Verdict, patch: bytes) -> float:
    task = make_task(image.tag, base_commit=image.commit, verdict=verdict)
    return (await grader.grade(make_claim(task), patch)).value


@pytest.mark.slow_but_for("a test patch-the renamed file edited", "a test patch-a link where*")
@pytest.mark.parametrize(
    ("arriving", "way"),
    [("a test patch", way) for way in OBSTACLES]
    + [(arriving, way) for arriving in list(RENAMING)[1:] for way in list(OBSTACLES)[:2]],
)
async def test_hidden_tests_that_rename_a_file_get_their_way(
    grader: Grader, repo_image: RepoImage, arriving: str, way: str
) -> None:
    patches = (FIX + OBSTACLES[way], OBSTACLES[way])
    values = await asyncio.gather(
        *(value(grader, repo_image, RENAMING[arriving], patch) for patch in patches)
    )
    assert values == [1.0, 0.0]


@pytest.mark.slow_but_for("the-renamed-file-edited", "a-folder-where-a-file-is-wanted")
@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=[name.replace(" ", "-") for name in OBSTACLES])
async def test_files_of_the_hidden_tests_get_their_way(
    grader: Grader, repo_image: RepoImage, obstacle: bytes
) -> None:
    assert await value(grader, repo_image, FILE_IN_PLACE, FIX + obstacle) == 1.0
    assert await value(grader, repo_image, FILE_IN_PLACE, obstacle) == 0.0


async def test_hidden_tests_that_fit_the_base_alone_are_the_patchs_fault(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    task = make_task(repo_image.tag, base_commit=repo_image.commit)
    unfit = HIDDEN_TESTS.replace("import sub", "import other")
    for tests, status in ((HIDDEN_TESTS, steps.IN_THE_WAY), (unfit, steps.TESTS_DO_NOT_APPLY)):
        async with sandboxes.open(make_claim(task), role="grade") as sandbox:
            inputs = {steps.TESTS: tests, steps.PROTECTED: "", steps.START: ""}
            await sandbox.put([File(path=path, content=text.encode()) for path, text in inputs.items()])
            await sandbox.run("echo x >tests/test_calc.py", timeout_s=240)
            governing, commit = GoverningFiles("pytest\n", Surveyed()), repo_image.commit
            result = await sandbox.run(
                governing.step("restore_protected", BASE=commit, HEAD=commit), timeout_s=240, plain=True
            )
            assert result.exit_code == status


@pytest.mark.parametrize("base", ["HEAD", "HEAD~1", ""], ids=["the-base-is-HEAD", "another-base", "no-base"])
async def test_files_with_tests_return_to_head_which_has_none_that_the_patch_brought(
    sandboxes: DockerSandboxes, repo_image: RepoImage, base: str
) -> None:
    """Protected files return to the base, and go where that lacks them."""
    task = make_task(repo_image.tag, base_commit=repo_image.commit)
    changed = ("conftest.py", "tests/test_calc.py", "tests/test_new.py", "protected_new.py", "long.txt")
    async with sandboxes.open(make_claim(task), role="grade") as sandbox:
        inputs = {
            steps.TESTED: "tests/test_calc.py\0tests/test_new.py\0protected_new.py\0",
            steps.PROTECTED: "conftest.py\0protected_new.py\0long.txt\0",
            steps.START: "",
        }
        await sandbox.put([File(path=path, content=text.encode()) for path, text in inputs.items()])
        await sandbox.run(f"for path in {' '.join(changed)}; do echo x >$path; done", timeout_s=240)
        named = await sandbox.run(f"git rev-parse {base}" if base else "true", timeout_s=240)
        commits = {"BASE": named.output.decode().strip(), "HEAD": repo_image.commit}
        governing = GoverningFiles("pytest\n", Surveyed())
        result = await sandbox.run(governing.step("restore_protected", **commits), timeout_s=240, plain=True)
        assert result.exit_code == 0, result.output
        left = await sandbox.run("git status --porcelain; grep -c 'of old' long.txt", timeout_s=240)
    lines = left.output.decode().split("\n")[:-1]
    old = base == "HEAD~1"
    assert lines == [*(["M  long.txt"] if old else []), str(int(old))]


async def test_hidden_tests_that_nobody_can_apply_are_the_tasks_fault(
    grader: Grader, repo_image: RepoImage
) -> None:
    unfit = ExitCode(eval_script=RUN, test_patch=RENAMED_TESTS.replace("import sub", "import other").encode())
    with pytest.raises(TaskBroken, match="hidden tests do not apply"):
        await value(grader, repo_image, unfit, NOTE + gone("tests/test_calc.py"))


def test_both_names_of_a_renamed_file_are_hidden_paths() -> None:
    for verdict in RENAMING.values():
        paths = hidden_paths(verdict, "/workspace")
        assert {"tests/test_calc.py", "tests/unit/test_sums.py"} <= set(paths)


def test_what_a_script_patches_that_is_no_test_is_no_hidden_path() -> None:
    script = f"git apply - <<'EOF'\n{FIX.decode()}{HIDDEN_TESTS}EOF\npytest\n"
    assert hidden_paths(ExitCode(eval_script=script), "/workspace") == ["tests/test_calc.py"]


def test_paths_outside_the_repository_are_no_hidden_paths() -> None:
    files = tuple(
        File(path=path, content=b"") for path in ("/opt/check", "../x", "/workspace", "/workspace/t.py")
    )
    verdict = ExitCode(eval_script="true\n", protected_paths=("./tests/",), files=files)
    assert hidden_paths(verdict, "/workspace") == ["tests", "t.py"]
