import asyncio

import docker
import pytest

from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.leaks.giveaways import built
from workers.sandbox.docker import DockerSandbox, DockerSandboxes

pytestmark = pytest.mark.docker

TREE = "git add -A -f . && git -c core.fileMode=true write-tree"
CHANGE_EVERYTHING = r"""
sed -i 's/a - b/a + b/' calc.py
printf 'one\r\n2\r\nthree\r\n' >windows.txt
printf '\0\377new' >logo.bin
rm long.txt
chmod +x tests/test_calc.py
mkdir 'new dir' && printf 'no newline' >'new dir/é"x'
ln -s calc.py link
: >empty
"""


async def tree_after(sandbox: DockerSandbox, command: str) -> bytes:
    result = await sandbox.run(f"{{ {command}\n}} >/dev/null 2>&1; {TREE}", timeout_s=240)
    assert result.exit_code == 0, result.output
    return result.output


async def diff_after(sandboxes: DockerSandboxes, image: str, command: str) -> bytes:
    async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
        await sandbox.run(command, timeout_s=240)
        return await sandbox.diff()


async def test_a_diff_rebuilds_the_tree(sandboxes: DockerSandboxes, repo_image: RepoImage) -> None:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        await sandbox.run(CHANGE_EVERYTHING, timeout_s=240)
        patch = await sandbox.diff()
        changed = await tree_after(sandbox, ":")
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as fresh:
        unchanged = await tree_after(fresh, ":")
        quoted = "".join(f"\\x{byte:02x}" for byte in patch)
        rebuilt = await tree_after(fresh, f"printf '{quoted}' | git apply")
    assert rebuilt == changed != unchanged


async def test_commits_of_the_agent_count(sandboxes: DockerSandboxes, repo_image: RepoImage) -> None:
    edit = "echo x >>calc.py"
    commit = "git add -A; git -c user.name=a -c user.email=a@b commit -qm done"
    plain = await diff_after(sandboxes, repo_image.tag, edit)
    assert plain.startswith(b"diff --git a/calc.py b/calc.py\n")
    assert await diff_after(sandboxes, repo_image.tag, f"{edit}; {commit}") == plain


async def test_configuration_does_not_change_a_diff(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    edit = "echo x >>calc.py; echo y >new.py"
    hostile = r"""
git config --global diff.noprefix true; git config --global core.pager 'tr a-z A-Z'
git config color.ui always; git config --global diff.external 'echo external'
git config diff.mnemonicPrefix true; git config diff.renames copies
printf '#!/bin/sh\necho hook\nexit 1\n' >.git/hooks/pre-commit; chmod +x .git/hooks/*
printf '*.py\n' >~/.ignored; git config --global core.excludesFile ~/.ignored; touch .git/index.lock
"""
    plain = await diff_after(sandboxes, repo_image.tag, edit)
    assert b"+++ b/new.py" in plain
    assert await diff_after(sandboxes, repo_image.tag, edit + hostile) == plain


HIDING = {
    "flags": "git update-index --assume-unchanged calc.py; git update-index --skip-worktree long.txt",
    "a sparse tree": "git config core.sparseCheckout true; echo none >.git/info/sparse-checkout; git read-tree HEAD",
    "excludes": "echo '*.py' >>.git/info/exclude",
    "attributes": "echo '*.py -diff filter=x' >.git/info/attributes; git config filter.x.clean 'touch /ran; echo clean'; "
    "git config filter.x.required true",
    "programs": "git config core.fsmonitor 'touch /ran'; git config diff.external 'touch /ran'; git config core.pager 'touch /ran'",
    "another tree": "git config core.worktree /elsewhere; mkdir /elsewhere",
    "no configuration": "echo '[' >.git/config",
    "another start": "git replace HEAD $(git commit-tree -m x $(git write-tree)); git add -A; git commit -qm x --author 'a <a@b>'",
    "another directory": "mv .git /elsewhere; echo 'gitdir: /elsewhere' >.git",
    "an index of its own": "git add -A; rm .git/index; git checkout -q --orphan other; git rm -rq --cached .",
}


@pytest.mark.parametrize("name", HIDING)
async def test_nothing_in_a_repository_hides_a_change_or_runs_a_program(
    name: str, sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    edit = "echo x >>calc.py; echo y >new.py; echo z >>long.txt"
    plain = await diff_after(sandboxes, repo_image.tag, edit)
    assert plain.count(b"diff --git") == 3
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        # A file that was changed in the second in which the agent began may be its maker's.
        await sandbox.run(f"sleep 1.1; ({edit}); {HIDING[name]}", timeout_s=240)
        assert await sandbox.diff() == plain
        assert (await sandbox.run("ls /ran", timeout_s=240)).exit_code != 0


async def test_a_file_that_is_stored_in_another_form_is_no_change(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    stored = """RUN git config filter.up.clean 'tr a-z A-Z' && git config filter.up.smudge 'tr A-Z a-z' && \
echo '*.dat filter=up' >.gitattributes && echo large >large.dat && echo ignored >.git/info/exclude && touch ignored && \
git add -A && git commit -qm stored"""
    with built(docker_client, repo_image.tag, {}, stored) as image:
        # The image's files are as old as the image, and their time is counted in seconds.
        await asyncio.sleep(1.1)
        patch = await diff_after(sandboxes, image, "echo x >>calc.py; echo y >new.py")
    assert patch.count(b"diff --git") == 2
    assert b"+++ b/new.py" in patch


@pytest.mark.parametrize("command", ["git init -q empty", "echo x >git~1"])
async def test_what_git_cannot_add_costs_nothing_but_itself(
    sandboxes: DockerSandboxes, repo_image: RepoImage, command: str
) -> None:
    edit = "echo x >>calc.py; echo y >new.py"
    plain = await diff_after(sandboxes, repo_image.tag, edit)
    assert b"+++ b/new.py" in plain
    assert await diff_after(sandboxes, repo_image.tag, f"{edit}; {command}") == plain


async def test_a_repository_that_git_refuses_has_no_patch(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    assert await diff_after(sandboxes, repo_image.tag, "echo x >>calc.py; rm -rf .git") == b""


async def test_a_diff_can_follow_a_command_that_was_cancelled(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        container = docker_client.containers.get(sandbox.id)
        command = "echo x >new; while :; do echo noise; done"
        running = asyncio.create_task(sandbox.run(command, timeout_s=240))
        while (
            await asyncio.to_thread(container.exec_run, ["test", "-s", f"{sandbox.workdir}/new"])
        ).exit_code:
            assert not running.done()
        running.cancel()
        await asyncio.wait({running})
        assert b"+++ b/new" in await sandbox.diff()
        assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


async def test_a_diff_ends_what_still_writes(sandboxes: DockerSandboxes, repo_image: RepoImage) -> None:
    writer = "(while :; do echo noise; date >>calc.py; done) &"
    noise = f"cp calc.py /tmp/was; {writer} while cmp -s calc.py /tmp/was; do sleep 0.05; done"
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        await sandbox.run(noise, timeout_s=240)
        first = await sandbox.diff()
        assert first.startswith(b"diff --git a/calc.py b/calc.py\n")
        assert await sandbox.diff() == first


C = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
LAYOUTS = {
    "SHA-256": f"rm -rf .git && {C} init -q --object-format=sha256 . && {C} add -A && {C} commit -qm base",
    "links that are files": "ln -s calc.py link && git add link && git commit -qm link && git config core.symlinks false && "
    "rm link && printf calc.py >link",
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_repository_of_any_layout_has_a_difference_and_takes_what_was_printed(
    name: str, sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    with built(docker_client, repo_image.tag, {}, f"RUN {LAYOUTS[name]}") as image:
        await asyncio.sleep(1.1)
        async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
            edit = "echo x >>calc.py; echo y >new.py; git add -A; git diff --cached -- calc.py new.py"
            printed = (await sandbox.run(edit, timeout_s=240)).output
            assert await sandbox.diff() == printed
            assert await sandbox.check(printed) == ""
            assert await sandbox.check(printed.replace(b" def sub", b" def odd")) == "unreadable"


async def test_files_that_a_sparse_checkout_leaves_out_are_no_removals(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    sparse = "RUN git sparse-checkout set --no-cone /calc.py /long.txt && [ ! -e tests/test_calc.py ]"
    change = "echo x >>calc.py; rm long.txt; mkdir tests; echo new >tests/new.py; printf new >logo.bin"
    with built(docker_client, repo_image.tag, {}, sparse) as image:
        patch = await diff_after(sandboxes, image, change)
    headers = [line for line in patch.decode().splitlines() if line.startswith("diff ")]
    changed = ("calc.py", "logo.bin", "long.txt", "tests/new.py")
    assert headers == [f"diff --git a/{path} b/{path}" for path in changed]


async def test_the_difference_below_a_repositorys_root_is_that_of_the_repository(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    task = make_task(repo_image.tag, workdir="/workspace/tests")
    async with sandboxes.open(make_claim(task), role="agent") as sandbox:
        await sandbox.run("echo x >>../calc.py; echo y >>test_calc.py", timeout_s=240)
        patch = await sandbox.diff()
    assert patch.count(b"diff --git") == 2


async def test_a_printed_patch_is_checked_whatever_lies_in_its_place_and_however_long_it_is(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        lines = "seq 100000 >new.txt; git add -A; git diff --cached"
        long = (await sandbox.run(lines, timeout_s=240, keep_bytes=2**20)).output
        assert len(long) > 500_000
        assert await sandbox.check(long) == ""
        assert await sandbox.check(long[:-20]) == "unreadable"
        short = (await sandbox.run("echo x >>calc.py; git diff -- calc.py", timeout_s=240)).output
        for plant in ("mkfifo", "mkdir"):
            await sandbox.run(f"rm -rf /swerve-git/printed; {plant} /swerve-git/printed", timeout_s=240)
            assert await sandbox.check(short) == ""
        await sandbox.run("rm -rf /swerve-git; touch /swerve-git", timeout_s=240)
        assert await sandbox.check(short) == "unreadable"
        assert await sandbox.check(b"\n") == ""


async def test_a_printed_patch_that_makes_an_ignored_file_of_the_image_cannot_be_applied(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    with built(docker_client, repo_image.tag, {}, "RUN echo made >made.log") as image:
        await asyncio.sleep(1.1)
        async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
            edit = "echo x >>calc.py; echo y >new.log; git add -A -f; git diff --cached"
            printed = (await sandbox.run(edit, timeout_s=240)).output
            assert await sandbox.check(printed) == "unreadable"
            assert (await sandbox.diff()).count(b"diff --git") == 1
