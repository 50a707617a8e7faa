"""The state `agent`: the known fix as an agent makes and submits it.

In an agent's container the files of the fix are written one by one, by commands of the agent, and submitted by the command that the agent
file gives. What arrives is graded like the submission of an episode. If it gets reward 0, the trees with the fix and with the submission
are compared, and the parts of the fix that were lost on the way are named with what lost them.
"""

import base64
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.agent.option import instructions
from pipeline.errors import GraderError, SandboxError
from pipeline.request import Claim, Limits
from pipeline.task import File, Task
from pipeline.trajectory import Submitted
from workers.agent.commands import SENTINEL, SENTINEL_OF_1, CommandRunner, submitted
from workers.agent.loop import start_up
from workers.grading.controls.drawing import few
from workers.grading.defence import witness
from workers.grading.grade import Graded, Grader
from workers.rollout import agents_claim
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, Sandbox, Sandboxes
from workers.verify.fixed import fixed

STEP_S = 300.0
KEEP_BYTES = 16 * 1024 * 1024  # bytes kept of each end of the files of a fix, in base64
SHOWN_CHARS = 300  # characters shown of a command's output
FIX_DIR = "/swerve-fix"

_SUBMITS = re.compile(rf"echo +[\"']?(?:{SENTINEL}|{SENTINEL_OF_1})[\"']?[^\n`<]*")
_WRITES_PATCH = re.compile(r"git diff [^\n`<]*> *([^\s`]+)")
_PLACEHOLDER = re.compile(r"\S*path/to/\S+")
_SHOWS_FILE = re.compile(r"&& *cat +(\S+)")

_ROOT = f'{GIT}cd "$(git rev-parse --show-toplevel)" || exit\n'
"""Paths of a patch are relative to the repository's root, which the workdir may be below."""

# Prints a line for each path on stdin, each of which ends with a NUL: its kind, and its content or its target in base64.
_PRINT_FILES = r"""while IFS= read -r -d '' path; do
  if [ -L "$path" ]; then printf 'link '; readlink -n -- "$path" | base64 -w 0
  elif [ -f "$path" ]; then
    if [ -x "$path" ]; then printf 'program '; else printf 'file '; fi
    base64 -w 0 <"$path"
  elif [ -d "$path" ]; then printf 'folder '
  else printf 'nothing '
  fi
  echo
done"""


def submission_command(config: AgentConfig, task: Task, limits: Limits, paths: Sequence[str]) -> str:
    """The command with which the agent file tells the agent to submit changes of `paths`.

    mini-swe-agent 2 has a patch file written first, by a command in which the agent puts the paths. Raises ValueError if there is none.
    """
    text = instructions(config, task, limits)
    found = _SUBMITS.findall(text)
    if not found:
        raise ValueError(
            f"--agent: the opening messages contain no command that submits; write `echo {SENTINEL} && ...` in"
            " agent.instance_template"
        )
    command = found[-1].strip()
    shown = _SHOWS_FILE.search(command)
    for writes in _WRITES_PATCH.finditer(text) if shown else ():
        if shown and writes[1] == shown[1]:
            places = _PLACEHOLDER.sub("", writes[0].partition(">")[0]).rstrip()
            return f"{places} {shlex.join(paths)} > {writes[1]}; {command}"
    return command


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A file, a program (a file that may be executed) or a link in a tree. `content` is the link's target."""

    kind: str  # "file", "program", "link", "folder" (of a submodule) or "nothing"
    content: bytes


Tree = Mapping[str, MadeFile]
"""The files of a fix by their paths in the repository; a file that is absent is "nothing"."""


@dataclass(frozen=True, slots=True)
class Submitter:
    """Makes and submits known fixes as an agent does."""

    sandboxes: Sandboxes
    grader: Grader

    async def grade(self, claim: Claim, fix: bytes) -> Graded:
        """The verdict on the known fix that an agent submits. `decided_by` also says of a 0 what was lost on the way, and why the tree was
        graded if it was.

        Raises RolloutError.
        """
        paths = witness.touched_paths(fix)
        wanted = await self._tree(claim, fix, paths)
        config, limits = load_agent(claim.request.agent_config), claim.request.limits
        command = submission_command(config, claim.request.task, limits, paths)
        # Open until the verdict is there, because it is asked for what was lost.
        async with self.sandboxes.open(agents_claim(claim), role="agent") as sandbox:
            runner = CommandRunner.of(config, sandbox)
            await start_up(claim.request, config, runner)
            unwritten = await _make(sandbox, runner, wanted)
            result = await runner.run(command, timeout_s=limits.command_s)
            submission = await submitted(result, config, sandbox)
            outcome = await submission.chosen(claim, self.grader) if submission else Submitted(patch=b"")
            patch = outcome.patch
            graded = await self.grader.grade_with_log(claim, patch)
            if outcome.from_tree:
                graded = _with_why(
                    graded, f"the tree's own difference was graded, because {outcome.from_tree}"
                )
            if graded.reward.resolved:
                return graded
            lost = unwritten or ("" if submission else _unsubmitted(command, result))
            if not lost:
                try:
                    arrived = await self._tree(claim, patch, paths)
                    lost = await _losses(sandbox, wanted, arrived, patch, graded)
                except (GraderError, SandboxError) as error:  # long tests outlive the agent's container
                    lost = f"could not find out what was lost on the way: {error}"
        return _with_why(graded, lost)

    async def _tree(self, claim: Claim, patch: bytes, paths: Sequence[str]) -> Tree:
        """The files at `paths` where the grader has applied `patch`."""
        async with fixed(self.sandboxes, claim, patch) as sandbox:
            return await _read(sandbox, paths)


def _with_why(graded: Graded, why: str) -> Graded:
    return Graded(replace(graded.reward, decided_by=f"{graded.reward.decided_by}; {why}"), graded.log)


async def _read(sandbox: Sandbox, paths: Sequence[str]) -> Tree:
    listed = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
    listing = f"{FIX_DIR}/paths"
    await sandbox.put([File(path=listing, content=listed)])
    command = f"{_ROOT}{_PRINT_FILES} <{listing}"
    result = await sandbox.run(command, timeout_s=STEP_S, keep_bytes=KEEP_BYTES, plain=True)
    if result.exit_code != 0:
        raise GraderError(f"reading the files of the fix failed: {_shown(result)}")
    if result.dropped_bytes:
        raise GraderError(f"the files of the fix are larger than {2 * KEEP_BYTES >> 20} MiB in base64")
    lines = (line.partition(" ") for line in result.output.decode("ascii").splitlines())
    return {
        path: MadeFile(kind, base64.b64decode(content))
        for path, (kind, _, content) in zip(paths, lines, strict=True)
    }


async def _make(sandbox: Sandbox, runner: CommandRunner, wanted: Tree) -> str:
    """Makes the files by commands of the agent. Returns which one cannot be made, and why; "" if all can."""
    contents = [
        File(path=f"{FIX_DIR}/{number}", content=node.content)
        for number, node in enumerate(wanted.values())
        if node.kind in ("file", "program")
    ]
    await sandbox.put(contents)
    root = (await sandbox.run(f"{_ROOT}pwd -P", timeout_s=STEP_S, plain=True)).output.decode().rstrip("\n")
    commands = {
        path: _making(f"{FIX_DIR}/{number}", posixpath.join(root, path), node)
        for number, (path, node) in enumerate(wanted.items())
        if node.kind != "folder"
    }
    # Files that the fix removes can be where others need a directory.
    for path in sorted(commands, key=lambda path: wanted[path].kind != "nothing"):
        made = await runner.run(commands[path], timeout_s=STEP_S)
        if made.exit_code != 0:
            return f"lost on the way: {path}: the agent's user cannot write it: {_shown(made)}"
    return ""


def _making(content: str, path: str, node: MadeFile) -> str:
    """The command that makes the file `path`; a file's content is in the file `content`."""
    place, folder = shlex.quote(path), shlex.quote(posixpath.dirname(path))
    if node.kind == "nothing":
        return f"rm -f -- {place}"
    clear = f"mkdir -p -- {folder} && if [ -L {place} ] || [ -d {place} ]; then rm -rf -- {place}; fi"
    if node.kind == "link":
        return f"{clear} && ln -sfn -- {shlex.quote(node.content.decode('utf-8', 'surrogateescape'))} {place}"
    mode = f"[ -x {place} ] || chmod +x -- {place}"
    if node.kind == "file":
        mode = f"[ ! -x {place} ] || chmod -x -- {place}"
    return f"{clear} && cat {content} >{place} && {{ {mode}; }}"


def _unsubmitted(command: str, result: CommandResult) -> str:
    """Why the command submits nothing."""
    ended = "took too long" if result.exit_code is None else f"ended with status {result.exit_code}"
    return f"nothing was submitted: `{command}` {ended} and printed {_shown(result)!r}"


# Settings of a repository that change what a difference looks like, or which files it has.
_SETTINGS = f"""{GIT}
git config --local --get-regexp '^(diff|color|filter)\\.|^core\\.(attributesfile|autocrlf|eol|excludesfile|filemode|safecrlf|symlinks)$' |
  grep -vE '^core\\.(filemode|symlinks) true$'
"""
# By the repository's own files, and by those that the agent's configuration names.
_IGNORED = f"""{_ROOT}command git check-ignore --verbose --stdin -z <{FIX_DIR}/lost
git check-ignore --verbose --stdin -z <{FIX_DIR}/lost
"""


async def _losses(sandbox: Sandbox, wanted: Tree, arrived: Tree, patch: bytes, graded: Graded) -> str:
    """What of the fix is lost, and what loses it. `sandbox` is the agent's."""
    lost = [path for path, node in wanted.items() if arrived[path] != node]
    if not lost and all(node.kind in ("nothing", "folder") for node in wanted.values()):
        return "none of the fix's files could be compared"
    if not lost:
        return "every file of the fix arrives as it was made, so the outcome of its tests is not steady: see --repeat"
    ignored = await _ignored(sandbox, lost)
    whole = "" if patch.strip() else "the submission is empty"
    if patch.strip() and not graded.reward.applied_by:
        whole = f"the submission cannot be applied: {_end(graded.log)!r}"
    whys: dict[str, list[str]] = {}
    for path in lost:
        why = ignored.get(path) or whole or _difference(path, wanted[path], arrived[path], patch)
        whys.setdefault(why, []).append(path)
    told = "; ".join(f"{few(paths)}: {why}" for why, paths in whys.items())
    settings = (await sandbox.run(_SETTINGS, timeout_s=STEP_S, plain=True)).output.decode("utf-8", "replace")
    if settings:
        told += f"; the repository's own git configuration has {', '.join(settings.splitlines())}: take it out in the image"
    return f"lost on the way: {told}"


async def _ignored(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, str]:
    """Why git leaves out those of `paths` that it ignores."""
    listed = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
    await sandbox.put([File(path=f"{FIX_DIR}/lost", content=listed)])
    result = await sandbox.run(_IGNORED, timeout_s=STEP_S, plain=True)
    words = result.output.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return {
        path: f"git ignores it by {pattern!r} in {source}: take that out in the image or by setup_script"
        for source, pattern, path in zip(words[::4], words[2::4], words[3::4], strict=True)
    }


def _difference(path: str, wanted: MadeFile, arrived: MadeFile, patch: bytes) -> str:
    """What became of a file in a patch that was applied."""
    name = re.escape(path.encode("utf-8", "surrogateescape"))
    if re.search(rb"^Binary files .*" + name + rb".* differ$", patch, re.MULTILINE):
        return (
            "it is binary, and the submission has none of its bytes: submit with `git diff --cached --binary`"
        )
    if wanted.kind != arrived.kind:
        return f"it arrives as {arrived.kind} instead of {wanted.kind}"
    if wanted.content.replace(b"\r\n", b"\n") == arrived.content.replace(b"\r\n", b"\n"):
        return "its line ends change: see its attributes in .gitattributes"
    return "it arrives with another content"


def _shown(result: CommandResult) -> str:
    return _end(result.output.decode("utf-8", "replace"))


def _end(text: str) -> str:
    return text[-SHOWN_CHARS:].strip()
