"""What a page of a long run costs in a browser: `python -m benchmarks.web_pages [--json] [--short]`.

`swerve web` serves a folder of 300 runs, of which one has 100,000 rollouts in 1,389 steps, and one has a rollout of 3,000 turns. Chromium
opens each page anew. The CPU seconds of the server and of the browser together are compared with one second, which is what we allow, and
those of a page that is open while its run goes on, a step with 72 rollouts each second, with a tenth of the time.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from msgspec import structs
from playwright.async_api import Page, async_playwright

from benchmarks import long_run, scripted_fleet
from benchmarks.report import Comparison, compared, main, p50
from benchmarks.web_table import served
from pipeline.request import Claim
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout
from pipeline.trajectory import head_of

SHOWN = "main:not([aria-busy]) > h1"
PATIENCE_MS = 300_000
ALLOWED_S, ALLOWED_SHARE = 1.0, 0.1
DEEP = "deep"


def write_deep(run_dir: Path, num_turns: int) -> str:
    """A run with one rollout of so many turns. Returns its request id."""
    claim = Claim(request=scripted_fleet.request(DEEP), attempt=1, worker="host/1", claimed_at=1500.0)
    played = scripted_fleet.played(claim, 1.0)
    turns = [structs.replace(played.turns[0], asked_at=1500.0 + number) for number in range(num_turns)]
    deep = structs.replace(played, turns=tuple(turns))
    for part in ("journal", "rollouts"):
        (run_dir / part).mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": DEEP}))
    body = record.pack_body(StoredRollout(trajectory=deep))
    with segment.path_of(run_dir / "rollouts", 0).open("wb") as store:
        store.write(record.pack(StoredHead(head=head_of(deep, len(body))), body))
    return claim.request.id


def write_folder(root: Path, *, num_runs: int, num_rollouts: int, num_turns: int) -> str:
    """The folder of runs; returns the id of the deep rollout."""
    long_run.write(root / long_run.RUN, num_rollouts)
    deep = write_deep(root / DEEP, num_turns)
    long_run.write(root / "run-000", 1_000, run_id="run-000")
    for number in range(1, num_runs - 2):
        name = f"run-{number:03d}"
        shutil.copytree(root / "run-000", root / name)
        (root / name / "run.json").write_text(json.dumps({"run_id": name}))
    return deep


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[tuple[Page, str]]:
    """A page of the browser, and the address of the server."""
    program = shutil.which("chromium")
    if program is None:
        raise FileNotFoundError("Chromium is missing: `bash infra/setup/setup.sh tests` installs it")
    with served(root) as address:
        async with async_playwright() as playwright:
            chromium = await playwright.chromium.launch(executable_path=program)
            page = await chromium.new_page()
            page.set_default_timeout(PATIENCE_MS)
            yield page, address
            await chromium.close()


class CpuSince:
    """The CPU seconds, since it was made, of all processes that this one started: the server, and those of the browser."""

    def __init__(self) -> None:
        self._before = self._by_process()

    def read_s(self) -> float:
        now = self._by_process()
        return sum(used - self._before.get(process, 0.0) for process, used in now.items())

    @staticmethod
    def _by_process() -> dict[psutil.Process, float]:
        found: dict[psutil.Process, float] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                found[process] = used.user + used.system
        return found


async def opening_s(page: Page, address: str) -> float:
    """The CPU seconds until the page is drawn and nothing is loaded any more."""
    await page.goto("about:blank")
    cpu = CpuSince()
    await page.goto(address)
    await page.wait_for_selector(SHOWN)
    await page.locator("#reading:empty").wait_for(state="attached")
    # The stream of events stays open, so the network is never idle.
    await page.wait_for_timeout(300)
    return cpu.read_s()


async def live_share(page: Page, address: str, run_dir: Path, first: int, num_s: int) -> float:
    """CPU seconds per second of a page of the run, to which a step is added each second."""
    await opening_s(page, address)
    cpu, began_at = CpuSince(), time.monotonic()
    for number in range(num_s):
        long_run.append_step(run_dir, first + number * long_run.ROLLOUTS_PER_STEP)
        await asyncio.sleep(began_at + number + 1 - time.monotonic())
    return cpu.read_s() / (time.monotonic() - began_at)


async def web_pages(short: bool) -> list[Comparison]:
    num_rounds, live_for_s = (1, 2) if short else (5, 40)
    sizes = {"num_runs": 5, "num_rollouts": 2_000, "num_turns": 60}
    sizes = sizes if short else {"num_runs": 300, "num_rollouts": long_run.NUM_ROLLOUTS, "num_turns": 3_000}
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        deep = await asyncio.to_thread(write_folder, root, **sizes)
        num_rollouts = sizes["num_rollouts"]
        pages = {
            f"{sizes['num_runs']} runs": "#/",
            f"the run of {num_rollouts:,} rollouts": f"#/run/{long_run.RUN}",
            "its rollouts": f"#/rollouts/{long_run.RUN}",
            "one of its steps": f"#/step/{long_run.RUN}/5",
            "one of its rollouts": f"#/rollout/{long_run.RUN}/{long_run.request_id(17)}",
            "its tasks": f"#/tasks/{long_run.RUN}",
            "where its time went": f"#/where/{long_run.RUN}",
            "who gets trained": f"#/trained/{long_run.RUN}",
            f"a rollout of {sizes['num_turns']:,} turns": f"#/rollout/{DEEP}/{deep}",
        }
        async with opened(root) as (page, address):
            first_s = await opening_s(page, f"{address}#/run/{long_run.RUN}")
            unit = f"CPU s for the run of {num_rollouts:,} rollouts, read for the first time"
            found.append(_against(ALLOWED_S, [first_s], unit))
            for name, place in pages.items():
                await opening_s(page, address + place)
                taken = [await opening_s(page, address + place) for _ in range(num_rounds)]
                found.append(_against(ALLOWED_S, taken, f"CPU s for {name}"))
            for name in ("run", "rollouts"):
                first = num_rollouts + (name == "rollouts") * live_for_s * long_run.ROLLOUTS_PER_STEP
                place = f"{address}#/{name}/{long_run.RUN}"
                share = await live_share(page, place, root / long_run.RUN, first, live_for_s)
                unit = f"CPU s per second, page {name} of the run of {num_rollouts:,} rollouts goes on"
                found.append(_against(ALLOWED_SHARE, [share], unit))
    return found


def _against(allowed: float, taken: list[float], unit: str) -> Comparison:
    ours = [[one] for one in taken]
    rival_name = f"{allowed:g} CPU s"
    return compared("web_pages", ours, [[allowed]] * len(ours), p50, rival_name=rival_name, unit=unit)


if __name__ == "__main__":
    sys.exit(main("web_pages", __doc__, web_pages))
