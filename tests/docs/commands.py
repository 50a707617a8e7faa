"""The commands that README.md and the pages in docs/ show, taken out of their fenced blocks and their inline code.

A block shows commands if its first line is one. It then consists of commands, comments and indented lines only; a block that shows output
too marks its commands with a prompt, `$` or a host's `gpu1#`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swerve import COMMANDS as FRONT

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))),
)
OURS = re.compile(r"(python3? -m (pipeline|workers|trainer|infra|benchmarks)\b|swerve \w|make [a-z])")
SHELL = {".", "cd", "cp", "export", "git", "mkdir"}  # what everybody knows and nobody of ours can break
PROGRAMS = SHELL | {
    "bash", "curl", "docker", "editor", "hf", "install",
    "kubectl", "make", "pip", "python", "python3", "redis-cli", "sbatch", "scancel", "scp",
    "ssh", "swerve", "systemctl", "torchrun",
}  # fmt: skip
PROMPT = re.compile(r"^([a-z]+[0-9]*[#$]|\$) ")
ASSIGNMENT = re.compile(r"^[A-Z][A-Z_0-9]*=\S* ")


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    line: int
    text: str  # one command without prompt, comment and environment, spelled as `python -m` where it is one of ours

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands(page: str, text: str) -> Iterator[Command]:
    """Every command in the fenced blocks of a page."""
    for first, block in blocks(text):
        yield from _of_block(page, first, block)


def inline_commands(page: str, text: str) -> Iterator[Command]:
    """What inline code names of ours, whole or in part, as in `make demo` or `swerve ls --reward 1`."""
    for number, line in enumerate(text.splitlines(), start=1):
        for code in re.findall(r"`([^`]+)`", line):
            if OURS.match(code):
                yield Command(page, number, _plain(code))


def blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each fenced block, with the number of its first line."""
    inside: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            if inside is None:
                inside = []
            else:
                yield number - len(inside), inside
                inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, "a fenced block has no end"


def _of_block(page: str, first: int, block: list[str]) -> Iterator[Command]:
    shows_output = any(PROMPT.match(line) for line in block)
    told = [line for line in block if line.strip() and not line.startswith("#")]
    is_of_commands = bool(told) and _is_command(told[0])
    number = first
    for line in joined(block):
        where = f"{page}:{number}: {line}"
        number += 1 + line.count("\n")
        if shows_output:
            is_command = PROMPT.match(line) is not None
        else:
            is_command = is_of_commands and bool(line.strip()) and not line.startswith(("#", " "))
            assert not is_command or _is_command(line), (
                f"{where}: is this output? Then mark the commands of the block with $"
            )
        assert is_command or not OURS.match(line), f"{where}: mark the command with $"
        if is_command:
            yield from (Command(page, number - 1, part) for part in _parts(PROMPT.sub("", line)))


def joined(block: list[str]) -> Iterator[str]:
    """The lines, with those that end in a backslash and their next as one."""
    whole = ""
    for line in block:
        whole += line
        if not line.endswith("\\"):
            yield whole
            whole = ""
        else:
            whole += "\n"


def _is_command(line: str) -> bool:
    plain = ASSIGNMENT.sub("", PROMPT.sub("", line))
    word = plain.split(maxsplit=1)[0] if plain.split() else ""
    return word in PROGRAMS or (ROOT / word).is_file()


def _parts(line: str) -> Iterator[str]:
    without_comment = re.sub(r"\s+# .*$", "", line.replace("\\\n", " "))
    for part in re.split(r" (?:&&|\|\||\|) ", without_comment):
        yield _plain(part)


def _plain(command: str) -> str:
    while ASSIGNMENT.match(command):
        command = ASSIGNMENT.sub("", command, count=1)
    command = " ".join(command.replace(" ...", "").split())
    front = re.match(r"swerve ([a-z]+)(.*)", command)
    if not front or front[1] not in FRONT:
        return re.sub(r"^python3 -m ", "python -m ", command)
    module, first, _ = FRONT[front[1]]
    return " ".join(("python -m", module, *first)) + front[2]
