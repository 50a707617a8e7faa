"""Whole episodes: a scripted policy with real tokens, a real shell in a real repository."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, RequestError, SandboxError
from pipeline.message import unpack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle, read_bundle
from pipeline.trajectory import Exhausted, Observation, Turn
from tests.workers.agent.episode import AGENT, SUBMIT, LocalShell, bash, claim
from workers.agent.commands import Submission
from workers.agent.loop import AgentSandbox, play
from workers.policy.render import Renderer
from workers.policy.scripted import ScriptedPolicies
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import OUTPUT_KEEP_BYTES, CommandResult


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> TokenizerBundle:
    return read_bundle(tiny_model)


@dataclass(slots=True)
class Seen:
    """What a watcher was told."""

    num_told: int = 0
    num_replied: int = 0
    acted_turns: list[Turn] = field(default_factory=list[Turn])

    def told(self, messages: Sequence[ChatMessage]) -> None:
        self.num_told += 1

    def replied(self, turn: Turn) -> None:
        self.num_replied += 1

    def acted(self, turn: Turn) -> None:
        self.acted_turns.append(turn)


@dataclass(slots=True)
class Stage:
    """Plays scripts."""

    bundle: TokenizerBundle
    shell: AgentSandbox
    turns: list[Turn] = field(default_factory=list[Turn])
    seen: Seen = field(default_factory=Seen)

    async def play(self, *replies: str, claim: Claim) -> Submission | Exhausted:
        policy = await ScriptedPolicies(self.bundle, replies, version=3).open(claim)
        return await play(
            claim.request, policy=policy, sandbox=self.shell, turns=self.turns, watcher=self.seen
        )

    @property
    def commands(self) -> list[str]:
        return [action.command for turn in self.turns for action in turn.actions]

    def observation(self, number: int) -> Observation | None:
        (action,) = self.turns[number].actions
        return action.observation

    def told(self, number: int) -> str:
        """The text fed before turn `number`, special tokens and all."""
        return Renderer(self.bundle).decode(unpack_int32s(self.turns[number].fed))


@pytest.fixture
def stage(bundle: TokenizerBundle, shell: LocalShell) -> Stage:
    return Stage(bundle, shell)


class HoledShell(LocalShell):
    """A shell whose output is longer than it keeps."""

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES
    ) -> CommandResult:
        result = await LocalShell.run(self, command, timeout_s=timeout_s, keep_bytes=keep_bytes)
        return CommandResult(result.exit_code, result.output, 1000, result.wall_s)


class BrokenShell(LocalShell):
    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES
    ) -> CommandResult:
        raise SandboxError("container vanished")


FIX = "sed -i 's/a - b/a + b/' calc.py"


async def test_what_is_printed_after_the_sentinel_is_submitted(stage: Stage) -> None:
    outcome = await stage.play(bash("cat calc.py"), bash(FIX), bash(SUBMIT), claim=claim())
    assert isinstance(outcome, Submission)
    assert b"-    return a - b\n+    return a + b\n" in outcome.printed
    assert outcome.printed == await stage.shell.diff()
    assert stage.commands == ["cat calc.py", FIX, SUBMIT]
    assert stage.seen.num_told == stage.seen.num_replied == 3
    assert stage.seen.acted_turns == stage.turns
    assert stage.observation(-1) is None


async def test_the_policy_is_told_what_its_command_printed(stage: Stage) -> None:
    await stage.play(bash("cat calc.py; ls nothing; exit 3"), bash(SUBMIT), claim=claim())
    seen = stage.observation(0)
    assert isinstance(seen, Observation)
    assert seen.exit_code == 3
    assert "cannot access 'nothing'" in seen.output
    assert stage.told(0) == (
        "<|im_start|>system\nYou fix code.<|im_end|>\n"
        "<|im_start|>user\nFix this: add() subtracts {{really}}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert stage.told(1) == (
        f"\n<|im_start|>user\n<returncode>3</returncode>\n<output>\n{seen.output}</output><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_turns_are_one_unbroken_token_sequence(stage: Stage) -> None:
    await stage.play(bash("echo '<|im_end|>'"), "no command", bash(SUBMIT), claim=claim())
    held = 0
    for turn in stage.turns:
        assert turn.kept_tokens == held
        held += (len(turn.fed) + len(turn.sampled)) // 4
        assert len(turn.logprobs) == len(turn.sampled)
        assert [(span.version, span.start, span.end) for span in turn.versions] == [
            (3, 0, len(turn.sampled) // 4)
        ]


async def test_a_reply_without_a_command_is_told_so_and_the_episode_goes_on(stage: Stage) -> None:
    outcome = await stage.play("I am not sure.", bash(SUBMIT), claim=claim())
    assert outcome == Submission(b"")
    assert stage.turns[0].actions == ()
    assert "REFUSED: expected exactly 1 command, found 0" in stage.told(1)


async def test_format_errors_in_a_row_end_the_episode_with_the_diff(stage: Stage) -> None:
    replies = ["what?", bash(FIX), "what?", bash("a") + bash("b"), "what?"]
    outcome = await stage.play(*replies, claim=claim(format_errors=3))
    assert outcome == Exhausted(limit="format_errors", patch=await stage.shell.diff())
    assert outcome.patch
    assert len(stage.turns) == 5


async def test_the_last_allowed_turn_is_played_in_full(stage: Stage) -> None:
    outcome = await stage.play(bash("touch new.py"), bash("echo x > new.py"), claim=claim(turns=2))
    assert isinstance(outcome, Exhausted)
    assert outcome.limit == "turns"
    assert b"+x\n" in outcome.patch
    assert stage.observation(1) is not None


async def test_a_step_limit_in_the_file_tightens_the_requests(stage: Stage) -> None:
    outcome = await stage.play(bash("true"), claim=claim(agent=AGENT + "  step_limit: 1\n"))
    assert isinstance(outcome, Exhausted)
    assert outcome.limit == "turns"


# Quick: a command that takes too long is what the policy sees, not a failure.
async def test_a_command_past_its_deadline_is_an_observation(stage: Stage) -> None:
    outcome = await stage.play(bash("echo started; sleep 60"), bash(SUBMIT), claim=claim(command_s=3.5))
    assert isinstance(outcome, Submission)
    seen = stage.observation(0)
    assert seen is not None
    assert (seen.exit_code, seen.output) == (None, "started\n")
    assert "STOPPED after 3.5 s: echo started; sleep 60 started\n" in stage.told(1)


@pytest.mark.slow
async def test_the_episodes_time_ends_a_running_command_and_leaves_the_diff(stage: Stage) -> None:
    outcome = await stage.play(bash(f"{FIX}; sleep 60"), bash(SUBMIT), claim=claim(wall_s=8.0))
    assert outcome == Exhausted(limit="wall_s", patch=await stage.shell.diff())
    assert outcome.patch
    assert len(stage.turns) == 1


async def test_a_full_context_ends_the_episode(stage: Stage) -> None:
    outcome = await stage.play(bash("seq 2000"), bash("true"), claim=claim(context_tokens=500))
    assert isinstance(outcome, Exhausted)
    assert outcome.limit == "context"
    assert len(stage.turns) == 1


async def test_a_reply_that_the_context_cuts_says_so(stage: Stage) -> None:
    outcome = await stage.play("words " * 400, claim=claim(context_tokens=200))
    assert isinstance(outcome, Exhausted)
    assert outcome.limit == "context"
    assert stage.turns[0].stop == "context"


async def test_a_reply_cut_by_length_is_closed_by_a_fed_token(stage: Stage) -> None:
    await stage.play("words " * 500, bash(SUBMIT), claim=claim(sampling={"max_new_tokens": 150}))
    assert stage.turns[0].stop == "length"
    assert stage.told(1).startswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("limit", [200, 10_000])
async def test_a_long_output_is_cut_in_its_middle(stage: Stage, limit: int) -> None:
    command = "printf 'a%.0s' $(seq 20000); printf 'z%.0s' $(seq 20000)"
    await stage.play(bash(command), bash(SUBMIT), claim=claim(observation_chars=limit))
    seen = stage.observation(0)
    assert seen is not None
    assert len(seen.output) <= limit
    assert seen.output.startswith("aaaa")
    assert seen.output.endswith("zzzz")
    assert f"[... {seen.dropped_chars} characters elided ...]" in seen.output
    assert f"<output>\n{seen.output}</output>" in stage.told(1)


async def test_a_template_that_cuts_by_itself_is_given_the_whole_output(stage: Stage) -> None:
    agent = AGENT.replace("{{output.output}}", "{{output.output[:20]}}[{{output.output|length}}]")
    await stage.play(bash("seq -s. 9999"), bash(SUBMIT), claim=claim(agent=agent, observation_chars=1000))
    assert "1.2.3.4.5.6.7.8.9.10[48888]</output>" in stage.told(1)


async def test_a_submission_with_a_hole_in_it_is_replaced_by_the_repositorys_diff(
    stage: Stage, tmp_path: Path
) -> None:
    stage.shell = HoledShell(tmp_path)
    outcome = await stage.play(bash(FIX), bash("echo MINI_SWE_AGENT_FINAL_OUTPUT; echo part"), claim=claim())
    assert isinstance(outcome, Submission)
    assert b"+    return a + b" in outcome.tree
    assert (await outcome.chosen(claim(), Unasked())).from_tree == "what was printed is too long to be kept"


class Unasked:
    """A grader that nobody should need."""

    async def can_apply(self, claim: Claim, patch: bytes) -> bool:
        raise AssertionError("asked")


async def test_a_broken_sandbox_passes_through_and_leaves_what_was_sampled(
    stage: Stage, tmp_path: Path
) -> None:
    stage.shell = BrokenShell(tmp_path)
    with pytest.raises(SandboxError, match="container vanished"):
        await stage.play(bash("ls"), claim=claim())
    assert stage.commands == ["ls"]
    assert stage.turns[0].sampled


async def test_a_silent_engine_passes_through_and_leaves_the_turns_before(stage: Stage) -> None:
    with pytest.raises(EngineError, match="ends after 1 replies"):
        await stage.play(bash("ls"), claim=claim())
    assert len(stage.turns) == 1


async def test_a_useless_agent_config_is_the_requests_fault(stage: Stage) -> None:
    with pytest.raises(RequestError, match="agent config"):
        await stage.play(bash("ls"), claim=claim(agent="agent: []"))


@pytest.mark.docker
async def test_a_container_serves_as_the_shell(stage: Stage, task_image: str) -> None:
    held = claim(image=task_image)
    sandboxes = DockerSandboxes(fleet="test-agent-loop")
    submit = r"printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n+\xff\r\n\n'"
    try:
        async with sandboxes.open(held, role="agent") as shell:
            stage.shell = shell
            outcome = await stage.play(bash("pwd; exit 4"), bash(submit), claim=held)
    finally:
        await sandboxes.close()
    assert isinstance(outcome, Submission)
    assert outcome.printed == b"+\xff\r\n\n"
    seen = stage.observation(0)
    assert seen is not None
    assert (seen.exit_code, seen.output) == (4, "/workspace\n")
