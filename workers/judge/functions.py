"""Judges that are a Python function: the built-in rules, and functions that the operator of a judge host provides.

    def my_judge(issue: str, turns: Sequence[Turn], index: int) -> float | None

gets the issue's text and the turns of one conversation of the rollout (`pipeline.trajectory.Turn`), which are all turns unless an agent
program played. It scores turn `index` of these in -1..1, or abstains with None. For `credit.method = "potential"` it must not read later
turns.

A function that raises, returns something else, or takes longer than the judge's `vote_s` for one step fails the request, which is tried
again within its budget and then dead-lettered with the traceback: an exception is neither a 0 nor an abstention. A function runs in a
thread of the judge's process, without isolation, because the operator of the host chose it: a request can only name functions that are
listed in SWERVE_JUDGE_FUNCTIONS.
"""

import asyncio
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pipeline.errors import RequestError, RolloutError
from pipeline.judge import JudgedStep, JudgeRequest
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Turn
from workers.judge.stage import FinishedRollout, Scored

StepFunction: TypeAlias = Callable[[str, Sequence[Turn], int], object]
"""Returns a number in -1..1, or None. The result is checked, because users write these functions."""

TRACEBACK_CHARS = 2000


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
