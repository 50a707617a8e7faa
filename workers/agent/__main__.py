"""`python -m workers.agent FILE…`: shows what happens to each key of an agent file, before it is used anywhere.

FILE is a YAML of mini-swe-agent 1.x or 2.x, or a value as in agent.step_limit=50; several are merged, and the later one wins. It prints the
version whose defaults hold, how commands are read, and for each key whether it is used, has no effect here (with the reason), or is
refused.

Exit status: 0 the file can be used; 2 it cannot, or misuse.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.agent.config import load_agent
from pipeline.agent.files import merged, parse, to_text
from pipeline.agent.keys import KeyFate, fates
from pipeline.agent.option import doubts, example, read_agent
from pipeline.agent.upstream import Flavour, flavour_of
from pipeline.commandline import MISUSE, program
from pipeline.errors import RequestError
from pipeline.message import json_line
from pipeline.request import Limits
from pipeline.screen import visible, visible_line
from pipeline.task import Task
from pipeline.taskfile import read_tasks


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(argv)  # files may follow options
    try:
        return _tell(options)
    except (OSError, ValueError, RequestError) as error:
        print(f"error: {visible_line(str(error))}", file=sys.stderr)
        return MISUSE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workers.agent"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="the agent's YAML, or a value as in agent.step_limit=50")
    add("--exact", action="store_true", help="do as mini-swe-agent does even where our own way is better")
    add("--tasks", type=Path, metavar="TASKS.jsonl", help="also print the opening messages of its first task")
    add("--merged", action="store_true", help="print the merged file instead, as requests carry it")
    add("--json", action="store_true", help="print the keys and their fates as JSON")
    return parser


def _tell(options: argparse.Namespace) -> int:
    tree = parse(to_text(merged(options.files)))
    if options.exact:
        tree.setdefault("swerve", {})["exact"] = True
    if options.merged:
        print(read_agent(options.files, exact=options.exact), end="")
        return 0
    flavour = flavour_of(tree)
    found = fates(tree, flavour)
    if options.json:
        print(json_line(found))
    else:
        print(_heading(flavour, exact=tree.get("swerve", {}).get("exact") is True))
        print(_table(found))
    for one in found:
        if one.fate == "refused":
            raise RequestError(f"{one.key}: {one.why}")
    text = read_agent(options.files, exact=options.exact)
    if options.tasks is not None:
        print(_example(text, read_tasks(options.tasks)[0]))
    return 0


def _heading(flavour: Flavour, *, exact: bool) -> str:
    how = "behaves exactly as it" if exact else "behaves as it, but for where our own way is better"
    dialect = "text" if flavour.dialect == "text" else "tool calls"
    why = f" ({flavour.why_dialect})" if flavour.why_dialect else ""
    return f"mini-swe-agent {flavour.version}: {how}; commands are read from {dialect}{why}"


def _table(found: list[KeyFate]) -> str:
    width = max((len(one.key) for one in found), default=0)
    return "\n".join(
        f"{visible_line(one.key):{width}}  {one.fate:14}  {visible_line(one.why)}" for one in found
    )


def _example(text: str, task: Task) -> str:
    config = load_agent(text)
    system, user = example(config, task, Limits())
    warnings = "".join(f"warning: {doubt}\n" for doubt in doubts(config, task, Limits()))
    return f"{warnings}\n--- system\n{visible(system)}\n--- user, for task {task.id}\n{visible(user)}"


if __name__ == "__main__":
    sys.exit(main())
