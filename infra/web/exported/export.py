"""Collects what the pages of one run would be told, from a server of this process, and writes it as one file.

The replies are those of the server, so an export shows what the pages show. Bodies are what is large: of the rollouts that match, so
many of the newest are taken, and no more bytes than MAX_BYTES.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote

import aiohttp

from infra.web.exported.file import page
from infra.web.rollout_query import MAX_PAGE_SIZE

MAX_BYTES = 64 * 1024**2  # of rollouts with their conversations
POLL_S = 0.1
_NO_FILTERS = {"sort", "page", "page_size"}
_OF_RUN = ("series", "tasks", "represented")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportChoice:
    """What is exported, and where to."""

    directory: Path
    run_id: str | None  # None: the only one there is
    where: dict[str, str]  # parameters of the table of rollouts
    max_rollouts: int

    @classmethod
    def of(cls, directory: Path, run_id: str | None, where: str, max_rollouts: int) -> "ExportChoice":
        """Of the words of a command line. Raises ValueError."""
        given = dict(parse_qsl(where))
        if bool(where) != bool(given) or given.keys() & _NO_FILTERS:
            raise ValueError(
                f"--where {where!r}: give filters of the table of rollouts, as in 'reward=0&task=calc*'"
            )
        return cls(directory=directory, run_id=run_id, where=given, max_rollouts=max_rollouts)


async def export(session: aiohttp.ClientSession, choice: ExportChoice, static: Path) -> str:
    """Write the file; returns a sentence that says what it holds. Raises ValueError if there is not one run to be meant."""
    runs = [run for run in await _get(session, "/api/runs") if run["directory"]]
    run = _only(runs, choice.run_id)
    place = f"/api/runs/{_quoted(run['id'])}"
    replies = {f"{place}/{name}": await _get(session, f"{place}/{name}") for name in _OF_RUN}
    rows, total, num_rollouts = await _rows(session, f"{place}/rollouts", choice)
    num_bytes, shown = 0, list[dict[str, Any]]()
    for row in rows:
        path = f"{place}/rollouts/{_quoted(row['request_id'])}"
        async with session.get(path) as response:
            num_bytes += len(await response.read())
            if num_bytes > MAX_BYTES:
                break
            replies[path] = await response.json()
        shown.append(row)
    gone = {"gone": "an exported file holds nothing of it"}
    replies |= {
        "/api/runs": [run | {"live": False, "directory": run["name"]}],
        f"{place}/status": gone,
        f"{place}/dead": gone,
    }
    told = _told(run["id"], len(shown), total, num_rollouts, choice.where)
    data = {"run": run["id"], "replies": replies, "rows": shown, "num_rollouts": num_rollouts}
    choice.directory.mkdir(parents=True, exist_ok=True)
    (choice.directory / "index.html").write_text(page(static, data, told))
    return told


async def _rows(
    session: aiohttp.ClientSession, path: str, choice: ExportChoice
) -> tuple[list[dict[str, Any]], int, int]:
    """The rows that are wanted, how many match, and how many rollouts there are."""
    rows: list[dict[str, Any]] = []
    while True:
        number = len(rows) // MAX_PAGE_SIZE
        found = await _get(session, path, **choice.where, page=str(number), page_size=str(MAX_PAGE_SIZE))
        rows += found["rows"]
        if len(found["rows"]) < MAX_PAGE_SIZE or len(rows) >= choice.max_rollouts:
            return rows[: choice.max_rollouts], found["total"], found["num_rollouts"]


async def _get(session: aiohttp.ClientSession, path: str, **query: str) -> Any:
    """A reply, once the server has read all of the run."""
    while True:
        async with session.get(path, params=query) as response:
            shown = await response.json()
            if response.status == 400:
                raise ValueError(f"--where: {shown['error']}")
            response.raise_for_status()
        if isinstance(shown, list) or not cast(dict[str, Any], shown).get("reading"):
            return cast(Any, shown)
        await asyncio.sleep(POLL_S)


def _only(runs: list[dict[str, Any]], run_id: str | None) -> dict[str, Any]:
    found = [run for run in runs if run_id in (None, run["id"])]
    if len(found) != 1:
        known = ", ".join(run["id"] for run in runs) or "none"
        raise ValueError(f"--export is of one run: give its id with --run; in --run-dir there is {known}")
    return found[0]


def _told(run_id: str, num_shown: int, total: int, num_rollouts: int, where: dict[str, str]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    matching = f"{total:,} that match {'&'.join(f'{name}={value}' for name, value in where.items())}"
    of = f"of {matching}, " if where else ""
    return (
        f"Exported {made}: run {run_id}, with the newest {num_shown:,} rollouts {of}of {num_rollouts:,} in all. "
        "Curves, tasks and who gets trained are of the whole run."
    )


def _quoted(text: str) -> str:
    """As a browser's encodeURIComponent."""
    return quote(text, safe="-_.!~*'()")
