"""The patch goes in as git would apply it, and what it must not touch comes back."""

from collections.abc import Callable, Iterator

import docker
import pytest

from pipeline.task import ExitCode, File, Task
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from tests.workers.grading.patches import FIX, NOTE, edited, new_file
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

CRLF = b"""diff --git a/windows.txt b/windows.txt
--- a/windows.txt
+++ b/windows.txt
@@ -1,3 +1,3 @@
 one\r
-two\r
+TWO\r
 three\r
"""


EMPTY_FILE = b"diff --git a/empty b/empty\nnew file mode 100644\nindex 0000000..e69de29\n"


RENAME = b"diff --git a/calc.py b/maths.py\nsimilarity index 100%\nrename from calc.py\nrename to maths.py\n"


MODE = b"diff --git a/calc.py b/calc.py\nold mode 100644\nnew mode 100755\n"


NOTHING = b"diff --git a/calc.py b/calc.py\nindex 1111111..1111111 100644\n"


# Of another text around it, which only `patch` accepts; what git apply leaves out of a patch it would bring.
LOOSE = FIX.replace(b" def sub(a, b):", b" def other(a, b):")


LARGE = new_file("large.txt", "".join(f"{number:063d}\n" for number in range(4000)))


@pytest.mark.slow_but_for("patch0-p*", "diff --git a/e*")
@pytest.mark.parametrize(
    ("patch", "script", "applied_by"),
    [
        (CRLF, r"printf 'one\r\nTWO\r\nthree\r\n' | cmp - windows.txt", "git apply"),
        (EMPTY_FILE, "test -e empty && ! test -s empty", "git apply"),
        (RENAME, "test -e maths.py && ! test -e calc.py", "git apply"),
        (MODE, "test -x calc.py", "git apply"),
        (LARGE, "test $(wc -c <large.txt) = 256000", "git apply"),
        (FIX.rstrip(b"\n"), "grep -q 'a + b' calc.py", "git apply"),
        (FIX.replace(b"a/calc.py", b"a/./calc.py"), "true", None),
        (LOOSE, "grep -q 'a + b' calc.py", "patch --fuzz"),
        (LOOSE + new_file("lib/site-packages/evil.py", "x"), "true", ""),
        (LOOSE + new_file("node_modules/evil/index.js", "x"), "true", ""),
        (b"Some talk first.\n\n" + FIX, "grep -q 'a + b' calc.py", "git apply"),
        (FIX.replace(b"    return a - b", b"    return nothing"), "true", ""),
        (b"not a patch at all\n", "true", ""),
        (NOTHING, "! grep -q 'a + b' calc.py", "patch --fuzz"),
        (NOTHING + FIX, "grep -q 'a + b' calc.py", "patch --fuzz"),
        (new_file("../outside", "x"), "true", ""),
        (new_file(".git/hooks/post-checkout", "touch /hooked"), "true", ""),
        (new_file(".git/config", "[core]\nfsmonitor = touch /hooked"), "true", ""),
    ],
)
async def test_patches_apply_as_git_would(
    grader: Grader, scripted: Callable[[str], Task], patch: bytes, script: str, applied_by: str | None
) -> None:
    reward = await grader.grade(make_claim(scripted(script + "\n")), patch)
    if applied_by is None:
        assert reward.applied_by in ("git apply", "patch --fuzz", "")
    else:
        assert (reward.applied_by, reward.resolved) == (applied_by, applied_by != "")
    assert reward.applied_by or reward.log_tail, "why it does not apply"


WORK = r"""
printf '\0\377\1' >logo.bin; rm long.txt; ln -s calc.py link; mv tests/test_calc.py tests/test_moved.py
chmod 755 setup.cfg; sed -i 's/two/TWO/' windows.txt; printf 'no end' >open.txt; head -c 3000000 /dev/zero >zeros.bin
for number in {1..40000}; do echo "a long enough line, $number of many"; done >large.txt
"""


DONE = r"""
set -e
test "$(od -An -tx1 logo.bin | tr -d ' \n')" = 00ff01
! test -e long.txt; test -L link; test -x setup.cfg; ! test -e tests/test_calc.py; test -e tests/test_moved.py
printf 'one\r\nTWO\r\nthree\r\n' | cmp - windows.txt; test "$(cat open.txt; echo .)" = 'no end.'
test "$(wc -c <zeros.bin)" = 3000000; test "$(wc -l <large.txt)" = 40000
"""


@pytest.mark.slow
async def test_what_a_sandbox_diffs_the_grader_applies(
    grader: Grader, sandboxes: DockerSandboxes, scripted: Callable[[str], Task]
) -> None:
    task = scripted(DONE)
    async with sandboxes.open(make_claim(task), role="agent") as sandbox:
        assert (await sandbox.run(WORK, timeout_s=240)).exit_code == 0
        patch = await sandbox.diff()
    assert len(patch) > 1024 * 1024
    reward = await grader.grade(make_claim(task), patch)
    assert (reward.value, reward.applied_by) == (1.0, "git apply")


async def test_a_patch_that_only_takes_away_applies(
    grader: Grader, sandboxes: DockerSandboxes, scripted: Callable[[str], Task]
) -> None:
    task = scripted("! test -e logo.bin && ! test -e long.txt\n")
    async with sandboxes.open(make_claim(task), role="agent") as sandbox:
        await sandbox.run("rm logo.bin long.txt", timeout_s=240)
        patch = await sandbox.diff()
    assert (await grader.grade(make_claim(task), patch)).value == 1.0


@pytest.fixture
def unkempt_image(docker_client: docker.DockerClient, repo_image: RepoImage) -> Iterator[str]:
    """The repository with a changed file that was never committed, and one that git does not know."""
    container = docker_client.containers.run(
        repo_image.tag, ["sh", "-c", "echo dirty >>windows.txt; echo mine >untracked"], detach=True
    )
    assert container.wait()["StatusCode"] == 0
    repository, _, tag = repo_image.tag.partition(":")
    image = container.commit(repository, f"{tag}-unkempt")
    container.remove()
    yield image.tags[0]
    docker_client.images.remove(image.id, force=True)


async def test_a_failed_rung_leaves_what_the_image_had(grader: Grader, unkempt_image: str) -> None:
    script = (
        "grep -q 'a + b' calc.py && grep -q mine untracked && grep -q dirty windows.txt && ! test -e *.rej\n"
    )
    task = make_task(unkempt_image, verdict=ExitCode(eval_script=script))
    reward = await grader.grade(make_claim(task), LOOSE)
    assert (reward.value, reward.applied_by) == (1.0, "patch --fuzz")


async def test_protected_files_come_back_as_the_setup_left_them(
    grader: Grader, repo_image: RepoImage
) -> None:
    bug = FIX.replace(b"-    return a - b\n+    return a + b", b"-    return a - b\n+    return b - a")
    verdict = ExitCode(
        eval_script="grep -q 'b - a' calc.py && test -e NOTE.txt\n", protected_paths=("calc.py",)
    )
    task = make_task(repo_image.tag, base_commit=repo_image.commit, verdict=verdict, setup_patch=bug)
    meddled = (
        bug.replace(b"return a - b", b"return 0")
        .replace(b"return b - a", b"return a - b")
        .replace(b"return 0", b"return b - a")
    )
    assert (await grader.grade(make_claim(task), NOTE + meddled)).value == 1.0


async def test_a_patch_over_other_ground_merges_three_ways(
    grader: Grader, sandboxes: DockerSandboxes, scripted: Callable[[str], Task]
) -> None:
    task = scripted("grep -q 'line 32 changed' long.txt && grep -qx 'line 29' long.txt\n")
    older = "git checkout -q HEAD~1; sed -i 's/^line 32$/line 32 changed/' long.txt; git diff"
    async with sandboxes.open(make_claim(task), role="agent") as sandbox:
        patch = (await sandbox.run(older, timeout_s=240)).output
    reward = await grader.grade(make_claim(task), patch)
    assert (reward.value, reward.applied_by) == (1.0, "git apply --3way")


async def test_files_of_the_verdict_come_after_the_patch(grader: Grader, repo_image: RepoImage) -> None:
    verdict = ExitCode(
        eval_script="grep -qx ours NOTE.txt && test -x /opt/check && /opt/check\n",
        files=(
            File(path="NOTE.txt", content=b"ours\n"),
            File(path="/opt/check", content=b"#!/bin/sh\nexit 0\n", mode=0o755),
        ),
    )
    assert (await grader.grade(make_claim(make_task(repo_image.tag, verdict=verdict)), NOTE)).value == 1.0


async def test_protected_directories_come_back_and_what_lies_in_their_way_goes(
    grader: Grader, repo_image: RepoImage
) -> None:
    verdict = ExitCode(
        eval_script="grep -q test_sub tests/test_calc.py && ! test -e tests/extra.py && ! test -e absent\n",
        protected_paths=("tests", "absent"),
    )
    task = make_task(repo_image.tag, base_commit="0" * 40, verdict=verdict)
    gone = edited("tests/test_calc.py", FILES["repo/tests/test_calc.py"], "").replace(
        b"+++ b/tests/test_calc.py", b"+++ /dev/null"
    )
    assert (await grader.grade(make_claim(task), gone + new_file("tests/extra.py", "x"))).value == 1.0
    link = (
        new_file("tests", "/tmp").replace(b"mode 100644", b"mode 120000") + b"\\ No newline at end of file\n"
    )
    assert (await grader.grade(make_claim(task), gone + link + new_file("absent", "x"))).value == 1.0
