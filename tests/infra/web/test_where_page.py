"""Where the time of a run went, on its page."""

from pathlib import Path

import pytest

from infra.web import where_page
from tests.infra.web.example_run import Serve, append, finished, read, step, store
from tests.pipeline import samples

RUN = f"/api/runs/{samples.RUN}"


async def test_the_page_has_the_accounts_and_the_advice_of_the_command(serve: Serve, run_dir: Path) -> None:
    spent = {"wall_s": 100.0, "wait_s": 70.0, "forward_s": 20.0, "checkpoint_s": 10.0}
    append(run_dir, "steps", {**step(2, []), **spent})
    shown = await read(await serve(run_dir), f"{RUN}/where")
    assert shown["trainer"]["parts_s"]["waiting for groups"] == 70.0
    assert shown["trainer"]["wall_s"] == sum(shown["trainer"]["parts_s"].values())
    gains = {one["setting"]: one["gain"] for one in shown["advice"]}
    assert gains["checkpoint.every_steps"] == 0.1
    assert shown["unreadable"] == ""


async def test_a_journal_that_has_not_changed_is_not_read_again(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    first = await read(client, f"{RUN}/where")
    assert await read(client, f"{RUN}/where") == first


async def test_what_engines_did_is_read_from_few_rollouts_and_said_to_be_left_out_of_many(
    serve: Serve, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = finished("timed", reward=1.0).claim
    turns = (samples.turn(engine="http://one", asked_at=1000.0, generate_s=30.0),)
    store(run_dir, samples.trajectory(claim, turns=turns))
    append(run_dir, "steps", {**step(2, []), "wall_s": 1000.0, "at": 1500.0})
    client = await serve(run_dir)
    found = (await read(client, f"{RUN}/where"))["engines"]
    assert (found["parts_s"]["generating for training"], found["unknown"]) == (30.0, [])
    monkeypatch.setattr(where_page, "MAX_ROLLOUT_BYTES", 10)
    append(run_dir, "steps", {**step(3, []), "wall_s": 1000.0, "at": 2500.0})
    monkeypatch.setattr(where_page, "KEPT_S", 0.0)
    found = (await read(await serve(run_dir), f"{RUN}/where"))["engines"]
    assert "`swerve where`" in found["unknown"][0]


async def test_an_answer_that_is_kept_says_that_the_journal_has_changed_since(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    assert not (await read(client, f"{RUN}/where"))["is_outdated"]
    append(run_dir, "steps", step(2, []))
    assert (await read(client, f"{RUN}/where"))["is_outdated"], "so the page asks again"
