"""The demonstration's command line: ``python -m trainer.demo tasks``, ``images``, ``program`` and ``kinds``."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from pipeline.commandline import directory, program
from pipeline.harness import Harness, read_harness
from trainer.demo.lessons import RECIPE

_PROGRAM = "mini"
_ACTION = r"```bash\s*\n(.*?)\n```"


def main() -> int:
    """Run one command; returns 2 on a user's mistake."""
    parser = argparse.ArgumentParser(prog=program("trainer.demo"))
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="write a family of tasks in swe-task-generator's layout")
    tasks.add_argument("--out", type=Path, required=True)
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--train", type=int, default=96, help="number of training tasks")
    tasks.add_argument("--heldout", type=int, default=64, help="number of held-out tasks")
    tasks.add_argument(
        "--unseen",
        type=int,
        default=0,
        help="number of held-out tasks whose kinds of bug no training task has",
    )
    tasks.add_argument(
        "--image-prefix", default="swerve-demo", help="image repository; the tag is the task's name"
    )
    images = commands.add_parser(
        "images", help="build the images of a written family, skipping those present"
    )
    images.add_argument("directory", type=Path)
    program_file = commands.add_parser(
        "program", help="write the harness file of mini-swe-agent's own package with the demo's prompts"
    )
    program_file.add_argument("--out", type=Path, required=True)
    kinds = commands.add_parser("kinds", help="print held-out success before and after a run, by kind of bug")
    kinds.add_argument("run_dir", type=directory)
    options = parser.parse_args()
    try:
        return {"tasks": _tasks, "images": _images, "program": _program, "kinds": _kinds}[options.command](
            options
        )
    except ValueError as error:
        print(f"trainer.demo: {error}", file=sys.stderr)
        return 2


def _tasks(options: argparse.Namespace) -> int:
    from trainer.demo.task_directories import write_family

    count = write_family(
        options.out, seed=options.seed,
        counts={"train": options.train, "heldout": options.heldout, "unseen": options.unseen},
        image_prefix=options.image_prefix,
    )  # fmt: skip
    print(f"{count} tasks in {options.out}")
    return 0


def _images(options: argparse.Namespace) -> int:
    from trainer.demo.task_directories import build_images

    built, present = build_images(options.directory)
    print(f"{built} images built, {present} already there")
    return 0


def _program(options: argparse.Namespace) -> int:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_program(options.out)
    print(f"{options.out} written")
    return 0


def _kinds(options: argparse.Namespace) -> int:
    from pipeline.intervals import share
    from pipeline.journal.reading import journal_of, read
    from pipeline.journal.rows import EvaluationRow
    from trainer.demo.family import OPEN_KINDS, UNSEEN_KINDS, kind_of

    sides: dict[str, dict[str, list[float]]] = {"heldout_before": {}, "heldout_after": {}}
    for row in read(journal_of(options.run_dir), EvaluationRow):
        for task_id, rewards in row.rewards.items() if row.name in sides and not row.greedy else ():
            kind = kind_of(task_id.removeprefix("fleet:"))
            note = "unseen" if kind in UNSEEN_KINDS else "open" if kind in OPEN_KINDS else "spelled"
            for label in (kind, f"all {note}"):
                sides[row.name].setdefault(label, []).extend(rewards)
    print("| kind of bug | tasks | before, % | after, % |\n|---|--:|--:|--:|")
    for label, before in sorted(sides["heldout_before"].items()):
        cells = [share(rewards, len(rewards)) for rewards in (before, sides["heldout_after"].get(label, []))]
        print(
            f"| {label} | {len(before)} | {' | '.join('-' if one is None else one.cell() for one in cells)} |"
        )
    return 0


def write_program(path: Path) -> Harness:
    """Writes the harness file of the demonstration's agent program: mini-swe-agent's own package in the shipped image, with the prompts of
    the demo's agent file, on which the demo's policy was trained. Raises ValueError.
    """
    shipped = read_harness(_PROGRAM)
    words = (*shipped.harness.command, "--config={home}/agent.yaml", "--model-class=litellm_textbased")
    keys = {
        "name": _PROGRAM,
        "version": shipped.harness.version,
        "licence": shipped.licence,
        "dialect": shipped.harness.dialect,
        "command": words,
        "version_command": shipped.version_command,
        "image": shipped.harness.image,
        "uses_tools": False,
        "command_pattern": _ACTION,
    }
    tables: dict[str, Mapping[str, object]] = {
        "env": shipped.harness.env,
        "files": {"agent.yaml": json.dumps(_agent())},
        "build": {"pip": shipped.build.pip},
    }
    # The JSON of texts, lists and booleans is valid TOML, too.
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items()]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return read_harness(path).harness


def _agent() -> dict[str, dict[str, object]]:
    """The demo's agent file under mini-swe-agent 2's keys."""
    file = yaml.safe_load(RECIPE.read_text())
    agent = file["agent"]
    return {
        "agent": {
            key: agent[key] for key in ("system_template", "instance_template", "step_limit", "cost_limit")
        },
        "model": {
            "action_regex": _ACTION,
            "observation_template": agent["action_observation_template"],
            "format_error_template": agent["format_error_template"],
        },
        "environment": {"timeout": file["environment"]["timeout"]},
    }


if __name__ == "__main__":
    sys.exit(main())
