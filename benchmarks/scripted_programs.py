"""A scripted policy for the shipped agent programs: six turns that look, fix the bug, run the tests and end, whatever the program.

Which turn comes next is read from the prompt, because programs ask for other things in between, such as a title.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks import bug
from pipeline.errors import EngineError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle
from pipeline.trajectory import Trajectory, VersionSpan, reply_digest
from trainer.batching.samples import samples_of
from workers.agent.loop import Policy
from workers.policy.render import Renderer
from workers.policy.speaker import Sampled, Speaker, Voice

# One for each turn but the last.
COMMANDS = (
    "ls -la",
    "cat pricing/discount.py",
    "grep -rn 'percent' --include=*.py .",
    bug.FIX,
    "python3 -m unittest tests.test_total 2>&1 | tail -3",
)
TITLE = "Discounts in percent"
# How each program's own tool takes a command.
TOOLS: dict[str, tuple[str, Callable[[str], dict[str, str | bool]]]] = {
    "codex": ("exec_command", lambda command: {"cmd": command}),
    "mini": ("bash", lambda command: {"command": command}),
    "opencode": ("bash", lambda command: {"command": command, "description": "goes on"}),
    "pi": ("bash", lambda command: {"command": command}),
    "qwen-code": ("run_shell_command", lambda command: {"command": command, "is_background": False}),
}
MINI_ENDS_BY = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LARGEST = 2**31 - 1


def replies(program: str) -> tuple[str, ...]:
    """What the policy says to a program. Only mini-swe-agent ends by a command; the others end after a reply without a call."""
    commands = (*COMMANDS, MINI_ENDS_BY if program == "mini" else "")
    return tuple(_reply(program, number, command) for number, command in enumerate(commands))


def _reply(program: str, number: int, command: str) -> str:
    words = f"<think>\nWhat is turn {number} for?\n</think>\n\nThis is turn {number} — on we go.\n"
    if not command:
        return words
    name, fields = TOOLS[program]
    return f"{words}<tool_call>\n{json.dumps({'name': name, 'arguments': fields(command)})}\n</tool_call>"


@dataclass(slots=True)
class ProgramScript:
    """The policy of one episode, with what it was asked for."""

    renderer: Renderer
    replies: Sequence[str]
    fails_at: int | None  # the turn at which the engine fails for good
    prompts: list[Sequence[int]] = field(default_factory=list[Sequence[int]])
    last_at: float = 0.0  # when it was asked last, on the clock of `time.monotonic`

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        self.last_at = time.monotonic()
        ids = [*self.renderer.encode_text(self._reply(self.renderer.decode(prompt))), self.renderer.end_id]
        assert len(ids) <= max_new_tokens, f"a program allows {max_new_tokens} tokens only"
        logprobs = [-0.25 - 0.125 * (turn % 8)] * len(ids)
        self.prompts.append(prompt)
        return Sampled(
            ids=ids,
            logprobs=logprobs,
            versions=(VersionSpan(turn, 0, len(ids)),),
            stop="stop",
            digest=reply_digest(pack_int32s(prompt), pack_int32s(ids), pack_float32s(logprobs)),
            engine="script",
        )

    def _reply(self, prompt: str) -> str:
        if "<tools>" not in prompt:
            return TITLE
        number = sum(f"This is turn {number} " in prompt for number in range(len(self.replies)))
        if number in (self.fails_at, len(self.replies)):
            raise EngineError(f"the script has no turn {number}")
        return self.replies[number]


class ProgramScripts:
    """Gives each episode of an agent program a script of its own; a `Policies`."""

    def __init__(self, bundle: TokenizerBundle, *, fails_at: int | None = None) -> None:
        self._renderer = Renderer(bundle)
        self._fails_at = fails_at
        self.by_request: dict[str, ProgramScript] = {}

    async def voice(self, claim: Claim) -> Voice:
        request = claim.request
        assert request.harness is not None
        script = ProgramScript(self._renderer, replies(request.harness.name), self._fails_at)
        self.by_request[request.id] = script
        limits = request.sampling.max_new_tokens, request.limits.context_tokens
        return Voice(self._renderer, Speaker(script, *limits))

    async def open(self, claim: Claim) -> Policy:
        raise NotImplementedError("only agent programs play by this script")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of an episode's turns, without its asides."""

    sampled: int
    trained: int


def token_counts(played: Trajectory) -> TokenCounts:
    """Compares the digest of each reply. Raises AlteredReply and other ValueErrors."""
    samples = samples_of(played, vocab_size=LARGEST, max_tokens=LARGEST)
    return TokenCounts(
        sampled=sum(len(turn.sampled) // 4 for turn in played.turns if not turn.aside),
        trained=sum(sample.num_trained_tokens for sample in samples),
    )


def faults(played: Trajectory, script: ProgramScript) -> Iterator[str]:
    """What is wrong with what was recorded of an episode, however it ended."""
    program = played.program
    if program is None:
        yield "no program played"
        return
    if len(played.turns) + program.not_taken != len(script.prompts):
        yield f"{len(script.prompts)} replies, {len(played.turns)} turns, {program.not_taken} not taken"
    try:
        counts = token_counts(played)
    except ValueError as error:
        yield str(error)
        return
    if counts.trained != counts.sampled:
        yield f"{counts.sampled} tokens are sampled and {counts.trained} trained"
    if program.quoted_calls:
        yield f"{program.quoted_calls} calls are quoted in other conversations"
