"""What an agent submits, and what of it is graded."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline import artefacts
from pipeline.agent.config import load_agent
from pipeline.errors import SandboxError
from pipeline.request import EpisodeStatus
from pipeline.task import ExitCode
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Submitted, Trajectory, head_of
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.agent.commands import Submission, lacks_bytes, submission, submitted
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import CommandResult, PatchCheck


def ended(output: bytes, exit_code: int | None = 0, dropped_bytes: int = 0) -> CommandResult:
    return CommandResult(exit_code, output, dropped_bytes, 0.1)


@pytest.mark.parametrize(
    "sentinel", [b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", b"MINI_SWE_AGENT_FINAL_OUTPUT"]
)
def test_all_that_follows_the_sentinel_is_the_patch_byte_for_byte(sentinel: bytes) -> None:
    patch = b"diff --git a/x b/x\r\n+\xff\x00\n\n"
    assert submission(ended(b" \n" + sentinel + b" \n" + patch)) == patch
    assert submission(ended(sentinel)) == b""


@pytest.mark.parametrize(
    "result",
    [
        ended(b"warning\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"),
        ended(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and more\n"),
        ended(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", exit_code=1),
        ended(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", exit_code=None),
        ended(b""),
    ],
)
def test_nothing_is_submitted_without_the_sentinel_alone_on_top_and_status_zero(
    result: CommandResult,
) -> None:
    assert submission(result) is None


HEADER = b"diff --git a/x b/x\nindex 1..2 100644\n"
MISSING = b"Binary files a/x and b/x differ"


@pytest.mark.parametrize(
    ("patch", "lacks"),
    [
        (HEADER + MISSING + b"\n", True),
        (HEADER + MISSING, True),
        (b"--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n" + HEADER + MISSING + b"\r\n", True),
        (HEADER + b"GIT binary patch\nliteral 1\nIcmZPo000310RR91\n\n", False),
        (b"--- a/y\n+++ b/y\n@@ -1,2 +1,2 @@\n " + MISSING + b"\n-a\n+b\n", False),
        (b"--- a/y\n+++ b/y\n@@ -1,2 +1,2 @@\n" + MISSING + b"\n-a\n+b\n", False),
        (b"--- a/y\n+++ b/y\n@@ -0,0 +1 @@\n+" + MISSING + b"\n", False),
        (b"", False),
        (b"@@ -1," + b"9" * 5000 + b" +1 @@\n" + MISSING, True),
    ],
)  # fmt: skip
def test_a_patch_lacks_bytes_where_a_header_says_so_and_no_line_of_a_file(patch: bytes, lacks: bool) -> None:
    assert lacks_bytes(patch) == lacks


FIX = "sed -i 's/a - b/a + b/' calc.py"
CALC = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"
COMMIT = "git add -A && git -c user.name=a -c user.email=a@b commit -qm done"
READS_CALC = ExitCode(eval_script=CALC)
SENTINEL = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


async def rollout(
    sandboxes: DockerSandboxes,
    image: RepoImage,
    model: Path,
    command: str,
    *,
    verdict: ExitCode = READS_CALC,
    agent: str = AGENT,
) -> Trajectory:
    """An episode in which the agent runs `command`."""
    task = make_task(image.tag, base_commit=image.commit, verdict=verdict)
    claim = make_claim(task, turns=1)
    claim = replace(claim, request=replace(claim.request, agent_config=agent))
    policies = ScriptedPolicies(read_bundle(model), [bash(command)])
    return await run_rollout(
        claim, EpisodeStatus(), policies=policies, sandboxes=sandboxes, grader=Grader(sandboxes)
    )


# What the agent does at the end, the reason for which the tree is graded, and the reward.
ENDINGS = {
    "printed": (f"{FIX}; {SUBMIT}", "", 1.0),
    "committed": (f"{FIX}; {COMMIT}; {SUBMIT}", "nothing was printed, and the work was committed", 1.0),
    "committed nothing": (f"{FIX}; {SENTINEL}", "", 0.0),
    "committed by an empty commit": (
        f"{FIX}; git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x; {SENTINEL}",
        "",
        0.0,
    ),
    "prefixes": (
        f"{FIX}; {SENTINEL}; git diff --no-prefix",
        "what was printed cannot be applied in any way",
        1.0,
    ),
    "coloured": (f"{FIX}; {SENTINEL}; git diff --color=always", "what was printed cannot be applied in any way", 1.0),
    # Only `patch`, which is asked last, takes a context line that is not there.
    "another context": (f"{FIX}; {SENTINEL}; git diff | sed 's/^ def add/ def odd/'", "", 1.0),
    "nonsense": (f"{SENTINEL}; echo nonsense", "", 0.0),
    "nonsense and a fix": (
        f"{FIX}; {SENTINEL}; echo nonsense",
        "what was printed cannot be applied in any way",
        1.0,
    ),
    "a part": (f"{FIX}; echo x >new.txt; {SENTINEL}; git diff -- setup.cfg new.txt", "", 0.0),
    "another patch": (
        f"{FIX}; {SENTINEL}; git diff | sed 's/a + b/a * b/'",
        "",
        0.0,
    ),
}  # fmt: skip


@pytest.mark.docker
@pytest.mark.parametrize("name", ENDINGS)
async def test_the_tree_is_graded_only_where_what_was_printed_is_no_whole_patch(
    name: str, sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path
) -> None:
    command, from_tree, reward = ENDINGS[name]
    played = await rollout(sandboxes, repo_image, tiny_model, command)
    assert isinstance(played.outcome, Submitted)
    assert played.reward is not None
    assert (played.outcome.from_tree, played.reward.value) == (from_tree, reward), played.reward


@pytest.mark.docker
async def test_a_binary_file_arrives_and_the_record_says_how(
    sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path
) -> None:
    change = "printf '\\0\\377new' >logo.bin"
    check = f"grep -q new logo.bin && {CALC}"
    played = await rollout(
        sandboxes, repo_image, tiny_model, f"{change}; {FIX}; {SUBMIT}", verdict=ExitCode(eval_script=check)
    )
    assert isinstance(played.outcome, Submitted)
    assert played.reward is not None
    assert played.reward.value == 1.0
    assert b"GIT binary patch" in played.outcome.patch
    facts = artefacts.rollout_facts(played)
    assert (facts["outcome"], facts["patch_source"]) == ("submitted:tree", "git_diff_fallback")
    assert facts["from_tree"] == "what was printed has no bytes of a binary file"
    assert head_of(played, 1).outcome == "submitted:tree"


class Broken:
    """A sandbox that broke after the agent had submitted."""

    workdir = "/workspace"

    async def run(self, command: str, *, timeout_s: float, keep_bytes: int) -> CommandResult:
        raise SandboxError("gone")

    async def diff(self) -> bytes:
        raise SandboxError("gone")

    async def check(self, printed: bytes) -> PatchCheck:
        raise SandboxError("gone")


@pytest.mark.parametrize("patch", [b"+x\n", HEADER + MISSING])
async def test_what_was_printed_needs_its_sandbox_no_longer(patch: bytes) -> None:
    result = ended(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n" + patch)
    assert await submitted(result, load_agent(AGENT), Broken()) == Submission(patch)
    with pytest.raises(SandboxError):
        await submitted(ended(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"), load_agent(AGENT), Broken())


@pytest.mark.docker
async def test_an_exact_agent_gets_what_it_prints(
    sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path
) -> None:
    agent = AGENT.replace("{{error}}", "") + "swerve: {exact: true, upstream: '1.17'}\n"
    played = await rollout(sandboxes, repo_image, tiny_model, f"{FIX}; {COMMIT}; {SUBMIT}", agent=agent)
    assert played.outcome == Submitted(patch=b"")


CHEAT = "printf 'import os\\n\\n\\ndef pytest_configure():\\n    os._exit(0)\\n' >conftest.py"
PASSING = "printf 'def test_add():\\n    pass\\n' >tests/test_add.py"
HIDDEN_TEST = b"""diff --git a/tests/test_add.py b/tests/test_add.py
new file mode 100644
--- /dev/null
+++ b/tests/test_add.py
@@ -0,0 +1,5 @@
+from calc import add
+
+
+def test_add():
+    assert add(3, 1) == 4
"""
BINARY_LINE = "'--- a/calc.py\\n+++ b/calc.py\\n@@ -1,2 +1,2 @@\\nBinary files a/calc.py and b/calc.py differ\\n-x\\n+y\\n'"
# What an agent does that does not fix anything, or whose fix is not in its tree.
ATTACKS = {
    "a committed cheat": f"{CHEAT}; {COMMIT}; {SENTINEL}",
    "an unreadable patch on purpose": f"{CHEAT}; {PASSING}; {SENTINEL}; echo nonsense",
    "a line about binary files": f"{CHEAT}; printf '\\0' >x.bin; {SENTINEL}; printf {BINARY_LINE}",
    "a link": f"ln -s /dev/null tests/test_add.py; {COMMIT}; {SENTINEL}",
    "a planted module": f"printf '\\177ELF' >calc.abi3.so; cp calc.py pytest.py; {COMMIT}; {SENTINEL}",
    "a replaced start": "git replace HEAD $(git commit-tree -m x $(git mktree </dev/null)); "
    f"git checkout -q --orphan other; {CHEAT}; {COMMIT}; {SENTINEL}",
    "a fix that was taken back": f"{FIX}; {COMMIT}; git checkout -q HEAD~1 -- calc.py; {SENTINEL}",
    "a filter that fixes": "git config filter.x.clean \"sed 's/a - b/a + b/'\"; echo '*.py filter=x' >.gitattributes; touch calc.py; "
    f"{COMMIT}; {SENTINEL}",
    "a hidden test": f"{PASSING}; git add -A; git update-index --assume-unchanged tests/test_add.py; {COMMIT}; {SENTINEL}",
}


@pytest.mark.docker
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "unreadable" in name else pytest.mark.slow, id=name) for name in ATTACKS],
)
async def test_a_tree_without_a_fix_is_worth_nothing_however_it_is_submitted(
    name: str, sandboxes: DockerSandboxes, repo_image: RepoImage, tiny_model: Path
) -> None:
    verdict = ExitCode(eval_script="python3 -m pytest -q tests/test_add.py\n", test_patch=HIDDEN_TEST)
    fixed = await rollout(sandboxes, repo_image, tiny_model, f"{FIX}; {SUBMIT}", verdict=verdict)
    assert fixed.reward is not None
    assert fixed.reward.value == 1.0
    played = await rollout(sandboxes, repo_image, tiny_model, ATTACKS[name], verdict=verdict)
    assert played.reward is not None
    assert played.reward.value == 0.0, played.outcome
