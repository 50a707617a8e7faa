"""The table of rollouts: filters, order, pages, text, and a hundred thousand rows."""

from pathlib import Path

import pytest

from tests.infra.web.example_run import Client, Serve, append, finished, read, settled, store
from tests.pipeline import samples

TABLE = f"/api/runs/{samples.RUN}/rollouts"


async def ids(client: Client, **query: str | int) -> list[str]:
    return [row["request_id"] for row in (await read(client, TABLE, sort="request_id", **query))["rows"]]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({}, ["fresh", "solved", "unsolved"]),
        ({"reward": "1"}, ["solved"]),
        ({"reward": "none"}, []),
        ({"fate": "zero_variance"}, ["unsolved"]),
        ({"task": "CALC"}, ["fresh", "solved", "unsolved"]),
        ({"task": "calc*"}, []),
        ({"task": "*calc-7"}, ["fresh", "solved", "unsolved"]),
        ({"task": "[a-z]*"}, []),
        ({"outcome": "submitted", "purpose": "train", "version": "2-3"}, ["fresh", "solved", "unsolved"]),
        ({"version": "4"}, []),
        ({"tokens": "3", "turns": "1-"}, ["fresh", "solved", "unsolved"]),
        ({"tokens": "4-"}, []),
        ({"lag": "1-2"}, ["solved"]),
        ({"purpose": "eval"}, []),
    ],
    ids=str,
)
async def test_filters_narrow_the_table(
    serve: Serve, run_dir: Path, query: dict[str, str], wanted: list[str]
) -> None:
    assert await ids(await serve(run_dir), **query) == wanted


async def test_a_row_has_what_store_and_journal_tell(serve: Serve, run_dir: Path) -> None:
    rows = {row["request_id"]: row for row in (await read(await serve(run_dir), TABLE))["rows"]}
    told = ("fate", "step", "lag", "is_stored", "is_dead", "sampled_tokens")
    assert [rows["solved"][name] for name in told] == ["trained", 1, 1, True, False, 3]
    assert [rows["fresh"][name] for name in told] == ["", None, None, True, False, 3]


async def test_rows_come_in_the_wanted_order_and_pages(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    assert await ids(client, page_size=2) == ["fresh", "solved"]
    assert await ids(client, page_size=2, page=1) == ["unsolved"]
    falling = await read(client, TABLE, sort="-reward", page_size=1)
    assert ([row["request_id"] for row in falling["rows"]], falling["total"]) == (["solved"], 3)
    steps = await read(client, TABLE, sort="-step")
    assert steps["rows"][0]["request_id"] == "solved"  # those without a step come last


async def test_texts_are_searched_in_bodies(serve: Serve, run_dir: Path) -> None:
    special = finished("special", reward=0.0)
    turn = samples.turn(text="the Needle in it")
    store(run_dir, samples.trajectory(special.claim, turns=(turn,)))
    shown = await read(await serve(run_dir), TABLE, text="needle")
    assert [row["request_id"] for row in shown["rows"]] == ["special"]
    assert (shown["text_searched"], shown["text_complete"]) == (4, True)


async def test_what_is_stored_or_settled_meanwhile_is_in_the_next_reply(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    assert len(await ids(client)) == 3
    late = finished("late", reward=1.0)
    store(run_dir, late)
    assert await ids(client, fate="", reward="1") == ["late", "solved"]
    append(run_dir, "episodes", settled(late, "late"))
    assert await ids(client, fate="late") == ["late"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"sort": "nosuch"}, "sort"),
        ({"page": "-1"}, "page"),
        ({"page_size": "501"}, "page_size"),
        ({"reward": "much"}, "reward"),
        ({"version": "new"}, "version"),
        ({"lag": "3-x"}, "lag"),
        ({"rewrad": "1"}, "rewrad"),
    ],
    ids=str,
)
async def test_a_wrong_parameter_is_named(
    serve: Serve, run_dir: Path, query: dict[str, str], field: str
) -> None:
    client = await serve(run_dir)
    async with client.get(TABLE, params=query) as response:
        assert response.status == 400
        assert (await response.json())["error"].startswith(f"{field}: ")
