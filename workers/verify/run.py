"""Verifies tasks in parallel, records each as soon as it is done, and shows progress: a row for each finished task, and the states that are
being graded.
"""

import functools
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace
from rich.text import Text

from pipeline.request import Limits
from pipeline.screen import visible_line
from pipeline.task import BEST_CONTROLS, BestControl, Task
from pipeline.taskfile import EXPECTED, Found, Gold, State, Strength, Verification
from workers.display import Display, open_display
from workers.grading.grade import Grader
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import session, side_by_side
from workers.verify.book import Book, Outputs
from workers.verify.calibrating import Calibrator
from workers.verify.judging import ImageLeaks, evidence, verification
from workers.verify.states import Prober, Tries
from workers.verify.strength import StrengthMeter
from workers.verify.submitting import Submitter

ID_CHARS = 44
EVIDENCE_LINES = 6
NAMED_AT_MOST = 3  # number of tests that a line names
_COLUMNS: dict[State, int] = {"empty": 8, "useless": 9, "tests_only": 12, "gold": 8, "agent": 8}


class VerificationTable:
    """Shows the progress of verification: a row for each finished task, and the state that is being graded."""

    def __init__(self, display: Display, *, width: int) -> None:
        self._display = display
        self._width = width
        self._begun: set[str] = set()

    def begin(self, task_id: str, what: str, done: int, total: int) -> None:
        """Shows that this state of the task, or this partial fix, is now graded, after `done` of `total` steps of the task."""
        if task_id not in self._begun:
            self._begun.add(task_id)
            self._display.begin(task_id)
        self._display.advance(task_id, f"{what} ({done + 1} of {total})", done=done, total=total)

    def finish(self, verification: Verification, evidence: str) -> None:
        """Shows the finished task; `evidence` is the end of a log that shows what is wrong with it."""
        lines = [line for line in evidence.splitlines() if line.strip()][-EVIDENCE_LINES:]
        shown = [
            row(verification, self._width),
            *(Text(f"    | {visible_line(line)}", style="dim") for line in lines),
            *flag_rows(verification),
            *(strength_rows(verification.strength) if verification.strength else ()),
        ]
        self._display.finish(verification.task, shown, ok=verification.ok)


@contextmanager
def open_table(task_ids: Sequence[str]) -> Generator[VerificationTable]:
    """Opens a table of these tasks on standard output."""
    width = min(max((len(visible_line(one)) for one in task_ids), default=4), ID_CHARS)
    with open_display(sys.stdout, items="tasks", num_items=len(task_ids), heading=heading(width)) as display:
        yield VerificationTable(display, width=width)


def heading(width: int) -> str:
    states = "".join(name.rjust(room) for name, room in _COLUMNS.items())
    return f"{'task'.ljust(width)}{states}{'controls':>10}{'s':>8}{'agent s':>9}"


def row(verification: Verification, width: int) -> Text:
    """One task in one line, with the reason at its end if it is not ok."""
    text = Text(visible_line(verification.task)[-width:].ljust(width))
    for state, room in _COLUMNS.items():
        found = verification.states[state]
        cell = "broken" if found == "infrastructure" else str(found)
        text.append(cell.rjust(room), _style(state, found))
    text.append(_controls(verification).rjust(10))
    text.append(f"{verification.seconds:8.1f}{verification.agent_s:9.1f}  ")
    reason = "ok" if verification.ok else visible_line(verification.reason)
    text.append(reason, "green" if verification.ok else "red")
    if verification.num_uncontrolled:
        num, total = verification.num_uncontrolled, verification.num_needing_fix
        text.append(
            f"; {verification.control}: no control for {num} of {total} tests that need the fix", "yellow"
        )
    if verification.warning:
        text.append(f"; {visible_line(verification.warning)}", "yellow")
    return text


def _controls(verification: Verification) -> str:
    """The number of tests that can be made to fail, and of all tests."""
    return f"{verification.num_controlled}/{verification.num_tests}" if verification.num_tests else "-"


def flag_rows(verification: Verification) -> list[Text]:
    """The tests whose pass proves little, because a patch may change them or their expected values."""
    flagged = {
        "are in files that a patch may change": verification.in_fix,
        "take cases, references or data from the package under test": verification.from_package,
    }
    return [
        Text(f"    tests that {what} ({len(names)}): {_few(names)}", "yellow")
        for what, names in flagged.items()
        if names
    ]


def strength_rows(strength: Strength) -> list[Text]:
    """The weakness of a task with its interval, and the partial fixes that its tests let pass."""
    if strength.weakness is None:
        return [Text("    weakness not known: no partial fix could be made of the known fix", style="dim")]
    num, (low, high) = strength.num_partial_fixes, strength.interval
    fixes = "1 partial fix" if num == 1 else f"{num} partial fixes"
    weakness = f"    weakness {strength.weakness:.2f} ({low:.2f} to {high:.2f}, {fixes})"
    return [
        Text(f"{weakness}, of which pass:", "yellow") if strength.passing else Text(weakness, "dim"),
        *(Text(f"    | {visible_line(one)}", style="dim") for one in strength.passing),
    ]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(map(visible_line, names[:NAMED_AT_MOST]))}{more}"


def _style(state: State, found: Found) -> str:
    if found == "infrastructure":
        return "yellow"
    return "" if found == EXPECTED[state] else "bold red"


@dataclass(slots=True)
class Verifier:
    """Verifies tasks. The results are in `found` and `tries`, by task id, and in `book`."""

    prober: Prober
    meter: StrengthMeter | None  # None: how strong tests are is not measured
    images: ImageLeaks
    golds: Mapping[str, Gold]
    book: Book
    # Only such tasks are wanted, and what would be measured of others is left out; None: everything is measured.
    wanted_control: BestControl | None = None
    found: dict[str, Verification] = field(default_factory=dict[str, Verification])
    tries: dict[str, Tries] = field(default_factory=dict[str, Tries])

    async def run(self, tasks: Sequence[Task], *, num_jobs: int) -> None:
        """Verifies `tasks`, `num_jobs` at a time. Raises Unwritable."""
        with open_table([task.id for task in tasks]) as table:
            await side_by_side(tasks, lambda task: self._verify(task, table), num_jobs=num_jobs)

    async def _verify(self, task: Task, table: VerificationTable) -> None:
        began_at = time.monotonic()
        probed = await self.prober.probe(
            task, self.golds.get(task.id), on_step=functools.partial(table.begin, task.id)
        )
        done = verification(task, probed, seconds=time.monotonic() - began_at, verified_at=time.time())
        if done.ok:
            table.begin(task.id, "leaks", 0, 1)
            done = await self.images.looked_for(done, task, self.golds[task.id])
            done = replace(done, seconds=round(time.monotonic() - began_at, 2))
        self.book.enter(done)
        if self.meter is not None and self._is_measured(done):
            done = await self._with_strength(done, task, self.meter, table)
            done = replace(done, seconds=round(time.monotonic() - began_at, 2))
            self.book.enter(done)
        self.tries[task.id] = probed.tries
        self.found[task.id] = done
        table.finish(done, evidence(probed.tries))

    def _is_measured(self, done: Verification) -> bool:
        """Whether the strength of the task's tests is measured."""
        if self.wanted_control is None:
            return done.states["gold"] == 1
        return done.ok and BEST_CONTROLS.index(done.control) >= BEST_CONTROLS.index(self.wanted_control)

    async def _with_strength(
        self, done: Verification, task: Task, meter: StrengthMeter, table: VerificationTable
    ) -> Verification:
        """The verification of a task whose known fix passes, with the strength of its tests."""
        measured = await meter.measure(
            replace(task, calibration=done.calibration),
            self.golds[task.id],
            on_fix=lambda number, most: table.begin(task.id, "partial fix", number - 1, most),
        )
        warning = "; ".join(text for text in (done.warning, measured.warning) if text)
        return replace(done, strength=measured.strength, warning=warning)


async def verify(
    tasks: Sequence[Task],
    golds: Mapping[str, Gold],
    book: Book,
    outputs: Outputs,
    *,
    sandboxes: Sandboxes,
    limits: Limits,
    num_repeats: int,
    num_jobs: int,
    num_controls: int,
    num_partial_fixes: int,
    image_fix: str,
    agent_config: str,
    wanted_control: BestControl | None = None,
) -> Verifier:
    """Verifies all of `tasks` in `sandboxes`, and closes these. Raises Unwritable and Misconfigured. SIGTERM and SIGHUP cancel it.
    With `wanted_control`, only tasks are wanted that are ok and of which a control can say this or more: others end at their first fault.
    The strength of their tests is measured with at most `num_partial_fixes` of each; 0: it is not measured. Known fixes are submitted as
    the agent file with the text `agent_config` says.
    """
    async with session(sandboxes) as outage:
        grader = Grader(sandboxes)
        prober = Prober(
            grader=grader,
            submitter=Submitter(sandboxes, grader),
            calibrator=Calibrator(grader, sandboxes, num_controls),
            sandboxes=sandboxes,
            logs=outputs,
            limits=limits,
            num_repeats=num_repeats,
            agent_config=agent_config,
            image_fix=image_fix,
            ends_at_fault=wanted_control is not None,
            outage=outage,
        )
        meter = StrengthMeter(grader, sandboxes, limits, num_partial_fixes, image_fix)
        images = ImageLeaks(sandboxes, limits, image_fix)
        verifier = Verifier(prober, meter if num_partial_fixes else None, images, golds, book, wanted_control)
        await verifier.run(tasks, num_jobs=num_jobs)
    return verifier
