"""An agent that looks for the answer finds nothing, whichever way the image gives it away."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docker
import pytest

from pipeline.errors import SandboxError, TaskBroken
from pipeline.task import File, Task
from tests.workers.claims import make_claim, make_task
from tests.workers.leaks.giveaways import GIVEAWAYS, Giveaway, built, making
from workers.docker.host import FLEET, SOURCE
from workers.leaks.agent_images import StillLeaks, cleaning, find_leaks
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.protocol import CommandResult

pytestmark = pytest.mark.docker

# All that git holds and all files near by, by ways that need not be told where to look.
PROBE = """
everything() {
  git log --all -p; git reflog --all -p; git cat-file --batch-all-objects --batch; git fsck --lost-found
}
{
  everything
  for g in .git/modules/* $PWD.away $PWD.away/.git; do [ ! -e $g/objects ] || GIT_DIR=$g everything; done
  GIT_OBJECT_DIRECTORY=$PWD.away/.git/objects git cat-file --batch-all-objects --batch
  cat .git/*HEAD .git/packed-refs
  find . -name 'hidden.*'
  grep -rah the_answer . $PWD.away
} 2>/dev/null | grep -a -e the_answer -e dangling -e hidden
git config --get-regexp 'remote.*url'
"""
INSTRUCTIONS = "COPY make.sh /make.sh\nRUN bash /make.sh && rm /make.sh\n"


@pytest.fixture(scope="module")
def giveaways(docker_client: docker.DockerClient, task_image: str) -> Iterator[dict[str, Task]]:
    """A task for each repository."""
    with built(docker_client, task_image, {"make.sh": making(GIVEAWAYS)}, INSTRUCTIONS) as tag:
        bases = docker_client.containers.run(tag, ["cat", "/bases"], remove=True, network_mode="none")
        yield {
            name: make_task(
                tag, workdir=f"/kinds/{name}", base_commit=base, hidden_paths=GIVEAWAYS[name].hidden
            )
            for name, base in (line.split() for line in bases.decode().splitlines())
        }


@pytest.fixture(scope="module")
def plain_image(docker_client: docker.DockerClient, task_image: str) -> Iterator[str]:
    """A clean repository in /workspace, and an image's configuration to keep."""
    instructions = f"""{INSTRUCTIONS}RUN mv /kinds/clean /workspace && chown -R nobody /workspace && mkdir /r2e_tests && echo the_answer \\
 | tee /eval_script.sh >/r2e_tests/test_it.py
ENV COLOUR=blue
LABEL flavour=plain
USER nobody
WORKDIR /tmp
ENTRYPOINT ["env"]
CMD ["true"]
"""
    script = making({"clean": GIVEAWAYS["clean"]})
    with built(docker_client, task_image, {"make.sh": script}, instructions) as tag:
        yield tag


def agent_images(client: docker.DockerClient, tag: str) -> list[Any]:
    return client.images.list(filters={"label": f"{SOURCE}={tag}"})


async def said(sandbox: DockerSandbox, command: str) -> str:
    return (await sandbox.run(command, timeout_s=240)).output.decode("utf-8", "replace")


BUG = b"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a * b
"""


@dataclass(frozen=True, slots=True)
class Within:
    """A container, seen from another of its directories."""

    container: DockerSandbox
    workdir: str

    async def run(self, command: str, **limits: Any) -> CommandResult:
        return await self.container.run(f"cd {self.workdir}\n{command}", **limits)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 1, 2, 3])  # each in one container
async def test_every_way_of_giving_the_answer_away_is_found_and_cleaned(
    share: int, giveaways: dict[str, Task], sandboxes: DockerSandboxes
) -> None:
    tasks = {name: giveaways[name] for name in list(GIVEAWAYS)[share::4]}
    async with sandboxes.open(make_claim(giveaways["clean"]), role="grade") as container:
        there: Any = {name: Within(container, task.workdir) for name, task in tasks.items()}
        for name, task in tasks.items():
            leaks = await find_leaks(there[name], task)
            assert bool(await said(there[name], PROBE)) == bool(leaks) == (name != "clean")
            assert GIVEAWAYS[name].leak in "\n".join(map(str, leaks))
        for name, task in tasks.items():
            assert (name, (await there[name].run(cleaning(task), timeout_s=240)).exit_code) == (name, 0)
        for name, task in tasks.items():
            assert await find_leaks(there[name], task) == []
            assert (name, await said(there[name], PROBE)) == (name, "")
            sound = "git status --porcelain; git fsck --full --strict 2>&1; tail -1 calc.py"
            assert (name, await said(there[name], sound)) == (name, "    return a - b\n")


@pytest.mark.slow_but_for("packed")
@pytest.mark.parametrize("name", ["packed", "linked", "submodule", "hidden-in-base"])
async def test_the_agents_patch_applies_where_the_grader_has_what_the_agent_has_not(
    name: str, giveaways: dict[str, Task], sandboxes: DockerSandboxes
) -> None:
    claim = make_claim(giveaways[name])
    async with sandboxes.open(claim, role="agent") as agent:
        assert await said(agent, PROBE) == ""
        await agent.run("sed -i 's/a - b/b + a/' calc.py; echo new >new.txt", timeout_s=240)
        patch = await agent.diff()
    async with sandboxes.open(claim, role="grade") as grader:
        assert await said(grader, PROBE) != ""
        await grader.put([File(path="/patch", content=patch)])
        assert await said(grader, "git apply /patch && git diff --stat && cat new.txt") == (
            " calc.py | 2 +-\n 1 file changed, 1 insertion(+), 1 deletion(-)\nnew\n"
        )


async def test_a_clean_image_is_used_as_it_is(
    plain_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    task = make_task(plain_image, hidden_paths=("/eval_script.sh", "/r2e_tests", "/nowhere"))
    for _ in range(2):
        async with sandboxes.open(make_claim(task), role="agent") as agent:
            container = docker_client.containers.get(agent.id)
            assert container.image.tags == [plain_image]
            assert await said(agent, "find / -xdev -name 'r2e*' -o -name 'eval_script*' 2>/dev/null | grep -v proc") == ""
            assert agent.start.commit
    async with sandboxes.open(make_claim(task), role="grade") as grader:
        assert await said(grader, "cat /eval_script.sh /r2e_tests/*") == "the_answer\nthe_answer\n"
    assert agent_images(docker_client, plain_image) == []


@pytest.mark.slow
async def test_tags_of_the_past_the_branch_and_the_base_commit_stay(
    giveaways: dict[str, Task], sandboxes: DockerSandboxes
) -> None:
    task = giveaways["branch"]
    async with sandboxes.open(make_claim(task), role="agent") as agent:
        assert agent.start.commit == task.base_commit
        assert (
            await said(agent, "git describe --tags; git branch; git log --format=%s") == "v1\n* main\nbase\n"
        )


@pytest.mark.slow
async def test_all_workers_share_one_cleaned_image(
    giveaways: dict[str, Task], docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    task = giveaways["clean"]
    task = make_task(task.image, workdir=task.workdir, hidden_paths=("calc.py",))  # a key of its own
    before = {image.id for image in agent_images(docker_client, task.image)}
    other = DockerSandboxes(fleet=sandboxes.fleet)

    async def open_one(tools: DockerSandboxes) -> str:
        async with tools.open(make_claim(task), role="agent") as agent:
            return agent.image

    one, same = await asyncio.gather(open_one(sandboxes), open_one(sandboxes))
    assert one == same == await open_one(other)
    made = [image for image in agent_images(docker_client, task.image) if image.id not in before]
    assert [image.tags for image in made] == [[one]]
    docker_client.images.remove(one, force=True)  # as eviction would
    assert await open_one(sandboxes) == one
    await other.close()


@pytest.mark.slow
async def test_a_cleaned_image_runs_like_its_source(
    plain_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    task = make_task(plain_image, setup_patch=BUG, env={"TASK": "own"})
    async with sandboxes.open(make_claim(task), role="agent") as agent:
        assert await said(agent, "echo $COLOUR $TASK $PAGER; id -u") == "blue own cat\n65534\n"
    source = docker_client.images.get(plain_image).attrs["Config"]
    (image,) = agent_images(docker_client, plain_image)
    made = image.attrs["Config"]
    for name in ("Env", "User", "WorkingDir", "Entrypoint", "Cmd"):
        assert made[name] == source[name]
    assert made["Labels"]["flavour"] == "plain"
    assert made["Labels"]["swerve.agent-image"] == "1"
    assert made["Labels"][FLEET] == ""
    assert docker_client.containers.run(image.id, remove=True, network_mode="none") == b""


@pytest.mark.slow
async def test_setup_is_part_of_the_base_in_both_containers(
    plain_image: str, sandboxes: DockerSandboxes
) -> None:
    task = make_task(
        plain_image,
        setup_script='echo "$KIND" >made.txt\n[ "$PWD" = /workspace ]',
        setup_patch=BUG.rstrip(b"\n"),
        env={"KIND": "a fixture"},
    )
    trees: list[str] = []
    for role in ("agent", "grade"):
        async with sandboxes.open(make_claim(task), role=role) as sandbox:
            assert await said(
                sandbox, "git status --porcelain; cat made.txt; tail -1 calc.py; ls /swerve-setup*"
            ) == ("a fixture\n    return a * b\nls: cannot access '/swerve-setup*': No such file or directory\n")
            assert await said(sandbox, "git rev-parse HEAD") == f"{sandbox.start.commit}\n"
            assert await sandbox.diff() == b""
            trees.append(await said(sandbox, "git rev-parse 'HEAD^{tree}'"))
            history = await said(sandbox, "git log --all --reflog -p --format=%an | grep 'a - b'")
            assert bool(history) == (role == "grade")
    assert trees[0] == trees[1]


async def test_without_a_leak_a_setup_makes_no_image(
    plain_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    before = len(agent_images(docker_client, plain_image))
    task = make_task(plain_image, setup_script="echo made >made.txt")
    for _ in range(2):
        async with sandboxes.open(make_claim(task), role="agent") as agent:
            assert await said(agent, "git status --porcelain; cat made.txt") == "made\n"
    assert len(agent_images(docker_client, plain_image)) == before


@pytest.mark.slow_but_for(
    "changes1-TaskBroken-setup_patch of .* does not apply-agent",
    "changes1-TaskBroken-setup_patch of .* does not apply-grade",
)
@pytest.mark.parametrize("role", ["agent", "grade"])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"setup_script": "echo no luck; exit 3"}, SandboxError, "setup_script of .* status 3: no luck"),
        ({"setup_patch": BUG.replace(b"a - b", b"a / b")}, TaskBroken, "setup_patch of .* does not apply"),
        ({"setup_patch": BUG, "workdir": "/srv"}, TaskBroken, "setup_patch of .* is not a git repository"),
    ],
)
async def test_a_setup_that_fails_is_no_episode(
    role: Any,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    plain_image: str,
    sandboxes: DockerSandboxes,
) -> None:
    with pytest.raises(error, match=message):
        async with sandboxes.open(make_claim(make_task(plain_image, **changes)), role=role):
            pass


@pytest.mark.slow
async def test_what_the_image_left_uncommitted_is_not_the_agents_work(
    task_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    script = making({"clean": GIVEAWAYS["clean"]}) + "\necho built >egg.txt; echo '# x' >>calc.py"
    with built(docker_client, task_image, {"make.sh": script}, INSTRUCTIONS) as tag:
        claim = make_claim(make_task(tag, workdir="/kinds/clean"))
        async with sandboxes.open(claim, role="agent") as agent:
            assert await agent.diff() == b""
            await agent.run("echo more >>egg.txt", timeout_s=240)
            patch = await agent.diff()
        async with sandboxes.open(claim, role="grade") as grader:
            await grader.put([File(path="/patch", content=patch)])
            assert (
                await said(grader, "git apply /patch; cat egg.txt; tail -1 calc.py") == "built\nmore\n# x\n"
            )


@pytest.mark.slow
async def test_bytecode_of_what_is_hidden_or_undone_goes_with_it(
    task_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    script = making({"clean": GIVEAWAYS["clean"]}) + (
        "\necho 'x = \"the_answer\"' >hidden.py; echo >other.py; python3 -m compileall -q ."
        "; echo __pycache__ >.git/info/exclude"
    )
    with built(docker_client, task_image, {"make.sh": script}, INSTRUCTIONS) as tag:
        task = make_task(tag, workdir="/kinds/clean", setup_patch=BUG, hidden_paths=("hidden.py",))
        async with sandboxes.open(make_claim(task), role="agent") as agent:
            assert await said(agent, "ls __pycache__ | cut -d. -f1; " + PROBE) == "other\n"


@pytest.mark.slow
async def test_an_image_that_cannot_be_cleaned_never_becomes_an_episode(
    task_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    """A volume's content belongs to no image, so what is cleaned there is lost."""
    script = making({"branch": GIVEAWAYS["branch"]})
    instructions = f"{INSTRUCTIONS}VOLUME /kinds\n"
    with built(docker_client, task_image, {"make.sh": script}, instructions) as tag:
        task = make_task(tag, workdir="/kinds/branch")
        with pytest.raises(StillLeaks, match=r"still gives the answer away: ref \(1: refs/heads/later\)"):
            async with sandboxes.open(make_claim(task), role="agent"):
                pass


@pytest.mark.parametrize("path", ["/", "/workspace", "..", ".git/config", "", "a/../.."])
async def test_hiding_what_cannot_be_missed_is_refused(
    path: str, plain_image: str, sandboxes: DockerSandboxes
) -> None:
    with pytest.raises(TaskBroken, match="cannot be taken away"):
        async with sandboxes.open(make_claim(make_task(plain_image, hidden_paths=(path,))), role="agent"):
            pass


async def test_outside_a_repository_only_hidden_paths_go(
    plain_image: str, sandboxes: DockerSandboxes
) -> None:
    task = make_task(plain_image, workdir="/", hidden_paths=("r2e_tests",))
    async with sandboxes.open(make_claim(task), role="agent") as agent:
        assert await said(agent, "ls -d /r2e_tests /eval_script.sh 2>/dev/null") == "/eval_script.sh\n"
        assert agent.start.commit == ""


@pytest.mark.slow
async def test_a_repository_that_git_cannot_read_is_not_taken_for_a_clean_one(
    plain_image: str, sandboxes: DockerSandboxes
) -> None:
    task = make_task(plain_image, setup_script="git update-ref -d HEAD")
    with pytest.raises(SandboxError, match="git finds no commit in /workspace"):
        async with sandboxes.open(make_claim(task), role="agent"):
            pass


@pytest.mark.slow
async def test_a_workdir_below_the_repositorys_root_is_cleaned_to_the_root(
    task_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    kind = Giveaway("mkdir src; echo >src/a.py; git add .; git commit -qm more; git tag -f v1; later", "")
    with built(docker_client, task_image, {"make.sh": making({"below": kind})}, INSTRUCTIONS) as tag:
        task = make_task(tag, workdir="/kinds/below/src")
        async with sandboxes.open(make_claim(task), role="agent") as agent:
            assert await said(agent, f"cd ..\n{PROBE}\ngit log --format=%s") == "more\nbase\n"
            assert agent.image != tag
