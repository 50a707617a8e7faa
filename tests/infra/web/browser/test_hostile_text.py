"""Whatever tasks, groups, workers and policies are called, a page shows what is in a name, and in its order."""

import re
import sys
import time
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from pipeline import census
from pipeline.journal.reading import LAUNCHES, RECIPE, Launch
from pipeline.journal.rows import FILES, EpisodeRow, StepRow
from pipeline.request import Claim, RolloutRequest
from pipeline.screen import visible
from pipeline.trajectory import Submitted, Trajectory, Turn
from tests.hostile import HOSTILE, filled
from tests.infra.web.browser.conftest import pages_of
from tests.infra.web.browser.reader import Reader
from tests.infra.web.browser.shown_runs import begin_run
from tests.infra.web.example_run import NO_REDIS, store
from trainer.records.journal_writer import Journal

IN_BROWSER = pytest.mark.asyncio(loop_scope="session")
STATIC = Path(__file__).parents[4] / "infra/web/static"
RUN = f"run{HOSTILE}"
ROLLOUT = f"one{HOSTILE}"
EXTREMES = ((1.7e308, 2**49), (-1.7e308, 0))
TORN = (b'\x00\x00{"step": 1, "re\n[]\nnull\n', b'{"at": 1e999}\n', b'{"request_id": "')
CHANGED = """async () => {
    const {visible} = await import("/static/dom.js");
    const found = [];
    for (let code = 0; code < 0x110000; code += 1) {
        const character = String.fromCodePoint(code);
        if (/\\p{Cn}/u.test(character) || visible(character) === character) continue;
        if (found.length && found.at(-1)[1] === code - 1) found.at(-1)[1] = code;
        else found.push([code, code]);
    }
    return found;
}"""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def hostile_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    root = tmp_path_factory.mktemp("hostile")
    write_run(root / "one")
    now = time.time()
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()
        journal = str(root / "one" / "journal")
        await census.beat_run(
            redis, filled(census.RunStatus, run_id=RUN, ended="", journal=journal, updated_at=now)
        )
        about = {"kind": "rollout", "started_at": now, "updated_at": now}
        await census.beat_worker(redis, filled(census.WorkerStatus, **about))
    async with pages_of(root, redis_url) as url:
        yield url


def write_run(directory: Path) -> None:
    """Rows of every kind, of which every text is hostile, and a rollout with such names."""
    begin_run(directory, RUN)
    (directory / LAUNCHES).write_bytes(msgspec.json.encode(filled(Launch)))
    (directory / RECIPE).write_text(HOSTILE)
    with Journal(directory / "journal") as journal:
        for row in FILES:
            given = {
                EpisodeRow: {"request_id": ROLLOUT, "purpose": "train"},
                StepRow: {"request_ids": [ROLLOUT]},
            }
            journal.append(filled(row, **given.get(row, {})))
    claim = filled(Claim[RolloutRequest], request=filled(RolloutRequest, id=ROLLOUT, run_id=RUN))
    turn = filled(Turn, kept_tokens=0, repeated_tokens=0)
    store(
        directory, filled(Trajectory, claim=claim, turns=(turn,), outcome=Submitted(patch=HOSTILE.encode()))
    )


@pytest.mark.slow_but_for("runs", "run")
@IN_BROWSER
@pytest.mark.parametrize(
    "page", ["runs", "run", "step", "fleet", "rollouts", "rollout", "tasks", "trained", "recipe"]
)
async def test_no_name_on_a_page_hides_or_reorders_anything(
    reader: Reader, hostile_url: str, page: str
) -> None:
    rest = {"rollout": f"/{quote(ROLLOUT, safe='')}", "step": "/1"}.get(page, "")
    await reader.open(hostile_url + ("#/" if page == "runs" else f"#/{page}/{quote(RUN, safe='')}{rest}"))
    said = await reader.page.evaluate(
        "[document.title, document.body.innerText, ...[...document.querySelectorAll('[title], [aria-label]')].flatMap("
        "(one) => [one.title || '', one.ariaLabel || ''])].join(' ')"
    )
    assert "]0;PWN" in said
    assert visible(said) == said


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def extreme_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    root = tmp_path_factory.mktemp("extreme")
    write_extreme_run(root / "one")
    async with pages_of(root, NO_REDIS) as url:
        yield url


def write_extreme_run(directory: Path) -> None:
    """Rows of every kind with the largest and the smallest numbers, twice, and torn ones before, between and after them."""
    write_run(directory)
    for name in FILES.values():
        path = directory / "journal" / name
        row = msgspec.json.decode(path.read_bytes())
        lines = [msgspec.json.encode(_with_numbers(row, big, small)) for big, small in EXTREMES]
        path.write_bytes(b"".join(torn + line + b"\n" for torn, line in zip(TORN, [*lines, b""], strict=True)))


def _with_numbers(value: Any, real: float, whole: int) -> Any:
    match value:
        case bool():
            return value
        case int():
            return whole
        case float():
            return real
        case dict():
            times = {name: max(0.0, min(real, 1e11)) for name, one in value.items() if isinstance(one, float) and name.endswith("at")}
            return {name: _with_numbers(one, real, whole) for name, one in value.items()} | times
        case list():
            return [_with_numbers(one, real, whole) for one in value]
        case _:
            return value


@pytest.mark.slow
@IN_BROWSER
@pytest.mark.parametrize("page", ["runs", "run", "step", "rollouts", "tasks", "trained", "where", "recipe"])
async def test_a_page_is_drawn_whatever_numbers_and_torn_rows_a_journal_has(
    reader: Reader, extreme_url: str, page: str
) -> None:
    rest = f"/{2**49}" if page == "step" else ""
    await reader.open(extreme_url + ("#/" if page == "runs" else f"#/{page}/{quote(RUN, safe='')}{rest}"))
    assert visible(await reader.text()) == await reader.text()
    assert "NaN" not in await reader.text()


@pytest.mark.slow
@IN_BROWSER
async def test_pages_and_terminals_know_the_same_characters(reader: Reader, hostile_url: str) -> None:
    """But for those that only one of them knows to be assigned: a browser has a newer Unicode than Python."""
    await reader.open(hostile_url)
    of_pages = {
        code for first, last in await reader.page.evaluate(CHANGED) for code in range(first, last + 1)
    }
    assigned = {code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) != "Cn"}
    of_terminals = {code for code in assigned if visible(chr(code)) != chr(code)}
    assert of_pages & assigned == of_terminals
    shown = await reader.page.evaluate(
        "async (text) => (await import('/static/dom.js')).visible(text)", HOSTILE
    )
    assert shown == visible(HOSTILE)


def test_text_enters_a_page_in_one_place_only() -> None:
    past_it = re.compile(
        r"textContent = |innerHTML|createTextNode|document\.title|insertAdjacent|replaceChildren|innerText"
    )
    found = [path.name for path in sorted(STATIC.rglob("*.js")) if past_it.search(path.read_text())]
    assert found == ["dom.js"]
