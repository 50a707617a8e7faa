"""Built-in rules: judges that need no model. Each is a function of issue, turns and index, as `functions.py` has them.

A rule of your own is one more entry of RULES, or a function in SWERVE_JUDGE_FUNCTIONS.
"""

from collections.abc import Mapping, Sequence

from pipeline.trajectory import Turn
from workers.judge.command_results import failed, verdict_of_tests
from workers.judge.evidence import judge_by_evidence
from workers.judge.functions import StepFunction


def judge_by_commands(issue: str, turns: Sequence[Turn], index: int) -> float | None:
    """-1: a command failed or was stopped at its time limit. +1: tests were run and passed. Otherwise it abstains.

    A reply without a command, which is scored only on request, is -1.
    """
    actions = turns[index].actions
    if not actions or any(failed(action) for action in actions):
        return -1.0
    return 1.0 if any(verdict_of_tests(action) == "passed" for action in actions) else None


RULES: Mapping[str, StepFunction] = {"commands": judge_by_commands, "evidence": judge_by_evidence}
