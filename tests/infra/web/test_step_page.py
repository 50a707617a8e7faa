"""The replies about one step: its rollouts, what waited for what, and what each rollout did to the weights."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.infra.web.example_run import Serve, append, finished, read, settled, step, store, store_tokens
from tests.pipeline import samples

RUN = f"/api/runs/{samples.RUN}"


@pytest.fixture
def second_step(run_dir: Path) -> Path:
    """Step 2 trained one member of a group of three; the second counts in the baseline, the third was withdrawn."""
    group = [
        finished(f"of-two-{member}", reward=float(member), group_id="g2", member=member) for member in range(2)
    ]
    store(run_dir, *group)
    times = {"began_at": 1950.0, "trained_at": 1960.0, "at": 1970.0, "wait_s": 20.0, "lag_max": 2}
    append(run_dir, "steps", {**step(2, ["of-two-0"]), "baseline_ids": ["of-two-1"], **times})
    withdrawn = {**settled(group[0], "withdrawn"), "request_id": "of-two-2", "member": 2, "reward": None}
    rows = (settled(one, fate) | {"worker": "other/1"} for one, fate in zip(group, ("trained", "overlong"), strict=True))
    append(run_dir, "episodes", *rows, withdrawn)
    return run_dir


async def test_a_step_has_all_rollouts_of_its_groups_and_what_each_was_for(
    serve: Serve, second_step: Path
) -> None:
    shown = await read(await serve(second_step), f"{RUN}/steps/2")
    roles = {row["request_id"]: row["role"] for row in shown["rollouts"]}
    assert roles == {"of-two-0": "trained", "of-two-1": "baseline", "of-two-2": "not trained"}
    assert (shown["previous"], shown["next"]) == (1, None)
    assert (shown["step"]["step"], shown["step"]["lag_max"]) == (2, 2)
    assert shown["reward"]["value"] == 0.5


async def test_a_step_says_what_waited_for_what(serve: Serve, second_step: Path) -> None:
    shown = await read(await serve(second_step), f"{RUN}/steps/2")
    assert shown["waits"] == {
        "queued_s": 100.0,
        "played_s": 400.0,
        "waited_s": 50.0,
        "learner_waited_s": 20.0,
        "last": "of-two-0",
        "last_before_step_s": 50.0,
    }
    assert (shown["begins_at"], shown["ends_at"]) == (1400.0, 1970.0)


async def test_a_step_that_is_not_there_is_said_with_those_that_are(serve: Serve, second_step: Path) -> None:
    client = await serve(second_step)
    for path in ("steps/7", "steps/7/effects"):
        async with client.get(f"{RUN}/{path}") as response:
            assert response.status == 404
            assert "has no step 7" in (await response.json())["error"]
    async with client.get(f"{RUN}/steps/last") as response:
        assert response.status == 400
        assert "'last' is not a whole number" in (await response.json())["error"]


async def test_the_effect_of_a_rollout_is_that_of_its_tokens(serve: Serve, run_dir: Path) -> None:
    """Of three tokens with the advantage 0.5 and the weights 1, 0.5 and 0.25 the second is masked."""
    store_tokens(run_dir, "solved", step=1)
    shown = await read(await serve(run_dir), f"{RUN}/steps/1/effects")
    (effect,) = shown["effects"].values()
    assert effect["num_tokens"] == 3
    assert effect["loss"] == pytest.approx(-(1.0 * 0.5 + 0.25 * 0.5) / 3)
    assert effect["advantage"] == pytest.approx(0.5)
    assert effect["masked_share"] == pytest.approx(1 / 3)
    assert 0 < effect["ratio_mean"] < effect["ratio_max"]


async def test_tokens_of_a_step_that_a_resume_undid_are_no_effect_of_this_one(
    serve: Serve, run_dir: Path
) -> None:
    store_tokens(run_dir, "solved", step=4)
    assert (await read(await serve(run_dir), f"{RUN}/steps/1/effects"))["effects"] == {}


async def test_tokens_that_are_not_those_of_the_rollout_are_left_out(serve: Serve, run_dir: Path) -> None:
    store_tokens(run_dir, "solved", step=1, num_tokens=2)
    assert (await read(await serve(run_dir), f"{RUN}/steps/1/effects"))["effects"] == {}


async def test_rollouts_are_found_by_the_commands_that_failed_in_them(serve: Serve, run_dir: Path) -> None:
    claim = finished("failing", reward=0.0).claim
    (failing,) = samples.turn().actions
    assert failing.observation is not None
    failing = replace(failing, observation=replace(failing.observation, exit_code=2))
    store(run_dir, samples.trajectory(claim, turns=(samples.turn(actions=(failing, failing)), samples.turn())))
    client = await serve(run_dir)
    [row] = (await read(client, f"{RUN}/rollouts", failed="1-"))["rows"]
    assert (row["request_id"], row["num_failed_commands"]) == ("failing", 2)


async def test_the_table_narrows_by_an_engine_that_sampled_some_turn(serve: Serve, run_dir: Path) -> None:
    claim = finished("moved", reward=1.0).claim
    turns = [samples.turn(engine=url) for url in ("http://one:3", "http://two:3", "http://one:3")]
    store(run_dir, samples.trajectory(claim, turns=tuple(turns)))
    client = await serve(run_dir)
    for engine in ("two", "http://one:*"):
        [row] = (await read(client, f"{RUN}/rollouts", engine=engine))["rows"]
        assert (row["request_id"], row["engines"]) == ("moved", ["http://one:3", "http://two:3"])
    assert (await read(client, f"{RUN}/rollouts", engine="one:3*"))["total"] == 0


async def test_the_table_narrows_by_step_and_worker_and_says_the_mean_of_what_matches(
    serve: Serve, second_step: Path
) -> None:
    client = await serve(second_step)
    found = await read(client, f"{RUN}/rollouts", step=2)
    assert [row["request_id"] for row in found["rows"]] == ["of-two-0"]
    assert (await read(client, f"{RUN}/rollouts", worker="other/*"))["total"] == 2
    assert (await read(client, f"{RUN}/rollouts", group="g2"))["reward"]["value"] == 0.5
    assert (await read(client, f"{RUN}/rollouts", fate="withdrawn"))["reward"] is None
