"""The known fix as an agent makes and submits it."""

import base64
from pathlib import Path

import docker
import pytest
from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.agent.option import read_agent
from pipeline.request import Limits
from pipeline.task import ExitCode, Task
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.leaks.giveaways import built
from tests.workers.verify.spans import FIX, FIXED, TaskFile
from workers.grading.grade import Graded, Grader
from workers.sandbox.docker import DockerSandboxes
from workers.unqueued import DEFAULT_AGENT, unqueued_claim
from workers.verify.__main__ import main
from workers.verify.submitting import Submitter, submission_command

pytestmark = pytest.mark.docker

STEPS_OF_2 = """agent:
  system_template: You mend programs.
  instance_template: |-
    Mend this: {{task}}
    1. Write a patch: `git diff -- path/to/file1 path/to/file2 > patch.txt`
    2. Submit:
    ```bash
    echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt
    ```
model:
  observation_template: "{{output.output}}"
"""


async def difference(
    sandboxes: DockerSandboxes, image: str, change: str, *, task: Task | None = None
) -> bytes:
    """The known fix that `change` makes, as the maker of a task writes it."""
    git = "git -c core.autocrlf=false -c diff.noprefix=false"
    script = f"{change}\n{git} add -A -f && {git} diff --cached --binary --no-ext-diff | base64 -w 0"
    claim = unqueued_claim(task or make_task(image), command="test")
    async with sandboxes.open(claim, role="grade") as sandbox:
        result = await sandbox.run(f"( {script} ) 2>&1", timeout_s=240)
    return base64.b64decode(result.output)


async def submitted(
    sandboxes: DockerSandboxes, image: str, change: str, check: str, *, agent: Path = DEFAULT_AGENT
) -> Graded:
    """The verdict on the fix that `change` makes, for a task that `check` decides."""
    fix = await difference(sandboxes, image, change)
    task = make_task(image, verdict=ExitCode(eval_script=f"set -e\n{check}\n"))
    claim = unqueued_claim(task, command="test", agent_config=read_agent([str(agent)]))
    grader = Grader(sandboxes)
    assert (await grader.grade(claim, fix)).resolved, "the fix itself is right"
    return await Submitter(sandboxes, grader).grade(claim, fix)


ANY_CHANGE = r"""
sed -i 's/a - b/a + b/' calc.py
mkdir -p 'new folder/größe' && printf 'ein\r\nzwei' >'new folder/größe/naïve file.txt'
printf '#!/bin/sh\n' >run.sh && chmod +x run.sh && chmod +x conftest.py
ln -s calc.py alias.py && rm windows.txt && ln -s long.txt windows.txt
git mv long.txt longer.txt && git rm -q --cached setup.cfg && rm setup.cfg
printf 'caf\351\n' >latin.txt
"""
ALL_MADE = r"""
grep -q 'a + b' calc.py && [ "$(od -An -c 'new folder/größe/naïve file.txt' | tr -d ' \n')" = 'ein\r\nzwei' ]
[ -x run.sh ] && [ -x conftest.py ] && [ "$(readlink alias.py)" = calc.py ] && [ "$(readlink windows.txt)" = long.txt ]
[ ! -e long.txt ] && [ -e longer.txt ] && [ "$(od -An -c latin.txt | tr -d ' ')" = 'caf351\n' ]
"""


async def test_a_fix_of_files_links_modes_and_names_arrives_as_it_was_made(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    graded = await submitted(sandboxes, repo_image.tag, ANY_CHANGE, ALL_MADE)
    assert graded.reward.resolved, graded.reward.decided_by


CALC = "sed -i 's/a - b/a + b/' calc.py"
LOST = {
    "ignored": (
        "echo out/ >.git/info/exclude",
        f"mkdir out; echo new >out/new.py; {CALC}",
        "grep -q new out/new.py",
        "lost on the way: out/new.py: git ignores it by 'out/' in .git/info/exclude: take that out in the image",
    ),
    "alone and ignored": (
        "true",
        "echo new >a.log",
        "grep -q new a.log",
        "lost on the way: a.log: git ignores it by '*.log' in .gitignore: take that out",
    ),
    "line ends": (
        "git config core.autocrlf true",
        f"printf 'a\\r\\n' >new.txt; {CALC}",
        "od -An -c new.txt | grep -q r",
        "lost on the way: new.txt: its line ends change: see its attributes in .gitattributes; the repository's own git configuration "
        "has core.autocrlf true: take it out in the image",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
async def test_what_of_a_fix_is_lost_on_the_way_is_named_with_its_cause(
    name: str, sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    prepared, change, check, told = LOST[name]
    with built(docker_client, repo_image.tag, {}, f"RUN {prepared}") as image:
        graded = await submitted(sandboxes, image, change, check)
    assert not graded.reward.resolved
    assert told in graded.reward.decided_by


FROM_THE_TREE = {
    "binary": ("true", "printf '\\0new' >logo.bin", "grep -q new logo.bin", "what was printed has no bytes of a binary file"),
    "prefixes": (
        "git config diff.noprefix true",
        CALC,
        "grep -q 'a + b' calc.py",
        "what was printed cannot be applied in any way",
    ),
    "a program": (
        "git config diff.external 'echo external'",
        CALC,
        "grep -q 'a + b' calc.py",
        "what was printed cannot be applied in any way",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_THE_TREE)
async def test_a_fix_whose_printed_patch_is_none_arrives_from_the_tree(
    name: str, sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    prepared, change, check, why = FROM_THE_TREE[name]
    with built(docker_client, repo_image.tag, {}, f"RUN {prepared}") as image:
        graded = await submitted(sandboxes, image, change, check)
    assert graded.reward.resolved
    assert graded.reward.decided_by.endswith(f"; the tree's own difference was graded, because {why}")


USERS = "RUN echo dev:x:1000:1000::/home/dev: >>/etc/passwd && mkdir /home/dev && chown 1000 /home/dev"


async def test_a_fix_that_the_images_user_makes_arrives(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, f"{USERS} && chown -R 1000:1000 .\nUSER dev") as image:
        graded = await submitted(
            sandboxes, image, ANY_CHANGE, f"[ $(id -u) = 1000 ]\necho >>run.sh\n{ALL_MADE}"
        )
    assert graded.reward.resolved, graded.reward.decided_by


async def test_a_fix_that_the_images_user_cannot_write_is_refused_by_its_name(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, repo_image: RepoImage
) -> None:
    with built(docker_client, repo_image.tag, {}, f"{USERS} && chown -R 1000 calc.py\nUSER dev") as image:
        as_root = make_task(image, user="root")
        fix = await difference(sandboxes, image, "echo new >new.txt", task=as_root)
        task = make_task(image, verdict=ExitCode(eval_script="test -e new.txt"))
        claim = unqueued_claim(task, command="test", agent_config=read_agent([str(DEFAULT_AGENT)]))
        graded = await Submitter(sandboxes, Grader(sandboxes)).grade(claim, fix)
    assert "lost on the way: new.txt: the agent's user cannot write it: " in graded.reward.decided_by
    assert "Permission denied" in graded.reward.decided_by


async def test_a_submission_that_fails_is_quoted(
    sandboxes: DockerSandboxes, repo_image: RepoImage, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.yaml"
    agent.write_text(STEPS_OF_2.replace("cat patch.txt", "cat patch.txt nothing.txt"))
    graded = await submitted(sandboxes, repo_image.tag, CALC, "grep -q 'a + b' calc.py", agent=agent)
    assert "ended with status 1 and printed" in graded.reward.decided_by
    assert "nothing.txt: No such file" in graded.reward.decided_by


@pytest.mark.parametrize("spec", [str(DEFAULT_AGENT), "steps of 2"])
async def test_the_agent_file_says_how_its_agent_submits(
    spec: str, sandboxes: DockerSandboxes, repo_image: RepoImage, tmp_path: Path
) -> None:
    agent = Path(spec)
    if spec == "steps of 2":
        agent = tmp_path / "agent.yaml"
        agent.write_text(STEPS_OF_2)
    graded = await submitted(sandboxes, repo_image.tag, CALC, "grep -q 'a + b' calc.py", agent=agent)
    assert graded.reward.resolved, graded.reward.decided_by


def test_a_patch_file_is_written_of_the_files_that_were_changed() -> None:
    task = replace(make_task("none"), problem="`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && rm -rf /`")
    command = submission_command(load_agent(STEPS_OF_2), task, Limits(), ["a.py", "b c.py"])
    assert command == (
        "git diff -- a.py 'b c.py' > patch.txt; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"
    )


def test_an_agent_file_that_says_nothing_of_submitting_is_refused(
    file: TaskFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("any", FIXED)
    agent = tmp_path / "agent.yaml"
    agent.write_text(STEPS_OF_2.replace("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "done"))
    assert main([str(file.path), "--agent", str(agent)]) == 2
    assert (
        "error: --agent: the opening messages contain no command that submits; write"
        in capsys.readouterr().err
    )


NEW_FILE = """diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+new
"""


def test_a_fix_that_is_lost_on_the_way_makes_its_task_wrong(
    file: TaskFile, docker_client: docker.DockerClient
) -> None:
    with built(docker_client, file.image.tag, {}, "RUN echo new.txt >.git/info/exclude") as image:
        file.add("ignored", f"{FIXED} && test -e new.txt", image=image, gold=FIX + NEW_FILE)
        file.add("fine", FIXED)
        status, lines = file.verify("--controls", "0")
    assert status == 1
    assert [line["states"]["agent"] for line in lines.values()] == [0, 1]
    assert all(0 < line["agent_s"] < line["seconds"] for line in lines.values())
    reason = lines["test:ignored"]["reason"]
    assert reason == (
        "agent: 0 instead of 1 (exit status 1; lost on the way: new.txt: git ignores it by 'new.txt' in .git/info/exclude: take that out "
        "in the image or by setup_script): an agent that makes the known fix and submits it gets no reward"
    )
