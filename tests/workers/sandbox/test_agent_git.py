"""The git of an agent's container prints what can be applied, whatever the image says about git."""

import docker
import pytest
from msgspec.structs import replace

from pipeline.task import ExitCode
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.leaks.giveaways import built
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

FIX = "sed -i 's/a - b/a + b/' calc.py; printf 'x\\r\\n' >windows.txt"
SUBMIT = "git add -A && git diff --cached"
IMAGES = {
    "another user's": "RUN chown -R 1000:1000 /workspace",
    "prefixes and colours": "RUN git config --system diff.noprefix true && git config --global diff.mnemonicPrefix true && "
    "git config --global color.ui always",
    "programs": "RUN git config --global diff.external 'echo external' && mkdir /hooks && "
    "printf '#!/bin/sh\\nexit 1\\n' >/hooks/pre-commit && chmod +x /hooks/* && git config --system core.hooksPath /hooks",
    "an empty program": "RUN git config --system diff.external ''",
    "variables": "ENV GIT_EXTERNAL_DIFF='echo external' GIT_DIFF_OPTS=--unified=0 GIT_TRACE_SETUP=1 GIT_TRACE2=1 "
    "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=diff.noprefix GIT_CONFIG_VALUE_0=true",
    "line ends and attributes": "RUN git config --global core.autocrlf true && mkdir -p ~/.config/git && "
    "echo '*.py -diff' >~/.config/git/attributes && echo '*.txt -diff' >/etc/gitattributes",
    "other files": "RUN printf '[diff]\\nnoprefix = true\\n' >/included && "
    "git config --system includeIf.gitdir:/workspace/.path /included && "
    "mkdir -p ~/.config/git && printf '[color]\\nui = always\\n' >~/.config/git/config && touch ~/.gitconfig",
    "storage": "RUN git config --system core.bigFileThreshold 1 && git config --global core.ignoreStat true && "
    "git config --global core.fsyncObjectFiles true",
    "a file of the image's own": "ENV GIT_CONFIG_GLOBAL=/own\nRUN git config --global diff.noprefix true && "
    "git config --global color.ui always",
}


@pytest.mark.parametrize("name", IMAGES)
async def test_what_the_image_says_about_git_does_not_change_a_submission(
    name: str, sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, IMAGES[name]) as image:
        printed = [await submission(sandboxes, each) for each in (repo_image.tag, image)]
    assert printed[0].startswith(b"diff --git a/calc.py b/calc.py\n")
    assert printed[1] == printed[0]


async def submission(sandboxes: DockerSandboxes, image: str) -> bytes:
    async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
        result = await sandbox.run(f"{FIX}; {SUBMIT} && git commit -qm done", timeout_s=240)
        assert result.exit_code == 0, result.output
        assert result.output == await sandbox.diff(), "the difference at a limit is the same"
        return result.output


async def test_the_rest_of_the_images_configuration_stays(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    said = r"""RUN git config --system author.name 'Ann "A" Author' && git config --global diff.noprefix true && \
printf '[author]\nemail = ann@example.invalid\n[color]\nui = always\n' >/included && git config --global include.path /included && \
git config --global url.https://mirror.invalid/.insteadOf https://github.com/ && git config --global alias.last 'log -1'"""
    wanted = "git config author.name; git config author.email; git config url.https://mirror.invalid/.insteadOf; git last --format=%H"
    with built(docker_client, repo_image.tag, {}, said) as image:
        async with sandboxes.open(make_claim(make_task(image)), role="agent") as sandbox:
            result = await sandbox.run(wanted, timeout_s=240)
    kept = 'Ann "A" Author', "ann@example.invalid", "https://github.com/", repo_image.commit
    assert result.output.decode().splitlines() == list(kept)


async def test_tests_with_a_home_of_their_own_do_not_change_a_submission(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    tests = "export HOME=/tmp/home; mkdir $HOME; git config --global diff.noprefix true; git config --global author.name Own"
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        named = await sandbox.run(f"{tests}; git config author.name", timeout_s=240)
        result = await sandbox.run(f"{FIX}; {SUBMIT}", timeout_s=240)
    assert named.output == b"Own\n"
    assert result.output.startswith(b"diff --git a/calc.py b/calc.py\n")


async def test_a_setup_finds_the_same_git_wherever_it_runs(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    setup = """set -e
git config --system author.name System; git config --global --unset diff.noprefix; git config --global color.ui always
echo made >made.txt; git add made.txt; git commit -qm made --date 2025-01-01T00:00:00Z; git log -1 --format=%an >/author
"""
    said = "RUN chown -R 1000:1000 /workspace && git config --global diff.noprefix true"
    with built(docker_client, repo_image.tag, {}, said) as image:
        claim = make_claim(
            make_task(image, setup_script=setup, env={"GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z"})
        )
        async with sandboxes.open(claim, role="grade") as sandbox:
            graded = sandbox.start.commit, (await sandbox.run("cat /author", timeout_s=240)).output
        async with sandboxes.open(claim, role="agent") as sandbox:
            played = sandbox.start.commit, (await sandbox.run("cat /author", timeout_s=240)).output
            printed = await sandbox.run(f"{FIX}; {SUBMIT}", timeout_s=240)
    assert graded == played
    assert graded[1] == b"System\n"
    assert printed.output.startswith(b"diff --git a/calc.py b/calc.py\n")


async def test_an_exact_agent_gets_the_images_git(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    said = "RUN git config --global diff.noprefix true"
    with built(docker_client, repo_image.tag, {}, said) as image:
        claim = make_claim(make_task(image))
        exact = replace(
            claim, request=replace(claim.request, agent_config="swerve: {exact: true, upstream: '1.17'}")
        )
        async with sandboxes.open(exact, role="agent") as sandbox:
            result = await sandbox.run(f"{FIX}; {SUBMIT}; git config --global diff.noprefix", timeout_s=240)
    assert result.output.startswith(b"diff --git calc.py calc.py\n")
    assert result.output.endswith(b"true\n")


async def test_a_fix_in_another_users_repository_is_paid_and_its_tests_may_use_git(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    said = "RUN chown -R 1000:1000 /workspace"
    with built(docker_client, repo_image.tag, {}, said) as image:
        patch = await submission(sandboxes, image)
        task = make_task(
            image, verdict=ExitCode(eval_script="git status --short | grep calc.py && grep 'a + b' calc.py\n")
        )
        reward = await Grader(sandboxes).grade(make_claim(task), patch)
    assert reward.resolved, reward.log_tail


async def test_what_an_agent_puts_in_the_place_of_our_configuration_changes_no_difference(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    plant = "rm -rf /swerve-git; mkdir /swerve-git; mkfifo /swerve-git/.gitconfig"
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        await sandbox.run(f"{FIX}; {plant}", timeout_s=240)
        planted = await sandbox.diff()
    assert planted == await submission(sandboxes, repo_image.tag)
