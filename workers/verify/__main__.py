"""`python -m workers.verify TASKS.jsonl`: verifies tasks with the grader that will judge training

Each task is graded in five states by the production grader, in real containers: an empty patch, a useless one and the hidden tests alone
must get reward 0, the known solution (from TASKS.gold.jsonl) reward 1, in every repeat; and reward 1 again when its files are made in an
agent's container and submitted as the agent file says. The image must have the task's base_commit checked out. The command needs Docker and
the tasks' images; no Redis, no SGLang, no GPU. It writes TASKS.verified.jsonl, which the trainer reads.

Exit status: 0 every task is ok; 1 some are not, with the reason; 2 misuse, or results that cannot be written; 130 after
Ctrl-C. Results until then are kept.
"""

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.agent.config import load_agent
from pipeline.agent.option import read_agent
from pipeline.commandline import program
from pipeline.errors import RequestError
from pipeline.request import Limits
from pipeline.task import BEST_CONTROLS, Task
from pipeline.taskfile import Gold, Verification, gold_path, read_gold, read_tasks
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import DEFAULT_AGENT, LogDirectory, add_grading_options, exit_status, limits_of, misuse
from workers.verify.book import Book, Outputs, is_broken

DEFAULT_PARTIAL_FIXES = 20  # number for one task
AGENT_HELP = "submit known fixes as this agent file tells its agent to; may be repeated, the later one wins; default: ours"


@dataclass(frozen=True, slots=True)
class Work:
    """The tasks to verify, and the destination of the results."""

    tasks: list[Task]
    golds: dict[str, Gold]
    limits: Limits
    agent_config: str
    book: Book
    outputs: Outputs


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        work = _read(options)
        sandboxes = command_sandboxes(fleet=f"verify-{os.getpid()}")
    except (OSError, ValueError, RequestError) as error:
        return misuse(error)
    return exit_status(
        lambda: _verify(work, options, sandboxes),
        kept_if_stopped=lambda: f"what was verified until now is in {work.book.path}",
        kept_if_unwritable=lambda: f"{work.book.path} has what was verified",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workers.verify"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", type=Path, metavar="TASKS.jsonl")
    add("--repeat", type=int, default=1, metavar="N", help="grade each state N times, to find flaky tests")
    add("--only", default="", metavar="ID[,ID...]", help="verify these tasks alone")
    add(
        "--strength",
        action="store_true",
        help="measure how strong the tests are: grade wrong patches made of the known fix, and tell the share that passes, with its "
        "95 %% interval",
    )
    add(
        "--partial-fixes",
        type=int,
        default=DEFAULT_PARTIAL_FIXES,
        metavar="N",
        help="largest number of wrong patches per task, with --strength; default: %(default)s",
    )
    add("--agent", action="append", metavar="FILE", help=AGENT_HELP)
    add("--new", action="store_true", help="leave out tasks that were found ok and have not changed since")
    add(
        "--passing",
        type=Path,
        metavar="OUT.jsonl",
        help="copy the tasks that are ok there, with their solutions",
    )
    add(
        "--min-control",
        choices=BEST_CONTROLS,
        default="none",
        help="copy only tasks of whose passes a control can say this or more: every test that needs the fix can be contradicted "
        "(confirmed), or some can (partial); default: %(default)s",
    )
    add(
        "--json",
        type=Path,
        metavar="OUT",
        help="write the results there as one list, with the tests of each try",
    )
    add("--logs", type=Path, metavar="DIR", help="keep the whole log of each try as DIR/TASK/STATE.log")
    add(
        "--controls",
        type=int,
        default=3,
        metavar="N",
        help="contradicted expectations to keep for each test; 0: none, and passes are not controlled; default: %(default)s",
    )
    add_grading_options(parser, items="tasks verified")
    return parser


def _read(options: argparse.Namespace) -> Work:
    """The work. Raises ValueError or OSError for input that cannot be verified at all."""
    limits = limits_of(options)
    if min(options.repeat, options.partial_fixes) < 1:
        raise ValueError("--repeat and --partial-fixes must be 1 or more")
    if options.min_control != "none" and not options.passing:
        raise ValueError("--min-control chooses what --passing copies; give --passing, too")
    if options.controls < 0:
        raise ValueError("--controls must be 0 or more")
    path: Path = options.tasks
    tasks = read_tasks(path)
    wanted = {one for one in options.only.split(",") if one}
    unknown = wanted - {task.id for task in tasks}
    if unknown:
        raise ValueError(f"--only: {path} holds no task {min(unknown)!r}")
    chosen = [task for task in tasks if not wanted or task.id in wanted]
    if not chosen:
        raise ValueError(f"{path} holds no task")
    from workers.verify.submitting import submission_command

    agent_config = read_agent(options.agent or [str(DEFAULT_AGENT)])
    submission_command(load_agent(agent_config), chosen[0], limits, [])
    golds, outputs = (
        gold_path(path),
        Outputs(options.json, options.passing, options.min_control, LogDirectory(options.logs)),
    )
    book = Book.beside(path)
    outputs.check()
    return Work(chosen, read_gold(golds) if golds.exists() else {}, limits, agent_config, book, outputs)


def _verify(work: Work, options: argparse.Namespace, sandboxes: Sandboxes) -> int:
    """Verifies what is not verified yet, writes the results and returns the exit status. Raises Unwritable."""
    todo = [
        task for task in work.tasks if not (options.new and work.book.stands(task, measured=options.strength))
    ]
    found: dict[str, Verification] = {
        task.id: work.book.entries[task.id] for task in work.tasks if task.id in work.book.entries
    }
    tries = {}
    if todo:
        from workers.verify.run import verify

        if len(todo) < len(work.tasks):
            print(f"{len(work.tasks) - len(todo)} tasks were verified before and have not changed since")
        verifier = asyncio.run(
            verify(
                todo,
                work.golds,
                work.book,
                work.outputs,
                sandboxes=sandboxes,
                limits=work.limits,
                num_repeats=options.repeat,
                num_controls=options.controls,
                num_jobs=options.jobs,
                num_partial_fixes=options.partial_fixes if options.strength else 0,
                agent_config=work.agent_config,
                image_fix=f"`python -m workers.images pull {options.tasks}`, or `python -m workers.images build DIR`",
            )
        )
        found |= verifier.found
        tries = verifier.tries
    results = [found[task.id] for task in work.tasks]
    work.outputs.write_json(results, tries)
    work.outputs.write_passing(work.tasks, work.golds, results)
    num_wrong = sum(not one.ok for one in results)
    num_tests = sum(one.num_tests for one in results)
    if num_tests:
        share = sum(one.num_controlled for one in results) / num_tests
        print(f"{share:.1%} of {num_tests} tests that the known fixes pass can be made to fail by a control")
        best = Counter(one.control for one in results)
        says = ", ".join(f"{best[one]} {one}" for one in reversed(BEST_CONTROLS))
        print(f"what a control can say at best of a pass: {says}")
    print(_closing_line(results, work.book.path))
    return 1 if num_wrong else 0


def _closing_line(results: Sequence[Verification], book: Path) -> str:
    num_ok, num_broken = sum(one.ok for one in results), sum(map(is_broken, results))
    line = f"{num_ok} of {len(results)} tasks are ok"
    if not num_broken:
        return f"{line}; {book} says so of each"
    return f"{line}, {num_broken} could not be verified now; {book} keeps what was found of them before, if anything was"


if __name__ == "__main__":
    sys.exit(main())
