"""Every turn of a rollout gets one entry under its own number, whatever the method."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import keys
from pipeline.judge import Judge, Judgement, JudgeRequest
from pipeline.request import Claim, EpisodeStatus
from pipeline.task import ExitCode
from pipeline.trajectory import Exhausted, ProgramEnd, Turn
from tests.pipeline import samples
from tests.workers.judge.rollouts import TURNS, judge_claim, published, trajectory, tree, turn
from workers.judge.functions import RULES, FunctionJudge, StepFunction, load_functions
from workers.judge.stage import FinishedRollout, StoredRollouts, finished_rollout, judge_rollout

COMMANDS = Judge(method="rule", name="commands")


class One:
    """A place with one rollout."""

    def __init__(self, rollout: FinishedRollout) -> None:
        self._rollout = rollout

    async def read(self, rollout_id: str) -> FinishedRollout:
        return self._rollout


async def judged(
    claim: Claim[JudgeRequest], rollout: FinishedRollout, functions: dict[str, StepFunction] | None = None
) -> Judgement:
    methods = {
        "rule": FunctionJudge(RULES, "rule", fix="choose one of them"),
        "function": FunctionJudge(functions or {}, "function", fix="add it"),
    }
    return await judge_rollout(claim, EpisodeStatus(), rollouts=One(rollout), methods=methods)


def scores(judgement: Judgement) -> list[tuple[int, float | None, str | None]]:
    return [(step.turn, step.score, step.unscored) for step in judgement.steps]


async def test_a_turn_without_a_command_shifts_no_score() -> None:
    request = samples.request()
    judgement = await judged(judge_claim(request.id, COMMANDS), finished_rollout(trajectory(request)))
    assert judgement.failed is None
    assert scores(judgement) == [
        (0, None, "abstained"),
        (1, None, "format_error"),
        (2, -1.0, None),
        (3, 1.0, None),
        (4, None, "submission"),
    ]
    assert judgement.scores == {2: -1.0, 3: 1.0}
    assert judgement.judge == "rule commands"


async def test_format_errors_and_the_submission_are_scored_where_the_request_wants_it() -> None:
    request = samples.request()
    judge = Judge(method="rule", name="commands", score_format_errors=True, score_submission=True)
    judgement = await judged(judge_claim(request.id, judge), finished_rollout(trajectory(request)))
    assert scores(judgement)[1] == (1, -1.0, None)
    assert scores(judgement)[4] == (4, None, "abstained")


async def test_only_an_episode_that_submitted_ends_with_a_submission() -> None:
    request = samples.request()
    ended = trajectory(request, TURNS[:4], outcome=Exhausted(limit="turns", patch=b""))
    judgement = await judged(judge_claim(request.id, COMMANDS), finished_rollout(ended))
    assert scores(judgement)[3] == (3, 1.0, None)


async def test_a_rollout_with_nothing_to_score_is_judged_without_asking_the_judge() -> None:
    request = samples.request()
    rollout = finished_rollout(trajectory(request, [turn(text="hm"), TURNS[-1]]))
    judgement = await judged(judge_claim(request.id, Judge(method="function", name="f")), rollout)
    assert judgement.failed is None
    assert scores(judgement) == [(0, None, "format_error"), (1, None, "submission")]


async def test_a_judge_knows_neither_the_reward_nor_hidden_tests() -> None:
    task = replace(samples.TASK, verdict=ExitCode(eval_script="run HIDDEN"), calibration=b"HIDDEN")
    request = samples.request(task=task)
    seen: list[object] = []

    def curious(issue: str, turns: Sequence[object], index: int) -> float:
        seen.extend([issue, *turns])
        return 0.5

    verdict = samples.reward(log_tail="HIDDEN", decided_by="HIDDEN")
    rollout = finished_rollout(trajectory(request, TURNS, reward=verdict))
    judge = Judge(method="function", name="curious")
    judgement = await judged(judge_claim(request.id, judge), rollout, {"curious": curious})
    assert judgement.scores == {0: 0.5, 2: 0.5, 3: 0.5}
    assert "HIDDEN" not in repr(rollout) + repr(seen)


BROKEN: dict[str, tuple[StepFunction, str]] = {
    "raises": (lambda issue, turns, index: 1 / 0, "ZeroDivisionError: division by zero"),
    "returns another thing": (
        lambda issue, turns, index: "good",
        "returned 'good'; return a number in -1..1",
    ),
    "leaves the range": (lambda issue, turns, index: 3.0, "returned 3.0"),
}


@pytest.mark.parametrize(("function", "reason"), BROKEN.values(), ids=list(BROKEN))
async def test_a_function_that_breaks_fails_the_judgement_and_scores_nothing(
    function: StepFunction, reason: str
) -> None:
    request = samples.request()
    judge = Judge(method="function", name="f")
    rollout = finished_rollout(trajectory(request))
    judgement = await judged(judge_claim(request.id, judge), rollout, {"f": function})
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("worker", True)
    assert f"function f, turn 0: {reason}" in judgement.failed.message
    assert judgement.steps == ()
    assert judgement.scores == {}


async def test_a_name_that_is_not_known_here_is_the_requests_fault() -> None:
    request = samples.request()
    rollout = finished_rollout(trajectory(request))
    judgement = await judged(judge_claim(request.id, Judge(method="rule", name="taste")), rollout)
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("request", False)
    assert judgement.failed.message == (
        "judge.name: no rule 'taste'; known here: commands, evidence; choose one of them"
    )


async def test_a_method_that_is_not_known_here_is_the_requests_fault() -> None:
    request = samples.request()
    rollout = finished_rollout(trajectory(request))
    judgement = await judged(judge_claim(request.id, Judge(method="votes")), rollout)
    assert judgement.failed is not None
    assert judgement.failed.message == "this judge has no method 'votes'; it has rule, function"


EVIDENCE = Judge(method="rule", name="evidence")
PROGRAM = ProgramEnd(name="agent", version="1", exit_code=0)


async def test_turns_of_an_agent_program_are_judged_in_their_own_conversation_and_scores_keep_their_numbers() -> (
    None
):
    request = samples.request()
    rollout = finished_rollout(trajectory(request, tree(request.task.problem), program=PROGRAM))
    judgement = await judged(judge_claim(request.id, EVIDENCE), rollout)
    assert scores(judgement) == [
        (0, None, "format_error"),  # a title
        (1, 1.0, None),  # shows what turn 3 edits
        (2, -1.0, None),  # the subagent's first fails
        (3, 1.0, None),  # knows the file by turn 1, and turn 6 checks it
        (4, -1.0, None),  # in the subagent's conversation nobody has seen the file
        (5, -1.0, None),  # in its branch nothing has changed since turn 1
        (6, 1.0, None),
    ]


async def test_a_function_gets_the_conversation_of_a_turn_and_its_place_there() -> None:
    request, asked = samples.request(), list[tuple[tuple[int, ...], int]]()
    turns = tree(request.task.problem)

    def noting(issue: str, given: Sequence[Turn], index: int) -> float:
        asked.append((tuple(next(n for n, one in enumerate(turns) if one is turn) for turn in given), index))
        return 0.5

    judge = Judge(method="function", name="noting", score_format_errors=True)
    rollout = finished_rollout(trajectory(request, turns, program=PROGRAM))
    judgement = await judged(judge_claim(request.id, judge), rollout, {"noting": noting})
    whole = (1, 3, 6)
    assert asked == [
        ((0,), 0),
        (whole, 0),
        ((2, 4), 0),
        (whole, 1),
        ((2, 4), 1),
        ((1, 5), 1),
        (whole, 2),
    ]
    assert judgement.scores == dict.fromkeys(range(7), 0.5)


async def test_the_last_turn_of_an_agent_program_is_no_submission_because_its_end_is() -> None:
    request = samples.request()
    turns = tree(request.task.problem)
    for program, reason in ((PROGRAM, None), (None, "submission")):
        rollout = finished_rollout(trajectory(request, turns, program=program))
        judgement = await judged(judge_claim(request.id, EVIDENCE), rollout)
        assert judgement.steps[-1].unscored == reason


async def test_turns_that_follow_a_later_one_are_the_rollouts_fault(pool: ArqRedis) -> None:
    made = await published(pool, [replace(TURNS[0], after=5)])
    claim = judge_claim(made.claim.request.id, COMMANDS)
    judgement = await judge_rollout(claim, EpisodeStatus(), rollouts=StoredRollouts(pool), methods={})
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("request", False)
    assert "turn 0 follows turn 5" in judgement.failed.message


async def test_a_rollout_is_read_from_where_its_worker_left_it(pool: ArqRedis) -> None:
    made = await published(pool)
    rollout = await StoredRollouts(pool).read(made.claim.request.id)
    assert rollout == finished_rollout(made)
    assert rollout.issue == samples.TASK.problem


@pytest.mark.parametrize("content", [None, b"no body"])
async def test_a_rollout_that_is_gone_or_unreadable_is_not_tried_again(
    pool: ArqRedis, content: bytes | None
) -> None:
    made = await published(pool)
    rollout_id = made.claim.request.id
    await pool.delete(keys.body(rollout_id))
    if content is not None:
        await pool.set(keys.body(rollout_id), content)
    claim = judge_claim(rollout_id, COMMANDS)
    judgement = await judge_rollout(claim, EpisodeStatus(), rollouts=StoredRollouts(pool), methods={})
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("request", False)
    assert rollout_id in judgement.failed.message


def test_functions_are_loaded_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def good(issue, turns, index):\n    return 1.0\n\ndef bad(issue):\n    return 0.0\n")
    functions = load_functions([f"{file}:good"])
    assert functions["good"]("", (), 0) == 1.0
    for spec, fix in {
        str(file): "path/to/file.py:name",
        f"{file}:absent": "no function of that name",
        f"{file}:bad": "it takes \\(issue, turns, index\\)",
        f"{tmp_path}/none.py:good": "has to be importable",
    }.items():
        with pytest.raises(ValueError, match=fix):
            load_functions([spec])
    with pytest.raises(ValueError, match="given twice"):
        load_functions([f"{file}:good", f"{file}:good"])
