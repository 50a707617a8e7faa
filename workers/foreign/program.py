"""Plays an episode with an agent program: starts it in the agent's container, replies to it, and ends it at a limit.

The exit status of a program says nothing about success: some end with 0 after they gave up, others with 1 after they recovered. Once a
program has received a reply of the policy, the changes in its workdir are its submission, however it ends.
"""

import asyncio
import dataclasses
import shlex

from pipeline.errors import HarnessError
from pipeline.harness import HOME_DIR, EpisodeValues, Harness, Invocation, filled
from pipeline.request import RolloutRequest
from pipeline.task import File
from pipeline.telemetry import meter, span
from pipeline.trajectory import Exhausted, ProgramEnd, Submitted, Turn
from workers.agent.loop import Watcher
from workers.foreign.conversations import COPIES
from workers.foreign.endpoint import AgentEndpoint
from workers.foreign.episode import AgentEpisode, Ending
from workers.foreign.voices import agent_voice
from workers.policy.speaker import AnyVoice
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, Sandbox
from workers.sandbox.users import ROOT

PORT = 8000  # port of the endpoint, in the container
MODEL = "policy"  # the program's name for the policy
STEP_S = 60.0  # limit of a command that prepares the container or tidies up in it
# Time for a program to end by itself after its request was refused.
GRACE_S = 10.0
OUTPUT_KEEP_BYTES = 64 * 1024  # bytes kept of each end of what the program prints
TAIL_CHARS = 4000

# Caches of builds (`~/.m2`, `~/go`, `~/.cargo`) and git's configuration are in the task's home, and the agent's commands, which inherit the
# program's HOME, need them where there is no network.
MAKE_HOME = f"""mkdir -p {HOME_DIR} && for path in ~/* ~/.[!.]*; do
  name=${{path##*/}}
  [ ~ = / ] || [ ! -e "$path" ] || [ -e {HOME_DIR}/"$name" ] || ln -s "$path" {HOME_DIR}/"$name"
done"""
"""A command that makes the program's home, with links to everything in the task's own home. The program's files are written afterwards."""

HARNESS, KIND, COPY = "swerve.harness", "swerve.kind", "swerve.copy"

_replies = meter().create_counter(
    "swerve.program.replies",
    unit="{reply}",
    description="Replies to agent programs: turns that go on, branches, asides, and replies that were not taken",
)
_copies = meter().create_counter(
    "swerve.program.copies",
    unit="{copy}",
    description="Replies that agent programs sent back, by the worst that became of their copies",
)


class Program:
    """One episode of an agent program. After `play`, whatever its end, `turns` and `end` contain the result."""

    def __init__(self, request: RolloutRequest, harness: Harness, voice: AnyVoice, watcher: Watcher) -> None:
        self._request = request
        self._harness = harness
        self._episode = AgentEpisode(
            agent_voice(voice, request.limits.context_tokens),
            request.limits,
            watcher=watcher,
            asides_are_trained=request.asides_are_trained,
            command_pattern=harness.command_pattern,
        )
        self._result: CommandResult | None = None

    @property
    def turns(self) -> list[Turn]:
        return self._episode.turns()

    @property
    def end(self) -> ProgramEnd:
        """The end of the program, and the events besides its turns."""
        counts, result = self._episode.counted(), self._result
        output = result.output.decode("utf-8", "replace") if result is not None else ""
        return ProgramEnd(
            name=self._harness.name,
            version=self._harness.version,
            exit_code=result.exit_code if result is not None else None,
            output_tail=output[-TAIL_CHARS:],
            requests=counts.requests,
            refused=dict(counts.refused),
            given_again=counts.given_again,
            not_taken=counts.not_taken,
            roots=counts.roots,
            branches=counts.branches,
            asides=counts.asides,
            copies=dict(counts.copies),
            quoted_calls=counts.quoted_calls,
        )

    async def play(self, sandbox: Sandbox) -> Submitted | Exhausted:
        """Runs the program to its end. Raises HarnessError if it takes no reply, and the errors of sandbox and engine."""
        try:
            return await self._play(sandbox)
        finally:
            measure(self.end, num_turns=len(self.turns))

    async def _play(self, sandbox: Sandbox) -> Submitted | Exhausted:
        async with AgentEndpoint(self._episode) as endpoint:
            invocation = filled(self._harness, self._values(sandbox.workdir))
            await _make_home(sandbox, invocation)
            with span("agent program", named={"gen_ai.agent.name": self._harness.name}):
                async with sandbox.serve(PORT, endpoint.protocol_factory):
                    limit = await self._run(sandbox, invocation)
        if limit is None and not self.turns:
            raise HarnessError(f"{self._harness.name} took no reply of the policy: {self._ending()}")
        with span("diff"):
            patch = await _diff(sandbox, self._harness)
        return Submitted(patch=patch) if limit is None else Exhausted(limit=limit, patch=patch)

    def _values(self, workdir: str) -> EpisodeValues:
        request = self._request
        return EpisodeValues(
            problem=request.task.problem,
            workdir=workdir,
            model=MODEL,
            port=PORT,
            context_tokens=request.limits.context_tokens,
            max_new_tokens=request.sampling.max_new_tokens,
        )

    async def _run(self, sandbox: Sandbox, invocation: Invocation) -> Ending | None:
        """Returns the limit that the program reached; None if it ended by itself. Raises the error that ended the episode."""
        # The episode's own limit of wall time comes before this one.
        longest_s = self._request.limits.wall_s + 2 * GRACE_S
        running = asyncio.create_task(
            sandbox.run(command_of(invocation), timeout_s=longest_s, keep_bytes=OUTPUT_KEEP_BYTES),
            name=f"program {self._harness.name}",
        )
        ended = asyncio.create_task(self._episode.ended(), name="end of an agent's episode")
        try:
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
                if not (await asyncio.wait({running}, timeout=GRACE_S))[0]:
                    await sandbox.interrupt()
                    self._result = dataclasses.replace(await running, exit_code=None)
            self._result = self._result or await running
        finally:
            running.cancel()
            ended.cancel()
            await asyncio.wait({running, ended})
        if ended.done() and not ended.cancelled():
            return ended.result()
        return "context" if self._episode.context_is_full else None

    def _ending(self) -> str:
        result = self._result
        if result is None or result.exit_code is None:
            return "it was killed"
        said = result.output.decode("utf-8", "replace").strip()[-500:]
        return f"it ended with status {result.exit_code}" + (f" and printed {said!r}" if said else "")


def measure(end: ProgramEnd, *, num_turns: int) -> None:
    """Counts the replies of an episode and the fates of their copies. Each reply is of one kind."""
    of_program = {HARNESS: end.name}
    kinds = {
        "turn": num_turns - end.branches - end.asides,
        "branch": end.branches,
        "aside": end.asides,
        "not_taken": end.not_taken,
    }
    for kind, number in kinds.items():
        _replies.add(number, of_program | {KIND: kind})
    for copy in COPIES:
        _copies.add(end.copies.get(copy, 0), of_program | {COPY: copy})


def command_of(invocation: Invocation) -> str:
    """The shell command that starts the program with its variables and without input."""
    variables = [f"{name}={value}" for name, value in invocation.env.items()]
    return f"exec {shlex.join(['env', *variables, *invocation.command])} </dev/null"


async def _make_home(sandbox: Sandbox, invocation: Invocation) -> None:
    """Write the program's files. Raises HarnessError."""
    made = await sandbox.run(MAKE_HOME, timeout_s=STEP_S, plain=True)
    if made.exit_code != 0:
        raise HarnessError(f"{HOME_DIR} cannot be made: {made.output[-300:].decode('utf-8', 'replace')!r}")
    await sandbox.put(
        [
            File(path=path, content=text.encode("utf-8", "surrogateescape"))
            for path, text in invocation.files.items()
        ]
    )
    if sandbox.user != ROOT:
        given = await sandbox.run(f"chown -R -h {sandbox.user} {HOME_DIR}", timeout_s=STEP_S, plain=True)
        if given.exit_code != 0:
            raise HarnessError(f"{HOME_DIR} cannot be given to {sandbox.user}: {given.output[-300:]!r}")


async def _diff(sandbox: Sandbox, harness: Harness) -> bytes:
    """The changes in the workdir, without new files that belong to the program."""
    if harness.leftovers:
        patterns = shlex.join(f":(glob){pattern}" for pattern in harness.leftovers)
        await sandbox.run(f"{GIT}git clean -qfdx -- {patterns}", timeout_s=STEP_S, plain=sandbox.user == ROOT)
    return await sandbox.diff()
