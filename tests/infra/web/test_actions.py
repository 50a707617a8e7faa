"""Dead letters are requeued and dropped only where that was allowed, not by pages of other sites, and never without a line in the log."""

import json
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis

from infra.web.__main__ import main
from pipeline import deadletters, queue
from tests.infra.web.example_run import Client, Serve, read
from tests.pipeline import samples
from tests.pipeline.claims import queued_ids
from tests.pipeline.cli.situations import dead_lettered

DEAD = f"/api/runs/{samples.RUN}/dead"
OURS = {"X-Swerve-Action": "page", "Content-Type": "application/json"}


async def asked(client: Client, action: str, *ids: str, **headers: str) -> tuple[int, Any]:
    """The reply to an action of a page."""
    body = json.dumps({"request_ids": ids})
    async with client.post(f"{DEAD}/{action}", data=body, headers=OURS | headers) as response:
        return response.status, await response.json()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_dead_letters_are_listed_with_their_evidence_and_cannot_be_changed_by_default(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path
) -> None:
    request_id = await dead_lettered(pool)
    client = await serve(run_dir, redis_url=redis_url)
    shown = await read(client, DEAD)
    assert [one["request_id"] for one in shown["dead"]] == [request_id]
    assert shown["dead"][0]["failures"][0]["message"]
    assert shown["allows_actions"] is False
    status, told = await asked(client, "drop", request_id)
    assert (status, "--allow-actions" in told["error"]) == (405, True)
    assert set(await deadletters.listed(pool, samples.RUN)) == {request_id}


async def test_an_allowed_action_is_carried_out_and_logged(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path, tmp_path: Path
) -> None:
    first_id, second_id = await dead_lettered(pool), await dead_lettered(pool)
    log = tmp_path / "logs" / "actions.jsonl"
    client = await serve(run_dir, redis_url=redis_url, action_log=log)
    assert (await read(client, DEAD))["allows_actions"] is True
    status, told = await asked(client, "requeue", first_id, "gone")
    outcomes = {row["request_id"]: (row["outcome"], bool(row["reason"])) for row in told["changed"]}
    assert (status, outcomes) == (200, {first_id: ("requeued", False), "gone": ("left as it was", True)})
    status, told = await asked(client, "drop", second_id)
    assert [row["outcome"] for row in told["changed"]] == ["dropped"]
    assert await queued_ids(pool) == {first_id}
    assert await deadletters.listed(pool, samples.RUN) == {}
    first, then, *_ = lines(log)
    assert (first["action"], first["request_ids"], first["run"]) == (
        "requeue",
        [first_id, "gone"],
        samples.RUN,
    )
    assert first["address"] == "127.0.0.1"
    assert first["at"] > 0
    assert {row["request_id"] for row in then["changed"]} == {first_id, "gone"}
    assert len(lines(log)) == 4


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"Content-Type": "text/plain"}, "JSON"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site"),
        ({"Host": "evil.example"}, "Host"),
    ],
    ids=str,
)
async def test_a_page_from_elsewhere_can_do_nothing(
    serve: Serve, run_dir: Path, tmp_path: Path, headers: dict[str, str], word: str
) -> None:
    log = tmp_path / "actions.jsonl"
    status, told = await asked(await serve(run_dir, action_log=log), "drop", "r1", **headers)
    assert (status, word in told["error"]) == (403, True)
    assert log.read_text() == ""


async def test_without_our_header_nothing_is_done(serve: Serve, run_dir: Path, tmp_path: Path) -> None:
    client = await serve(run_dir, action_log=tmp_path / "actions.jsonl")
    async with client.post(f"{DEAD}/drop", json={"request_ids": ["r1"]}) as response:
        assert response.status == 403
    # What a browser asks before it lets another site send the header.
    async with client.options(f"{DEAD}/drop") as response:
        assert response.status == 405


async def test_with_a_token_an_action_needs_it(serve: Serve, run_dir: Path, tmp_path: Path) -> None:
    client = await serve(run_dir, token="0123456789abcdef", action_log=tmp_path / "actions.jsonl")
    assert (await asked(client, "drop", "r1"))[0] == 401


@pytest.mark.parametrize("body", ["", "[]", '{"request_ids": []}', '{"request_ids": [1]}', '{"all": true}'])
async def test_a_body_that_means_nothing_is_refused(
    serve: Serve, run_dir: Path, tmp_path: Path, body: str
) -> None:
    client = await serve(run_dir, action_log=tmp_path / "actions.jsonl")
    async with client.post(f"{DEAD}/drop", data=body, headers=OURS) as response:
        assert response.status == 400
        assert "request_ids" in (await response.json())["error"]


async def test_without_redis_an_action_fails_and_the_log_says_so(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "actions.jsonl"
    client = await serve(run_dir, action_log=log)
    assert (await asked(client, "requeue", "r1"))[0] == 503
    assert [bool(line.get("failed")) for line in lines(log)] == [False, True]
    assert "gone" in await read(client, DEAD)


async def test_what_is_not_dead_is_left_alone(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path, tmp_path: Path
) -> None:
    await queue.enqueue(pool, samples.request(id="queued"))
    client = await serve(run_dir, redis_url=redis_url, action_log=tmp_path / "actions.jsonl")
    _, told = await asked(client, "drop", "queued")
    assert [row["outcome"] for row in told["changed"]] == ["left as it was"]
    assert await queued_ids(pool) == {"queued"}


def test_a_log_that_cannot_be_written_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path), "--port", "0", "--allow-actions", "/proc/nosuch/log"]) == 2
    assert "/proc/nosuch" in capsys.readouterr().err
