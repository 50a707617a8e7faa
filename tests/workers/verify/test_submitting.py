"""The known fix as an agent makes and submits it."""

import base64
from pathlib import Path

import docker
import pytest
from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.agent.option import read_agent
from pipeline.request import Limits
from pipeline.task import ExitCode
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.leaks.giveaways import built
from tests.workers.verify.spans import FIXED, TaskFile
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


async def difference(sandboxes: DockerSandboxes, image: str, change: str) -> bytes:
    """The known fix that `change` makes, as the maker of a task writes it."""
    script = f"{change}\ngit add -A -f && git -c diff.noprefix=false diff --cached --binary | base64 -w 0"
    async with sandboxes.open(unqueued_claim(make_task(image), command="test"), role="grade") as sandbox:
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
    "binary": ("true", f"printf '\\0new' >logo.bin; {CALC}", "grep -q new logo.bin", "logo.bin: it is binary"),
    "ignored": (
        "echo out/ >.git/info/exclude",
        f"mkdir out; echo new >out/new.py; {CALC}",
        "grep -q new out/new.py",
        "out/new.py: git ignores it by 'out/' in .git/info/exclude",
    ),
    "alone and ignored": ("true", "echo new >a.log", "grep -q new a.log", "a.log: git ignores it by '*.log' in .gitignore"),
    "prefixes": (
        "git config diff.noprefix true",
        CALC,
        "grep -q 'a + b' calc.py",
        "the repository's own git configuration has diff.noprefix true: take it out",
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


def test_a_fix_that_is_lost_on_the_way_makes_its_task_wrong(
    file: TaskFile, docker_client: docker.DockerClient
) -> None:
    with built(docker_client, file.image.tag, {}, "RUN git config diff.noprefix true") as image:
        file.add("prefixes", FIXED, image=image)
        file.add("fine", FIXED)
        status, lines = file.verify("--controls", "0")
    assert status == 1
    assert [line["states"]["agent"] for line in lines.values()] == [0, 1]
    assert all(0 < line["agent_s"] < line["seconds"] for line in lines.values())
    reason = lines["test:prefixes"]["reason"]
    assert reason.startswith(
        "agent: 0 instead of 1 (patch does not apply; lost on the way: spans.py: the submission cannot"
    )
    assert reason.endswith(
        "take it out in the image): an agent that makes the known fix and submits it gets no reward"
    )
