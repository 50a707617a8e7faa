"""Judges that are a Python function: the built-in rules, and functions that the operator of a judge host provides.

    def my_judge(issue: str, turns: Sequence[Turn], index: int) -> float | None

gets the issue's text and the turns of one conversation of the rollout (`pipeline.trajectory.Turn`), which are all turns unless an agent
program played. It scores turn `index` of these in -1..1, or abstains with None. For `credit.method = "potential"` it must not read later
turns.

A function that raises, returns something else, or takes longer than the judge's `vote_s` for one step fails the request, which is tried
again within its budget and then dead-lettered with the traceback: an exception is neither a 0 nor an abstention. A function runs in a
thread of the judge's process, without isolation, because the operator of the host chose it: a request can only name functions that are
listed in SWERVE_JUDGE_FUNCTIONS.

Both built-in rules read commands and their outputs (`pipeline/command_effects.py`): whether a command failed, and whether it ran tests that
passed. They need no model, run nothing and know nothing about the task. "evidence" scores whether a step is based on what the policy has
seen, and whether the policy checks its work; it reads the whole rollout, so the check after an edit decides the score of the edit. A
further rule is one more entry of RULES.
"""

import asyncio
import importlib.util
import inspect
import posixpath
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pipeline.command_effects import (
    Verdict,
    changes,
    edits,
    effects_of,
    failed,
    is_informed,
    last_verdict,
    verdict_of_tests,
    verdicts_of,
)
from pipeline.errors import RequestError, RolloutError
from pipeline.judge import JudgedStep, JudgeRequest
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Action, Turn
from workers.judge.stage import FinishedRollout, Scored

StepFunction: TypeAlias = Callable[[str, Sequence[Turn], int], object]
"""Returns a number in -1..1, or None. The result is checked, because users write these functions."""

TRACEBACK_CHARS = 2000
_SENTINELS = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")


class FunctionFailed(RolloutError):
    """The function did not score a step."""


@dataclass(frozen=True, slots=True)
class FunctionJudge:
    """Scores steps with the function in `functions` that a request names. `kind` is the word for such a function in messages."""

    functions: Mapping[str, StepFunction]
    kind: str
    fix: str  # what to do about a name that is not known

    async def score(
        self,
        claim: Claim[JudgeRequest],
        rollout: FinishedRollout,
        turns: Sequence[int],
        status: EpisodeStatus,
    ) -> Scored:
        """Scores the steps. Raises RequestError for an unknown function, FunctionFailed."""
        judge = claim.request.judge
        function = self.functions.get(judge.name)
        if function is None:
            known = ", ".join(sorted(self.functions)) or "none"
            raise RequestError(f"judge.name: no {self.kind} {judge.name!r}; known here: {known}; {self.fix}")
        steps: list[JudgedStep] = []
        for turn in turns:
            score = await self._called(judge.name, function, rollout, turn, judge.vote_s)
            unscored = "abstained" if score is None else None
            steps.append(JudgedStep(turn=turn, score=score, unscored=unscored))
            status.turn += 1
        return Scored(steps, f"{self.kind} {judge.name}")

    async def _called(
        self, name: str, function: StepFunction, rollout: FinishedRollout, turn: int, limit_s: float
    ) -> float | None:
        where = f"{self.kind} {name}, turn {turn}"
        numbers = rollout.conversation(turn)
        turns = tuple(rollout.turns[number] for number in numbers)
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                value = await asyncio.to_thread(function, rollout.issue, turns, numbers.index(turn))
        except Exception as error:
            if deadline.expired():
                raise FunctionFailed(f"{where}: no result after {limit_s:g} s") from error
            told = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
            raise FunctionFailed(f"{where}: {type(error).__name__}: {error}\n{told}") from error
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
            raise FunctionFailed(f"{where}: returned {value!r}; return a number in -1..1, or None to abstain")
        return float(value)


def load_functions(specs: Sequence[str]) -> dict[str, StepFunction]:
    """The functions of `path/to/file.py:name` specs, by name. Raises ValueError naming the spec and the fix."""
    functions: dict[str, StepFunction] = {}
    modules: dict[Path, ModuleType] = {}
    for spec in specs:
        path_text, colon, name = spec.rpartition(":")
        path = Path(path_text)
        if not colon or path.suffix != ".py" or not name.isidentifier():
            raise ValueError(f"{spec!r}: write it as path/to/file.py:name")
        if name in functions:
            raise ValueError(f"{spec!r}: {name} is given twice; requests name a function without its file")
        if path not in modules:
            modules[path] = _module(path)
        functions[name] = _function(spec, getattr(modules[path], name, None))
    return functions


def _module(path: Path) -> ModuleType:
    described = importlib.util.spec_from_file_location(f"judge_functions_{path.stem}", path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    try:
        described.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}; it has to be importable") from error
    return module


def _function(spec: str, found: object) -> StepFunction:
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f"{spec!r}: no function of that name, or an async one; define it with `def`")
    try:
        inspect.signature(found).bind("", (), 0)
    except TypeError as error:
        raise ValueError(f"{spec!r}: {error}; it takes (issue, turns, index)") from error
    return found


def judge_by_evidence(issue: str, turns: Sequence[Turn], index: int) -> float | None:
    """The score of the first of these conditions that holds:

    -1  there is no command, one failed, or all of them were run before and nothing has changed since
    -1  an edit of a file that the policy was never shown, or whose check, run before the next change, failed;  +1  any other edit
    -1  a submission of changes that no check passed after the last of them;  +1  after a check that passed
    +1 tests were run, whatever their result, because the result is now known; +1 a file was shown that is edited later

    Otherwise it abstains.
    """
    actions = turns[index].actions
    if not actions:
        return -1.0
    if any(_submits(action) for action in actions):
        return 1.0 if last_verdict(turns[:index]) == "passed" else -1.0
    if any(failed(action) and verdict_of_tests(action) is None for action in actions) or _repeats(
        turns, index
    ):
        return -1.0
    if edits(turns[index]):
        return 1.0 if is_informed(turns, index) and _next_verdict(turns[index:]) != "failed" else -1.0
    if verdicts_of(turns[index]) or _is_of_use(turns, index):
        return 1.0
    return None


def _submits(action: Action) -> bool:
    return action.observation is None and any(sentinel in action.command for sentinel in _SENTINELS)


def _next_verdict(turns: Sequence[Turn]) -> Verdict | None:
    """The verdict of the first turn's checks and of later checks before the next change."""
    for number, turn in enumerate(turns):
        if number and changes(turn):
            return None
        if verdicts := verdicts_of(turn):
            return verdicts[-1]
    return None


def _repeats(turns: Sequence[Turn], index: int) -> bool:
    """Whether the same commands were run before, and nothing has changed since. An edit that is repeated at once changes nothing."""
    commands = [action.command for action in turns[index].actions]
    for turn in reversed(turns[:index]):
        if [action.command for action in turn.actions] == commands:
            return True
        if changes(turn):
            return False
    return False


def _is_of_use(turns: Sequence[Turn], index: int) -> bool:
    """Whether the turn shows a file that a later turn edits."""
    shown = {posixpath.basename(path) for effect in effects_of(turns[index]) for path in effect.shows}
    later = (path for turn in turns[index + 1 :] for effect in effects_of(turn) for path in effect.edits)
    return any(posixpath.basename(path) in shown for path in later)


def judge_by_commands(issue: str, turns: Sequence[Turn], index: int) -> float | None:
    """-1: a command failed or was stopped at its time limit. +1: tests were run and passed. Otherwise it abstains.

    A reply without a command, which is scored only on request, is -1.
    """
    actions = turns[index].actions
    if not actions or any(failed(action) for action in actions):
        return -1.0
    return 1.0 if any(verdict_of_tests(action) == "passed" for action in actions) else None


RULES: Mapping[str, StepFunction] = {"commands": judge_by_commands, "evidence": judge_by_evidence}
