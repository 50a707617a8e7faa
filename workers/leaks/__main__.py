"""`python -m workers.leaks TASKS.jsonl`: searches what an agent could find of the answers to these tasks

Opens each task's container as an episode does, cleaned if necessary, and without the leaks that TASKS.verified.jsonl names. Searches it
for: git objects besides the history of the base commit; hidden paths; eval scripts; other copies of the repository; and the known solution
and the hidden tests (from TASKS.gold.jsonl, if that exists) in the problem statement and in all files of the image that are not the base
commit's, also in archives, compressed copies, packages, git objects and bytecode. Needs a Docker host and the tasks' images.

Exit status: 0 nothing found; 1 something was found, a task could not be searched, or no Docker host answers; 2 misuse.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pipeline.commandline import FAILED, MISUSE, program
from pipeline.errors import RolloutError, SandboxError, describe_error
from pipeline.screen import visible_line
from pipeline.task import Task
from pipeline.taskfile import Gold, gold_path, read_gold
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Misconfigured, Sandboxes
from workers.unqueued import unqueued_claim, verified_tasks


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list. `agent_image` is the task's own image unless that had to be cleaned."""

    task: str
    image: str
    agent_image: str  # "" if no sandbox could be opened
    ok: bool
    leaks: list[str]
    failure: str = ""  # why the task could not be searched
    paths: list[str] = []  # paths in the image that `workers.verify` would add to the removed ones
    skipped: list[str] = []  # files that were not looked into, because a limit was reached


async def look(sandboxes: Sandboxes, task: Task, gold: Gold | None) -> Finding:
    """Finds what an agent of `task` could find of the answer."""
    from workers.leaks.agent_images import UNCOMMITTED, find_leaks
    from workers.leaks.answers import answers_in_problem, leaks_of, search_image

    leaks = answers_in_problem(task, gold)
    agent_image = failure = ""
    skipped: list[str] = []
    paths: set[str] = set()
    try:
        async with sandboxes.open(unqueued_claim(task, command="leaks"), role="agent") as sandbox:
            agent_image, task = sandbox.image, replace(task, workdir=sandbox.workdir)
            leaks += [leak for leak in await find_leaks(sandbox, task) if leak.kind != UNCOMMITTED]
            report = await search_image(sandbox, task, gold)
            leaks += leaks_of(report.found)
            paths.update(path for one in report.found for path in one.paths)
            skipped += report.skipped
    except RolloutError as error:
        failure = str(error)
    return Finding(
        task=task.id,
        image=task.image,
        agent_image=agent_image,
        ok=not leaks and not failure,
        leaks=[str(leak) for leak in leaks],
        failure=failure,
        paths=sorted(paths),
        skipped=skipped,
    )


async def _look_at_all(
    sandboxes: Sandboxes, tasks: list[Task], golds: dict[str, Gold], jobs: int
) -> list[Finding]:
    """Raises SandboxError if no sandbox can be opened at all."""
    slots = asyncio.Semaphore(jobs)

    async def one(task: Task) -> Finding:
        async with slots:
            finding = await look(sandboxes, task, golds.get(task.id))
        print(_row(finding), flush=True)
        return finding

    try:
        await sandboxes.check()
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(one(task), name=task.id) for task in tasks]
    finally:
        await sandboxes.close()
    return [finished.result() for finished in looks]


def _row(finding: Finding) -> str:
    state = "ok   " if finding.ok else "FAILS" if finding.failure else "LEAKS"
    cleaned = (
        "cleaned"
        if finding.agent_image not in ("", finding.image)
        else "as is"
        if finding.agent_image
        else "-"
    )
    head = f"{state}  {cleaned:7}  {finding.task}  {finding.image}"
    more = [*finding.leaks, *([finding.failure] if finding.failure else [])]
    more += [f"not looked into: {one}" for one in finding.skipped]
    return "\n".join(map(visible_line, [head, *(f"{'':16}{text}" for text in more)]))


def _read(path: Path) -> tuple[list[Task], dict[str, Gold]]:
    """Raises ValueError, OSError."""
    beside = gold_path(path)
    return verified_tasks(path), read_gold(beside) if beside.exists() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("workers.leaks"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tasks", type=Path, metavar="TASKS.jsonl", help="a task file, as workers.tasksets writes them"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the findings to OUT as a JSON list")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="search N tasks at once; default %(default)s"
    )
    options = parser.parse_args(arguments)
    try:
        tasks, golds = _read(options.tasks)
        sandboxes = command_sandboxes(fleet=f"leaks-{secrets.token_hex(6)}")
    except (ValueError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    if not tasks or options.jobs < 1:
        print(
            f"error: {f'{options.tasks} holds no task' if not tasks else '--jobs: at least 1'}",
            file=sys.stderr,
        )
        return MISUSE
    try:
        findings = asyncio.run(_look_at_all(sandboxes, tasks, golds, options.jobs))
    except Misconfigured as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    except SandboxError as error:
        print(
            f"error: no Docker host answers ({describe_error(error)}): start it, or set DOCKER_HOST",
            file=sys.stderr,
        )
        return FAILED
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")
    bad = [finding for finding in findings if not finding.ok]
    without = "" if golds else "; no known solutions to look for"
    print(f"{len(findings)} tasks, {len(bad)} with something to find{without}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
