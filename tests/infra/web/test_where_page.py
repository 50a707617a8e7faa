"""Where the time of a run went, on its page."""

from pathlib import Path

from tests.infra.web.example_run import Serve, append, read, step
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
