"""Finished rollouts to judge, and their requests."""

import time
from collections.abc import Sequence
from typing import Any

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue, stream
from pipeline.chat import ChatMessage
from pipeline.judge import Judge, JudgeRequest, judge_request_id
from pipeline.kinds import JUDGE
from pipeline.request import Budget, Claim, Retries, RolloutRequest
from pipeline.trajectory import Action, Observation, Submitted, Trajectory, Turn
from tests.pipeline import samples


def ran(command: str, output: str = "", *, exit_code: int | None = 0) -> Action:
    seen = Observation(exit_code=exit_code, output=output, dropped_chars=0, wall_s=0.1)
    return Action(command=command, observation=seen)


def turn(*actions: Action, text: str = "") -> Turn:
    said = "".join(f"\n\n```bash\n{action.command}\n```" for action in actions)
    return samples.turn(text=text or f"THOUGHT: next{said}", actions=actions)


SUBMISSION = turn(Action(command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"))
# A search, a reply without a command, a command that fails, tests that pass, the submission.
TURNS = (
    turn(ran("grep -rn add .", "calc.py:1:def add(a, b):\n")),
    turn(text="I think about it."),
    turn(ran("cat nowhere.py", "cat: nowhere.py: No such file or directory\n", exit_code=1)),
    turn(ran("python -m pytest -q", "..\n2 passed in 0.01s\n")),
    SUBMISSION,
)


def tree(issue: str) -> tuple[Turn, ...]:
    """Turns of an agent program: a title, its work, a subagent's beside it, and a branch that it left again."""
    work = turn(ran("cat calc.py", "def add(a, b):\n    return a\n"))
    mends = turn(ran("sed -i 's/return a/return a + b/' calc.py"))
    return (
        replace(turn(text="Fix add()"), after=-1, aside=True, told=(user("name this task"),)),
        replace(work, after=-1, told=(ChatMessage("system", "you work"), user(f"<task>\n{issue}\n</task>"))),
        replace(
            turn(ran("cat nowhere.py", "No such file\n", exit_code=1)), after=-1, told=(user("mend calc"),)
        ),
        replace(mends, after=1),
        replace(mends, after=2),
        replace(work, after=1),
        replace(turn(ran("python -m pytest -q", "..\n2 passed in 0.01s\n")), after=3),
    )


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def trajectory(request: RolloutRequest, turns: Sequence[Turn] = TURNS, **fields: Any) -> Trajectory:
    claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=time.time())
    given: dict[str, Any] = {"turns": tuple(turns), "outcome": Submitted(patch=b"a patch")}
    return samples.trajectory(claim, **(given | fields))


async def published(pool: ArqRedis, turns: Sequence[Turn] = TURNS, **fields: Any) -> Trajectory:
    """A rollout whose body is in Redis, as its worker left it."""
    request = samples.request()
    await queue.enqueue(pool, request)
    (claim,) = await queue.take(pool, "host/1", 1)
    assert isinstance(claim, Claim)
    made = samples.trajectory(
        claim, **({"turns": tuple(turns), "outcome": Submitted(patch=b"a patch")} | fields)
    )
    assert await stream.publish(pool, made) == "published"
    return made


def judge_request(rollout_id: str, judge: Judge, **fields: Any) -> JudgeRequest:
    given: dict[str, Any] = {
        "id": judge_request_id(rollout_id),
        "run_id": samples.RUN,
        "purpose": "train",
        "group_id": "g",
        "enqueued_at": time.time(),
        "rollout_id": rollout_id,
        "task": samples.TASK.id,
        "judge": judge,
        "budgets": Retries(infrastructure=Budget(tries=2, first_s=0.01)),
    }
    return JudgeRequest(**(given | fields))


def judge_claim(rollout_id: str, judge: Judge, **fields: Any) -> Claim[JudgeRequest]:
    request = judge_request(rollout_id, judge, **fields)
    return Claim(request=request, attempt=1, worker="host/1", claimed_at=time.time())


async def judging_enqueued(pool: ArqRedis, rollout_id: str, judge: Judge) -> JudgeRequest:
    request = judge_request(rollout_id, judge)
    await queue.enqueue(pool, request, JUDGE)
    return request
