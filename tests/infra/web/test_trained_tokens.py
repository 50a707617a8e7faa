"""What a step did with the tokens of a rollout, as the page of the rollout is told."""

from pathlib import Path

import pytest

from tests.infra.web.example_run import Serve, read, store_tokens
from tests.pipeline import samples

RUN = f"/api/runs/{samples.RUN}"


async def test_each_token_has_what_the_step_did_with_it(serve: Serve, run_dir: Path) -> None:
    store_tokens(run_dir, "solved", step=1)
    shown = await read(await serve(run_dir), f"{RUN}/rollouts/solved")
    assert shown["trained"] == {"step": 1, "version": 0}
    assert shown["turns"][0]["trained"] == {
        "logprobs": pytest.approx([-0.5, -0.75, -3.0]),
        "advantages": [0.5, 0.5, 0.5],
        "weights": [1.0, 0.5, 0.25],
        "reasons": ["", "masked", ""],
    }


async def test_a_step_that_a_resume_took_back_is_not_shown(serve: Serve, run_dir: Path) -> None:
    store_tokens(run_dir, "solved", step=2)  # by the journal, step 1 trained it
    store_tokens(run_dir, "unsolved", step=1)  # by the journal, no step did
    client = await serve(run_dir)
    for request_id in ("solved", "unsolved"):
        shown = await read(client, f"{RUN}/rollouts/{request_id}")
        assert (shown["trained"], shown["turns"][0]["trained"]) == (None, None)


async def test_a_record_of_other_tokens_than_those_of_the_rollout_is_not_shown(
    serve: Serve, run_dir: Path
) -> None:
    store_tokens(run_dir, "solved", step=1, num_tokens=2)
    shown = await read(await serve(run_dir), f"{RUN}/rollouts/solved")
    assert shown["turns"][0]["trained"] is None
    assert len(shown["turns"][0]["tokens"]) == 3
