"""The tasks of a run: what they teach, what they cost, and whether their graders can be trusted."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.taskfile import FILE, TaskFacts, write_facts
from tests.infra.web.example_run import Serve, append, read
from tests.pipeline import samples

RUN = f"/api/runs/{samples.RUN}"


def episode(task: str, group: str, member: int, reward: float | None, **fields: Any) -> dict[str, Any]:
    told = {
        "task_id": task,
        "group_id": group,
        "member": member,
        "purpose": "train",
        "num_turns": 2,
        "at": 9.0,
    }
    told |= {"request_id": f"{task}-{group}-{member}", "sampled_tokens": 10, "outcome": "submitted"}
    return {**told, "reward": reward, "fate": "trained", **fields}


async def shown(serve: Serve, run_dir: Path) -> dict[str, dict[str, Any]]:
    """The training tasks by id."""
    found = await read(await serve(run_dir), f"{RUN}/tasks")
    return {task["task_id"]: task for task in found["tasks"]}


@pytest.mark.parametrize(
    ("groups", "lesson"),
    [
        ([[1.0, 0.0], [1.0, 1.0]], "teaches"),
        ([[1.0, 1.0], [1.0, 1.0]], "always_solved"),
        ([[0.0, 0.0], [0.0, None]], "never_solved"),
        ([[0.0, 0.0], [1.0, 1.0]], "same_in_groups"),
        ([[None, None]], "no_reward"),
    ],
)
async def test_a_task_teaches_if_the_rewards_of_a_group_differ(
    serve: Serve, run_dir: Path, groups: list[list[float | None]], lesson: str
) -> None:
    for number, rewards in enumerate(groups):
        append(run_dir, "episodes", *(episode("t", f"g{number}", n, one) for n, one in enumerate(rewards)))
    task = (await shown(serve, run_dir))["t"]
    num_teaching = 1 if lesson == "teaches" else 0
    assert (task["lesson"], task["groups"], task["groups_with_signal"]) == (lesson, len(groups), num_teaching)
    assert task["sampled_tokens"] == 10 * sum(map(len, groups))
    assert task["sampled_tokens_with_signal"] == 20 * num_teaching


async def test_what_the_run_saw_of_a_grader_is_counted(serve: Serve, run_dir: Path) -> None:
    append(
        run_dir,
        "episodes",
        episode("t", "g", 0, 1.0, patch="aa", control="confirmed"),
        episode("t", "g", 1, 0.0, patch="aa", control="refuted"),
        episode("t", "g", 2, 0.0, patch="bb"),
        episode("t", "g", 3, 0.0, patch="bb"),
        episode("t", "g", 4, 0.0, patch="cc"),
        episode("t", "g", 5, None, outcome="failed:grader"),
    )
    task = (await shown(serve, run_dir))["t"]
    assert task["controls"] == {"confirmed": 1, "refuted": 1}
    assert (task["patches_judged_differently"], task["patches_judged_again"]) == (1, 2)
    assert task["grader_failures"] == 1


async def test_a_task_has_what_its_verification_found(serve: Serve, run_dir: Path) -> None:
    facts = TaskFacts(task_id="t", verified="ok", num_tests=3, num_flaky=1, num_partial_fixes=6, weakness=0.5)
    write_facts(run_dir, [facts])
    append(run_dir, "episodes", episode("t", "g", 0, 1.0), episode("u", "h", 0, 1.0))
    tasks = await shown(serve, run_dir)
    assert tasks["t"]["verification"]["weakness"] == 0.5
    assert tasks["t"]["verification"]["num_flaky"] == 1
    assert tasks["u"]["verification"] is None
    (run_dir / FILE).write_text("{broken\n")
    assert (await shown(serve, run_dir))["t"]["verification"] is None, "the rest of the page goes on"
