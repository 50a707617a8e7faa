"""Directories of runs that the pages are tested with: every kind of row that they show, and texts that try to break out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pipeline.trajectory import Action, Trajectory
from tests.infra.web.example_run import append, finished, judging, settled, step, store, store_tokens
from tests.pipeline import samples

FINISHED, OTHER = "finished-run", "other-run"
NUM_STEPS, MEMBERS = 6, 4
MEGABYTE = "x" * 2**20
PARTS = {
    **{
        "wait_s": 30.0,
        "forward_s": 1.0,
        "backward_s": 2.0,
        "optimizer_s": 0.5,
        "audit_s": 0.2,
        "export_s": 0.3,
    },
    **{"engines_s": 0.4, "checkpoint_s": 1.1, "evaluation_s": 0.0, "other_s": 0.1},
}
TASKS = ("demo:calc-7", "demo:calc-8", "swe:django__django-11099")


def write_finished_run(directory: Path, run_id: str = FINISHED) -> None:
    """Six steps of a group each, with everything that can happen to a run in between; its trainer has ended."""
    begin_run(directory, run_id)
    for number in range(1, NUM_STEPS + 1):
        group = [*_group(run_id, number)]
        store(directory, *group)
        write_step(directory, number, group)
        append(directory, "episodes", *(settled(one, "trained") for one in group))
        append(
            directory,
            "publications",
            {"version": number, "step": number, "num_bytes": 2**20, "at": _at(number)},
        )
    store_tokens(directory, f"{run_id}-1-0", step=1)
    for name, rows in _incidents().items():
        append(directory, name, *rows)
    tiring = replace(
        _trajectory(run_id, "tiring", NUM_STEPS + 1, 0), turns=(samples.turn(text=MEGABYTE, actions=()),)
    )
    store(directory, tiring)
    append(directory, "episodes", settled(tiring, "zero_variance"))
    store(directory, _long(run_id))


def begin_run(directory: Path, run_id: str) -> None:
    (directory / "journal").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run_id": run_id, "started_at": 1000.0}))
    (directory / "recipe.toml").write_text(f"num_steps = {NUM_STEPS}\n")


def write_step(directory: Path, number: int, group: list[Trajectory]) -> None:
    """The row of a step that trained the group."""
    numbers = {
        "entropy": 0.4,
        "lag_mean": 0.5,
        "lag_max": 1,
        "logprob_gap_mean": 1e-4,
        "wall_s": sum(PARTS.values()),
        "gpu_use": [{"rank": 0, "num_samples": {"training": 4}, "busy": {"training": 3.0}}],
    }
    row = step(number, [one.claim.request.id for one in group])
    append(directory, "steps", row | numbers | PARTS | {"judging": judging(num_judged=MEMBERS, num_scored=6)})


def _group(run_id: str, number: int) -> Iterator[Trajectory]:
    for member in range(MEMBERS):
        yield _trajectory(run_id, f"{number}-{member}", number, member)


def _trajectory(run_id: str, name: str, number: int, member: int) -> Trajectory:
    task = replace(samples.TASK, id=TASKS[number % len(TASKS)])
    place: dict[str, Any] = {"group_id": f"{run_id}-g{number}", "member": member, "group_size": MEMBERS}
    played = finished(f"{run_id}-{name}", reward=float(member % 2), run_id=run_id, task=task, **place)
    if (number, member) != (NUM_STEPS, 2):
        return played
    return replace(played, turns=(replace(played.turns[0], actions=(_failing("make test"),)),))


def _failing(command: str) -> Action:
    failing = samples.action(command, "1 failed")
    assert failing.observation is not None
    return replace(failing, observation=replace(failing.observation, exit_code=1))


def _long(run_id: str) -> Trajectory:
    """A rollout of 120 turns that is not settled yet; the command of turn 71 failed."""
    failing = _failing("pytest -q")
    turns = [
        samples.turn(engine="http://one:30001", text=f"step {number}", actions=(failing,) if number == 71 else (), asked_at=1500.0 + number)
        for number in range(1, 121)
    ]
    return replace(_trajectory(run_id, "long", NUM_STEPS + 2, 0), turns=tuple(turns))


def _incidents() -> dict[str, list[dict[str, Any]]]:
    evaluation = {
        "tasks": "",
        "num_episodes": 32,
        "num_failed": 1,
        "success_low": 0.1,
        "success_high": 0.9,
        "at": _at(3),
    }
    return {
        "evaluations": [
            evaluation | {"name": "heldout_before", "version": 0, "step": 0, "greedy": False, "success": 0.2},
            evaluation | {"name": "heldout_after", "version": 6, "step": 6, "greedy": False, "success": 0.8},
        ],
        "deliveries": [
            {"version": 2, "step": 2, "engines": ["http://one"], "quarantined": ["http://two"], "at": _at(2)}
        ],
        "staleness": [
            {"step": 3, "before": 1, "ahead_versions": 2, "reason": "the gap is small", "at": _at(3)}
        ],
        "quarantines": [{"task_id": TASKS[2], "reason": "its reference fails", "at": _at(4)}],
        "alarms": [{"kind": "entropy", "text": "entropy fell below 0.1", "step": 5, "at": _at(5)}],
        "endings": [
            {"step": 6, "version": 6, "reason": "finished", "detail": "finished all 6 steps", "at": _at(6)}
        ],
    }


def _at(number: int) -> float:
    return 1001.0 + 1000 * number
