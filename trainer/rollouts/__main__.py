"""`python -m trainer.rollouts export RUN_DIR --format traj|atif|sft|messages|parquet --out DIR`: kept rollouts for other tools.

Reads the rollouts in the directory of a run or of an evaluation (docs/rollouts.md), without Redis, also while the run continues.
traj: mini-swe-agent's ID/ID.traj.json for each request, and folders INSTANCE__NANOSECONDS with traj.json, patch.diff and
meta.json. atif: ID.json for each request, in the format of Harbor. sft: sft.jsonl, chats with the trained parts of each message, and of
each token. messages: messages.jsonl, plain chats. parquet: rollouts.parquet, one row per rollout. atif, sft and messages leave held-out
rollouts out, unless --purpose says otherwise.
Exit status 0; 1 if a rollout could not be read or a file not be written; 2 for a malformed command line.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from pipeline.commandline import VERB_PARSER, directory, program
from pipeline.errors import describe_error
from pipeline.judge import Judgement
from pipeline.request import Purpose
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.record import StoredHead
from pipeline.trajectory import Trajectory
from trainer.rollouts import export_atif
from trainer.rollouts.export_files import FineTuning, Messages, MiniFolders, SlimeFolders


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """An inclusive range of weight versions; None: open on that side."""

    first: int | None = None
    last: int | None = None

    @staticmethod
    def parse(text: str) -> "Versions":
        """Parse "3", "3..5", "3.." or "..5". Raises ValueError."""
        first, dots, last = text.partition("..")
        if not dots:
            last = first
        if not (first or last) or not all(one.isdecimal() for one in (first, last) if one):
            raise ValueError(f"{text!r}: give a version or a range, as in 3, 3..5, 3.. or ..5")
        found = Versions(first=int(first) if first else None, last=int(last) if last else None)
        if found.first is not None and found.last is not None and found.first > found.last:
            raise ValueError(f"{text!r}: the first version is above the last")
        return found

    def contains(self, first: int, last: int) -> bool:
        return (self.first is None or self.first <= first) and (self.last is None or last <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The selection that a command line makes. The default is every rollout."""

    rewards: tuple[float | None, ...] = ()  # allowed rewards; None: without a reward; empty: any
    tasks: tuple[str, ...] = ()  # shell patterns, one of which must match the task id; empty: any
    versions: Versions | None = None  # versions of the weights that sampled all its tokens; None: any
    purpose: Purpose | None = None
    outcome: str = ""  # a shell pattern

    def matches(self, stored: StoredHead) -> bool:
        head = stored.head
        if self.purpose is not None and head.purpose != self.purpose:
            return False
        if self.rewards and head.reward not in self.rewards:
            return False
        if self.tasks and not any(fnmatchcase(head.task_id, pattern) for pattern in self.tasks):
            return False
        if self.outcome and not fnmatchcase(head.outcome, self.outcome):
            return False
        if self.versions is None:
            return True
        first, last = head.version_first, head.version_last
        return first is not None and last is not None and self.versions.contains(first, last)


FORMATS = ("traj", "atif", "sft", "messages", "parquet")
LAYOUTS = ("mini", "slime", "both")


class RolloutSink(Protocol):
    """A destination to which rollouts are written one after the other."""

    @property
    def place(self) -> Path: ...

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        """Writes the rollout; returns False if it has nothing for this format."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _export(options)
    except ValueError as error:
        print(describe_error(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(describe_error(error), file=sys.stderr)
        return 1


def _export(options: argparse.Namespace) -> int:
    directory: Path = options.run_dir / DIRECTORY
    if not directory.is_dir():
        raise ValueError(
            f"{options.run_dir} holds no rollouts: give the directory of a run whose recipe keeps them, as in runs/demo"
        )
    wanted = Wanted(
        rewards=tuple(options.reward),
        tasks=tuple(options.task),
        versions=options.version,
        purpose=_purpose(options),
        outcome=options.outcome,
    )
    tally = _Tally(wanted)
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(opened) for opened in _sinks(options)]
        for stored in RolloutStore(directory).rollouts(tally.matches):
            trajectory = stored.rollout.trajectory
            if trajectory is None:
                tally.without_text += not stored.fault
                tally.damaged += bool(stored.fault)
            elif any([sink.write(trajectory, stored.rollout.judgement) for sink in sinks]):
                tally.exported += 1
            else:
                tally.without_text += 1
            if options.limit and tally.exported >= options.limit:
                break
        places = dict.fromkeys(str(sink.place) for sink in sinks)
    print(tally.text(", ".join(places)))
    return 1 if tally.damaged else 0


def _purpose(options: argparse.Namespace) -> Purpose | None:
    """The purpose of the exported rollouts. Training data must not contain held-out tasks unless the user asks for it."""
    chosen = options.purpose or ("train" if options.format in ("atif", "sft", "messages") else "all")
    return None if chosen == "all" else chosen


class _Tally:
    """The number of exported rollouts, and the reasons why others were not exported."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.exported = self.not_wanted = self.without_text = self.damaged = 0

    def matches(self, stored: StoredHead) -> bool:
        is_wanted = self._wanted.matches(stored)
        self.not_wanted += not is_wanted
        return is_wanted

    def text(self, place: str) -> str:
        left_out = [
            f"{number} {why}"
            for number, why in (
                (self.not_wanted, f"not chosen (purpose {self._wanted.purpose or 'all'})"),
                (self.without_text, "without any reply"),
                (self.damaged, "damaged"),
            )
            if number
        ]
        rest = f"; left out: {', '.join(left_out)}" if left_out else ""
        return f"{self.exported} rollouts in {place}{rest}"


def _sinks(options: argparse.Namespace) -> list[AbstractContextManager[RolloutSink]]:
    out: Path = options.out
    match options.format:
        case "traj":
            folders: dict[str, Callable[[Path], RolloutSink]] = {"mini": MiniFolders, "slime": SlimeFolders}
            return [
                contextlib.nullcontext(make(out))
                for name, make in folders.items()
                if options.layout in (name, "both")
            ]
        case "atif":
            sink = export_atif.AtifDocuments(
                out, version=options.atif_version, with_prompts=options.prompt_ids
            )
            return [contextlib.nullcontext(sink)]
        case "sft":
            return [FineTuning(out)]
        case "messages":
            return [Messages(out)]
        case _:
            from trainer.rollouts.export_table import RolloutTable  # pyarrow is needed for this format only

            return [RolloutTable(out)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("trainer.rollouts"), description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VERB_PARSER, metavar="VERB")
    export = verbs.add_parser(
        "export", help="write kept rollouts in the shape of another tool", description=__doc__
    )
    export.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    export.add_argument("--format", choices=FORMATS, required=True)
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    export.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="both",
        help="of traj: mini-swe-agent's folders, those of slime-based systems, or both; default both",
    )
    export.add_argument(
        "--atif-version",
        choices=export_atif.VERSIONS,
        default=export_atif.VERSIONS[-1],
        help="of atif: the version of the format; default %(default)s",
    )
    export.add_argument(
        "--prompt-ids",
        action="store_true",
        help="of atif: each step also has the ids of its whole prompt, so that a file grows with the square of the number of turns",
    )
    _add_choices(export)
    return parser


def _add_choices(export: argparse.ArgumentParser) -> None:
    """The flags that choose rollouts."""
    export.add_argument(
        "--reward",
        type=_reward,
        action="append",
        default=[],
        metavar="R",
        help="only rollouts with this reward, a number or none; may be repeated",
    )
    export.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="GLOB",
        help="only of tasks whose id matches, as in 'fleet:*'; may be repeated",
    )
    export.add_argument(
        "--version",
        type=_versions,
        metavar="A..B",
        help="only rollouts sampled by these weight versions from the first token to the last, as in 3, 3..5 or 3..",
    )
    export.add_argument("--outcome", default="", metavar="GLOB", help="only of this outcome, as in submitted*")
    export.add_argument(
        "--purpose",
        choices=("train", "eval", "all"),
        help="training or held-out rollouts; default train for atif, sft and messages, all for traj and parquet",
    )
    export.add_argument("--limit", type=int, default=0, metavar="N", help="no more than N, the oldest")


def _reward(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number such as 0 or 1, or none") from error


def _versions(text: str) -> Versions:
    try:
        return Versions.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
