"""Built-in rules: judges that need no model. Each is a function of issue, turns and index, as described in `functions.py`.

Both rules read commands and their outputs (`pipeline/command_effects.py`): whether a command failed, and whether it ran tests that passed.
They run nothing and know nothing about the task. "evidence" scores whether a step is based on what the policy has seen, and whether the
policy checks its work; it reads the whole rollout, so the check after an edit decides the score of the edit.

A rule of your own is one more entry of RULES, or a function in SWERVE_JUDGE_FUNCTIONS.
"""

import posixpath
from collections.abc import Mapping, Sequence

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
from pipeline.trajectory import Action, Turn
from workers.judge.functions import StepFunction

_SENTINELS = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")


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
