"""Decides whether a task can be trusted, and says why not: from the verdicts on its states, and from what its image holds of the answer.

Files of the image that contain the answer and can be removed are recorded with the verification, and removed from every agent's container.
Other leaks make the task unusable: code that is installed may be needed, and an agent without it would work in another environment than the
grader.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.request import Limits
from pipeline.task import Calibration, ExitCode, R2eExpected, SwebenchLog, Task, TestsJson, pack
from pipeline.taskfile import EXPECTED, Found, Gold, State, Verification, fingerprint
from pipeline.trajectory import Reward
from workers.leaks.answers import search_image
from workers.leaks.search import EVAL_SCRIPT, FoundLeak, SearchReport
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import Broken, tried, unqueued_claim
from workers.verify.states import Probed, Tries, Try

NAMED_AT_MOST = 3  # number of tests, or of leaks, in a sentence
_MEANING: dict[State, str] = {
    "empty": "it is solved before anybody has done anything",
    "useless": "its tests pass without the fix",
    "tests_only": "its tests pass without the fix",
    "gold": "the known solution does not solve it",
    "agent": "an agent that makes the known fix and submits it gets no reward",
}
_RUNNER = re.compile(
    r"^(?:=+ )?(?:test session starts|no tests ran in|\d+ (?:passed|failed|skipped|deselected))|^Ran \d+ tests? in",
    re.MULTILINE,
)
_PASSED = re.compile(r"\b[1-9]\d* passed\b|^Ran [1-9]\d* tests? in", re.MULTILINE)

MOST_PATHS = 200  # number of paths that a request carries
_FIX = "leave it out in the Dockerfile, or install what belongs to base_commit"


def verification(task: Task, probed: Probed, *, seconds: float, verified_at: float) -> Verification:
    """The result for one task; `ok` if every state has its expected verdict in every try and nothing else is wrong."""
    tries = probed.tries
    named: dict[State, str] = {state: _fault(task, state, made) for state, made in tries.items()}
    if named["gold"]:
        named["agent"] = ""  # what is wrong with the known fix itself is said once
    faults = _grouped(named)
    if not faults:
        faults = [fault for one in tries["gold"] for fault in _uncollected(task, one)][:1]
    if probed.base.fault:
        faults.insert(0, probed.base.fault)
    calibration = probed.calibration or Calibration()
    controlled = {name for one in calibration.contradictions for name in one.fails}
    return Verification(
        task=task.id,
        fingerprint=fingerprint(task),
        states={state: _worst(state, made) for state, made in tries.items()},
        ok=not faults,
        reason="; ".join(faults),
        verdict_kind=kind_of(task),
        seconds=round(seconds, 2),
        agent_s=round(probed.agent_s, 2),
        verified_at=verified_at,
        warning=probed.base.warning,
        calibration=pack(calibration) if probed.calibration else b"",
        num_tests=len(calibration.passing),
        num_controlled=len(controlled),
        num_needing_fix=len(calibration.needing_fix),
        num_uncontrolled=len(calibration.uncontrolled),
        control=calibration.best_control,
        in_fix=calibration.in_fix,
        from_package=calibration.from_package,
    )


def kind_of(task: Task) -> str:
    """The verdict's name, as in task files."""
    return str(task.verdict.__struct_config__.tag)


def evidence(tries: Tries) -> str:
    """The end of the log of the first state with a wrong verdict; "" if there is none."""
    wrong = [
        one
        for state, made in tries.items()
        for one in made
        if one.found not in (EXPECTED[state], "infrastructure")
    ]
    return wrong[0].reward.log_tail if wrong and wrong[0].reward else ""


def _worst(state: State, made: Sequence[Try]) -> Found:
    """A wrong verdict if there is one, otherwise an infrastructure failure, otherwise the expected verdict."""
    for one in made:
        if one.found not in (EXPECTED[state], "infrastructure"):
            return one.found
    return "infrastructure" if any(one.found == "infrastructure" for one in made) else EXPECTED[state]


def _fault(task: Task, state: State, made: Sequence[Try]) -> str:
    """The fault of a state; "" if it has none."""
    verdicts = [one.found for one in made if one.found != "infrastructure"]
    if len(set(verdicts)) > 1:
        return f"flaky, {' '.join(map(str, verdicts))} in {len(made)} tries"
    worst = next((one for one in made if one.found == _worst(state, made)), made[0])
    if worst.found == "infrastructure":
        return f"infrastructure: {worst.why}"
    if worst.found != EXPECTED[state]:
        fault = f"{worst.found} instead of {EXPECTED[state]} ({worst.why}): {_MEANING[state]}"
        wrong = wrong_tests(task, worst.reward) if state == "gold" and worst.reward else []
        return f"{fault}. Tests that did not come out as expected: {_few(wrong)}" if wrong else fault
    return ""


def wrong_tests(task: Task, reward: Reward) -> list[str]:
    """Each test that the verdict expects, or that the witness saw, and that had another outcome, with that outcome.

    It is empty if no test was seen, because the tests are then not at fault.
    """
    outcomes = {name: outcome for name, outcome in reward.tests.items() if outcome}
    if not outcomes:
        return []
    accepted = _accepted(task)
    return [
        f"{name} ({outcomes.get(name, 'not in the log').lower()})"
        for name in reward.tests
        if outcomes.get(name, "") not in accepted(name)
    ]


def _accepted(task: Task) -> Callable[[str], Sequence[str]]:
    """The outcomes of a test, by its name, that the verdict accepts; "" means that the log does not mention it."""
    match task.verdict:
        case ExitCode():
            return lambda name: ("PASSED", "XFAIL", "XPASS", "SKIPPED")
        case SwebenchLog(eval_type=eval_type, pass_to_pass=pass_to_pass):
            silent = ("",) if eval_type == "fail_only" else ()
            kept = {*pass_to_pass}
            return lambda name: ("PASSED", "XFAIL", *(("SKIPPED",) if name in kept else ()), *silent)
        case R2eExpected(expected=expected):
            return lambda name: (expected[name],)
        case TestsJson():
            return lambda name: ("PASSED",)


def _grouped(faults: dict[State, str]) -> list[str]:
    """One sentence for all states with the same fault."""
    texts = dict.fromkeys(text for text in faults.values() if text)
    return [f"{', '.join(s for s, fault in faults.items() if fault == text)}: {text}" for text in texts]


def _uncollected(task: Task, gold: Try) -> Iterator[str]:
    """Problems with the tests of the verdict in the gold run's log, if the log does not show them."""
    if gold.reward is None:
        return
    names = _expected_tests(task)
    missing = [name for name in names if not gold.reward.tests.get(name)]
    if missing:
        yield (
            f"gold: {len(missing)} of {len(names)} expected tests do not appear in the log: {_few(missing)}"
        )
    log = gold.reward.log_tail
    if isinstance(task.verdict, ExitCode) and _RUNNER.search(log) and not _PASSED.search(log):
        yield "gold: the eval script ended well, but its test runner passed no test"


def _expected_tests(task: Task) -> list[str]:
    match task.verdict:
        case ExitCode():
            return []
        case SwebenchLog(eval_type="fail_only"):  # a log of failures does not mention tests that pass
            return []
        case SwebenchLog(fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass):
            return [*fail_to_pass, *pass_to_pass]
        case R2eExpected(expected=expected):
            return list(expected)
        case TestsJson(tests=tests):
            return list(tests)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


@dataclass(frozen=True, slots=True)
class ImageLeaks:
    """Searches images as agents would get them."""

    sandboxes: Sandboxes
    limits: Limits
    image_fix: str  # what to do about an image that is not on this host

    async def looked_for(self, done: Verification, task: Task, gold: Gold) -> Verification:
        """`done`, with the leaks of the answer in its image."""
        first = await self._search(replace(task, leaking_paths=()), gold)
        if isinstance(first, Broken):
            return _refused(done, first.why)
        kept = [one for one in _answers(first) if not one.paths]
        if kept:
            whys = "; ".join(dict.fromkeys(one.why for one in kept))
            return _refused(
                done, f"the image holds the answer: {_named(kept)}, not removed because {whys}: {_FIX}"
            )
        paths = tuple(sorted({path for one in _answers(first) for path in one.paths}))
        if len(paths) > MOST_PATHS:
            return _refused(
                done, f"{len(paths)} files of the image hold the answer, such as {_few(paths)}: {_FIX}"
            )
        if paths:
            again = await self._search(replace(task, leaking_paths=paths), gold)
            if isinstance(again, Broken):
                return _refused(done, again.why)
            if left := _answers(again):
                return _refused(
                    done, f"the image holds the answer, and cannot be cleaned of it: {_named(left)}"
                )
            removed = f"agents' containers are without what holds the answer in the image: {_few(paths)}"
            done = replace(done, leaking_paths=paths, warning=_joined(done.warning, removed))
        if first.skipped:
            skipped = f"not searched for the answer: {_few(first.skipped)}"
            done = replace(done, warning=_joined(done.warning, skipped))
        return done

    async def _search(self, task: Task, gold: Gold) -> SearchReport | Broken:
        async def search() -> SearchReport:
            claim = unqueued_claim(task, command="verify", limits=self.limits)
            async with self.sandboxes.open(claim, role="agent") as sandbox:
                return await search_image(sandbox, replace(task, workdir=sandbox.workdir), gold)

        return await tried(search, task, image_fix=self.image_fix)


def _refused(done: Verification, why: str) -> Verification:
    return replace(done, ok=False, reason=f"leaks: {why}")


def _answers(report: SearchReport) -> list[FoundLeak]:
    """The leaks that contain the answer: a name alone does not."""
    return [one for one in report.found if one.kind != EVAL_SCRIPT]


def _named(found: Sequence[FoundLeak]) -> str:
    return _few([f"{one.where} ({one.kind})" for one in found])


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
