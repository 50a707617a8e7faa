"""The lessons of the warm start: a teacher's actions in an episode, the output of its commands, and the episode as text.

The teacher finds the function, reads the file, repairs the wrong line, tests sometimes, and may start over once after a failed test. The
teacher knows the place of the fault and which variables matter, but takes each of a task's possible repairs with the same probability. So
the lessons do not contain which of them is right; that is left to learn.

A stand-in for the sandbox knows only the teacher's own commands, so that a lesson is made in milliseconds. Its output for those
commands is exactly what bash prints; a test compares the two.

Lessons are rendered through the agent recipe's templates and the policy's chat template, through which the agent renders at run time
too, so the policy meets the text that it was taught on. The chat template only ever appends.
"""

import random
import re
import traceback
from pathlib import Path
from typing import Literal

import jinja2
import msgspec

from trainer.demo.family import DemoTask, replace_line

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_agent.yaml"
END, PAD = "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class EpisodeMessage(msgspec.Struct, frozen=True):
    """One message of an episode."""

    role: Literal["system", "user", "assistant"]
    content: str

    def rendered(self) -> str:
        """The message as `CHAT_TEMPLATE` writes it."""
        return f"<|{self.role}|>{self.content}{END}"


class Templates:
    """The agent recipe's templates, compiled strictly: an unknown name is an error."""

    def __init__(self, recipe: Path = RECIPE) -> None:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        agent: dict[str, object] = msgspec.yaml.decode(recipe.read_bytes(), type=dict)["agent"]
        self._templates = {
            key: environment.from_string(str(text))
            for key, text in agent.items()
            if key.endswith("_template")
        }

    def opening(self, issue: str) -> list[EpisodeMessage]:
        """The system message and the task."""
        system, instance = self._templates["system_template"], self._templates["instance_template"]
        return [
            EpisodeMessage("system", system.render()),
            EpisodeMessage("user", instance.render(task=issue)),
        ]

    def observation(self, returncode: int, output: str) -> EpisodeMessage:
        """The message about the result of a command."""
        template = self._templates["action_observation_template"]
        return EpisodeMessage("user", template.render(output={"returncode": returncode, "output": output}))

    def format_error(self) -> EpisodeMessage:
        """The message after a turn without exactly one bash block."""
        return EpisodeMessage("user", self._templates["format_error_template"].render())


def action(thought: str, command: str) -> EpisodeMessage:
    """An assistant's turn: one thought, one command."""
    return EpisodeMessage("assistant", f"THOUGHT: {thought}\n```bash\n{command}\n```")


SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT = f"echo {SENTINEL} && git add -A && git diff --cached"

_FIND = re.compile(r"grep -rn '(def \w+\()' \.")
_READ = re.compile(r"(git checkout -q \. && )?cat -n (\S+)")
_EDIT = re.compile(r"sed -i '(\d+)s\|\.\*\|([^|&\\]*)\|' (\S+)")
_TEST = re.compile(r'python3 -c "from ([\w.]+) import (\w+); print\((.*)\)" 2>&1 \| tail -n 1')


def find(function: str) -> str:
    """The command that finds a function."""
    return f"grep -rn 'def {function}(' ."


def read(path: str, *, reset: bool = False) -> str:
    """The command that shows a file with line numbers; `reset` undoes every edit first."""
    return f"{'git checkout -q . && ' if reset else ''}cat -n {path}"


def edit(path: str, line: int, content: str) -> str:
    """The command that replaces one line."""
    return f"sed -i '{line}s|.*|{content}|' {path}"


def check(module: str, function: str, expression: str) -> str:
    """The command that prints whether an expression about a function holds."""
    return f'python3 -c "from {module} import {function}; print({expression})" 2>&1 | tail -n 1'


class Rehearsal:
    """A checked-out repository as a dictionary of texts."""

    def __init__(self, files: dict[str, str]) -> None:
        self._committed = dict(files)
        self.files = dict(files)

    def run(self, command: str) -> str:
        """The output of one of the teacher's commands, all of which exit with 0.

        Raises ValueError for any other command.
        """
        if found := _FIND.fullmatch(command):
            return self._find(found[1])
        if found := _READ.fullmatch(command):
            if found[1]:
                self.files = dict(self._committed)
            lines = self.files[found[2]].splitlines()
            return "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(lines, 1))
        if found := _EDIT.fullmatch(command):
            self.files[found[3]] = replace_line(self.files[found[3]], int(found[1]), found[2])
            return ""
        if found := _TEST.fullmatch(command):
            return self._test(self.files[found[1].replace(".", "/") + ".py"], found[3])
        raise ValueError(f"command: {command!r} is not one the teacher uses")

    def _find(self, text: str) -> str:
        return "".join(
            f"./{path}:{number}:{line}\n"
            for path, source in self.files.items()
            for number, line in enumerate(source.splitlines(), 1)
            if text in line
        )

    @staticmethod
    def _test(source: str, expression: str) -> str:
        """Runs the module's text, which the family made and only the teacher edits."""
        namespace: dict[str, object] = {}
        try:
            exec(source, namespace)
            return f"{eval(expression, namespace)}\n"
        except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
            return traceback.format_exception_only(error)[-1]


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """The probabilities of the teacher's actions.

    `tests`: runs a check before submitting; `starts_over`: starts over after a failed check instead of submitting.
    """

    tests: float = 0.35
    starts_over: float = 0.4


HABITS = Habits()


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of the teacher; `solved` says whether the hidden tests would have passed."""

    messages: list[EpisodeMessage]
    solved: bool


def teach(task: DemoTask, rng: random.Random, templates: Templates, habits: Habits = HABITS) -> Lesson:
    """Lets the teacher work on one task."""
    room = Rehearsal(task.files)
    messages = templates.opening(task.issue)
    repairs = [task.good, *task.others]
    rng.shuffle(repairs)

    def do(thought: str, command: str) -> str:
        output = room.run(command)
        messages.extend([action(thought, command), templates.observation(0, output)])
        return output

    def repair() -> None:
        line = task.line
        do(
            f"change line {line}\t{task.files[task.path].splitlines()[line - 1]}",
            edit(task.path, line, repairs.pop()),
        )

    do("find it.", find(task.function))
    do("read it.", read(task.path))
    repair()
    while rng.random() < habits.tests:
        passed = do("test it.", check(task.module, task.function, task.example)) == "True\n"
        if passed or len(repairs) < len(task.others) or rng.random() >= habits.starts_over:
            break
        do("not right, start over.", read(task.path, reset=True))
        repair()
    messages.append(action("done.", SUBMIT))
    return Lesson(messages=messages, solved=room.files[task.path] == task.fixed_files()[task.path])
