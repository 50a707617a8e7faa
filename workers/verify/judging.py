"""From what the grader said of a task's states to whether the task may be trusted, and if not, why."""

import re
from collections.abc import Iterator, Sequence

from pipeline.task import ExitCode, R2eExpected, SwebenchLog, Task, TestsJson
from pipeline.taskfile import EXPECTED, Found, State, Verification, fingerprint
from workers.verify.states import Tries, Try

NAMED_AT_MOST = 3  # tests in a sentence
_MEANING: dict[State, str] = {
    "empty": "it is solved before anybody has done anything",
    "useless": "its tests pass without the fix",
    "tests_only": "its tests pass without the fix",
    "gold": "the known solution does not solve it",
}
_RUNNER = re.compile(
    r"^(?:=+ )?(?:test session starts|no tests ran in|\d+ (?:passed|failed|skipped|deselected))|^Ran \d+ tests? in",
    re.MULTILINE,
)
_PASSED = re.compile(r"\b[1-9]\d* passed\b|^Ran [1-9]\d* tests? in", re.MULTILINE)


def verification(task: Task, tries: Tries, *, seconds: float, verified_at: float) -> Verification:
    """The account of one task; `ok` if every state is what it should be in every try."""
    faults = _grouped({state: _fault(state, made) for state, made in tries.items()})
    if not faults:
        faults = [fault for one in tries["gold"] for fault in _uncollected(task, one)][:1]
    return Verification(
        task=task.id,
        fingerprint=fingerprint(task),
        states={state: _worst(state, made) for state, made in tries.items()},
        ok=not faults,
        reason="; ".join(faults),
        verdict_kind=kind_of(task),
        seconds=round(seconds, 2),
        verified_at=verified_at,
    )


def kind_of(task: Task) -> str:
    """The verdict's name, as in task files."""
    return str(task.verdict.__struct_config__.tag)


def evidence(tries: Tries) -> str:
    """The log's end of the first state that is wrong, for a person to look at; "" without one."""
    wrong = [
        one
        for state, made in tries.items()
        for one in made
        if one.found not in (EXPECTED[state], "infrastructure")
    ]
    return wrong[0].reward.log_tail if wrong and wrong[0].reward else ""


def _worst(state: State, made: Sequence[Try]) -> Found:
    """A wrong verdict, else a try without one, else what was expected."""
    for one in made:
        if one.found not in (EXPECTED[state], "infrastructure"):
            return one.found
    return "infrastructure" if any(one.found == "infrastructure" for one in made) else EXPECTED[state]


def _fault(state: State, made: Sequence[Try]) -> str:
    """What is wrong with a state, "" if nothing is."""
    verdicts = [one.found for one in made if one.found != "infrastructure"]
    if len(set(verdicts)) > 1:
        return f"flaky, {' '.join(map(str, verdicts))} in {len(made)} tries"
    worst = next((one for one in made if one.found == _worst(state, made)), made[0])
    if worst.found == "infrastructure":
        return f"infrastructure: {worst.why}"
    if worst.found != EXPECTED[state]:
        return f"{worst.found} instead of {EXPECTED[state]} ({worst.why}): {_MEANING[state]}"
    return ""


def _grouped(faults: dict[State, str]) -> list[str]:
    """One sentence for states that suffer from the same."""
    texts = dict.fromkeys(text for text in faults.values() if text)
    return [f"{', '.join(s for s, fault in faults.items() if fault == text)}: {text}" for text in texts]


def _uncollected(task: Task, gold: Try) -> Iterator[str]:
    """Whether the gold run's log shows the tests that the verdict is about."""
    if gold.reward is None:
        return
    names = _expected_tests(task)
    missing = [name for name in names if not gold.reward.tests.get(name)]
    if missing:
        more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
        yield (
            f"gold: {len(missing)} of {len(names)} expected tests do not appear in the log: "
            f"{', '.join(missing[:NAMED_AT_MOST])}{more}"
        )
    log = gold.reward.log_tail
    if isinstance(task.verdict, ExitCode) and _RUNNER.search(log) and not _PASSED.search(log):
        yield "gold: the eval script ended well, but its test runner passed no test"


def _expected_tests(task: Task) -> list[str]:
    match task.verdict:
        case ExitCode():
            return []
        case SwebenchLog(eval_type="fail_only"):  # a log of failures does not mention what passes
            return []
        case SwebenchLog(fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass):
            return [*fail_to_pass, *pass_to_pass]
        case R2eExpected(expected=expected):
            return list(expected)
        case TestsJson(tests=tests):
            return list(tests)
