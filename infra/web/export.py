"""Collects the replies that the pages of one run would get, from a server of this process, and writes it as one file.

The replies are those of the server, so an export shows what the pages show. Bodies are large, so only the newest matching rollouts are
taken, up to the wanted number and MAX_BYTES.
"""

import asyncio
import base64
import hashlib
import html
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote

import aiohttp
import msgspec

from infra.web.rollout_table import MAX_PAGE_SIZE

MAX_BYTES = 64 * 1024**2  # limit for the rollouts with their conversations
POLL_S = 0.1
_NO_FILTERS = {"sort", "page", "page_size"}
_OF_RUN = ("series", "tasks", "represented", "where")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportChoice:
    """The content of an export, and its path."""

    directory: Path
    run_id: str | None  # None: the only one there is
    where: dict[str, str]  # query parameters of the table of rollouts
    max_rollouts: int

    @classmethod
    def of(cls, directory: Path, run_id: str | None, where: str, max_rollouts: int) -> "ExportChoice":
        """The choice that a command line expresses. Raises ValueError."""
        given = dict(parse_qsl(where))
        if bool(where) != bool(given) or given.keys() & _NO_FILTERS:
            raise ValueError(
                f"--where {where!r}: give filters of the table of rollouts, as in 'reward=0&task=calc*'"
            )
        return cls(directory=directory, run_id=run_id, where=given, max_rollouts=max_rollouts)


async def export(session: aiohttp.ClientSession, choice: ExportChoice, static: Path) -> str:
    """Writes the file and returns a sentence about its content. Raises ValueError unless the choice names exactly one run."""
    runs = [run for run in (await _get(session, "/api/runs"))["runs"] if run["directory"]]
    run = _only(runs, choice.run_id)
    place = f"/api/runs/{_quoted(run['id'])}"
    replies = {f"{place}/{name}": await _get(session, f"{place}/{name}") for name in _OF_RUN}
    rows, total, num_rollouts = await _rows(session, f"{place}/rollouts", choice)
    num_bytes, shown = 0, list[dict[str, Any]]()
    for row in rows:
        path = f"{place}/rollouts/{_quoted(row['request_id'])}"
        async with session.get(path, params={"turns": "all"}) as response:
            num_bytes += len(await response.read())
            if num_bytes > MAX_BYTES:
                break
            replies[path] = await response.json()
        shown.append(row)
    for step in {row["step"] for row in shown} - {None}:
        replies[f"{place}/steps/{step}"] = await _get(session, f"{place}/steps/{step}")
    # Whoever gets the file does not need the names of machines and directories.
    replies[f"{place}/recipe"] = (await _get(session, f"{place}/recipe")) | {"launches": [], "logs": []}
    gone = {"gone": "an exported file holds nothing of it"}
    replies |= {
        "/api/runs": {
            "runs": [run | {"live": False, "directory": run["name"], "complaints": []}],
            **{"gone": "", "complaints": [], "pauses": []},
        },
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
    """The rows of the chosen rollouts, the number of matches, and the number of all rollouts."""
    rows: list[dict[str, Any]] = []
    while True:
        number = len(rows) // MAX_PAGE_SIZE
        found = await _get(session, path, **choice.where, page=str(number), page_size=str(MAX_PAGE_SIZE))
        rows += found["rows"]
        if len(found["rows"]) < MAX_PAGE_SIZE or len(rows) >= choice.max_rollouts:
            return rows[: choice.max_rollouts], found["total"], found["num_rollouts"]


async def _get(session: aiohttp.ClientSession, path: str, **query: str) -> Any:
    """A reply of the server, requested again until it has read the whole run."""
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
    """Quotes as a browser's encodeURIComponent does."""
    return quote(text, safe="-_.!~*'()")


EXPORTED_API = Path(__file__).parent / "exported_api.js"
_HEAD = re.compile(
    r'<link rel="stylesheet" href="/static/style.css">\n<script type="module" src="/static/app.js"></script>\n'
)


def page(static: Path, data: dict[str, Any], told: str) -> str:
    """The page, with `told` at its top, which says what the page contains and what it lacks."""
    style = (static / "style.css").read_text()
    script = bundle(static / "app.js", {(static / "api.js").resolve(): EXPORTED_API})
    # Inside a script element only "<" could end the data, or begin a comment.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    index, num_heads = _HEAD.subn(lambda _: head, (static / "index.html").read_text())
    assert num_heads == 1, "index.html begins in another way"
    before, main, rest = index.partition('<main id="main"')
    content, body_end, after = rest.partition("</body>")
    notice = f'<aside class="notice exported" aria-label="About this file">{html.escape(told)}</aside>\n'
    scripts = f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n'
    return f"{before}{notice}{main}{content}{scripts}{body_end}{after}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{([^}]*)\}) from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def bundle(first: Path, replaced: dict[Path, Path]) -> str:
    """A script that is equivalent to the module. For modules that are keys of `replaced`, the files there are read instead."""
    names: dict[Path, str] = {}
    return "".join(['"use strict";\n(() => {\n', *_modules(first.resolve(), replaced, names, ()), "})();\n"])


def _modules(
    module: Path, replaced: dict[Path, Path], names: dict[Path, str], importers: tuple[Path, ...]
) -> list[str]:
    """The module and, before it, all modules that it imports; nothing if it is in `names` already."""
    if module in names:
        return []
    assert module not in importers, f"{module.name} imports itself by way of others"
    text = replaced.get(module, module).read_text()
    made: list[str] = []
    for found in _IMPORT.finditer(text):
        made += _modules((module.parent / found[3]).resolve(), replaced, names, (*importers, module))

    def binding(found: re.Match[str]) -> str:
        source = names[(module.parent / found[3]).resolve()]
        bound = found[1] or "{" + found[2].replace(" as ", ": ") + "}"
        return f"const {bound} = {source};\n"

    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    text = _EXPORT.sub(r"\1", _IMPORT.sub(binding, text))
    assert not (left := _LEFT.findall(text)), f"{module}: cannot be bundled: {left[0]}"
    assert "</script" not in text.lower(), f"{module}: it would end the script"
    names[module] = f"module{len(names)}"
    return [*made, f"const {names[module]} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();\n"]
