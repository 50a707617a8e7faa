"""A data set of tasks: files of tasks with all that is beside them, joined without duplicates, divided, and described.

Two tasks are the same if they have one problem, if their known fixes change the same lines among the same lines, whatever the file and the
repository, or if in one repository their fixes change the same functions and the same tests need them.
"""

import argparse
import hashlib
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from pipeline import diff
from pipeline.rollout_store.reading import stores_of
from pipeline.runners import LANGUAGES
from pipeline.task import Task, unpack
from pipeline.taskfile import (
    Gold,
    TaskProvenance,
    Verification,
    gold_path,
    provenance_path,
    read_gold,
    read_provenance,
    read_tasks,
    read_verified,
    standing,
    verified_path,
    write_gold,
    write_provenance,
    write_tasks,
    write_verified,
)

_LANGUAGES = {f".{ending}": one.name for one in LANGUAGES for ending in one.endings}
_NUM_EXAMPLES = 3
_BESIDE = (gold_path, verified_path, provenance_path, Path)
"""The paths of the files of a data set, by that of the tasks, which come last."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Tasks in their order, and by their ids what is known of them."""

    tasks: Sequence[Task] = ()
    golds: Mapping[str, Gold] = field(default_factory=dict[str, Gold])
    verified: Mapping[str, Verification] = field(default_factory=dict[str, Verification])
    provenance: Mapping[str, TaskProvenance] = field(default_factory=dict[str, TaskProvenance])

    def write(self, path: Path, tasks: Sequence[Task]) -> None:
        """Writes these of the tasks, with what is known of them and nothing else, also where another file was. Raises ValueError if one has
        no solution, and then writes nothing; OSError, and then the files that were there are whole, because they may be what was read.
        """
        if without := [task.id for task in tasks if task.id not in self.golds]:
            raise ValueError(
                f"{', '.join(without[:_NUM_EXAMPLES])}: no solution in the .gold.jsonl beside the task file"
            )
        if path.is_dir():
            raise ValueError(f"{path}: a directory; give the name of a file")
        verified = [self.verified[task.id] for task in tasks if task.id in self.verified]
        known = [self.provenance[task.id] for task in tasks if task.id in self.provenance]
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".") as directory:
            partial = Path(directory) / path.name
            write_tasks(partial, tasks)
            write_gold(gold_path(partial), (self.golds[task.id] for task in tasks))
            if verified or verified_path(path).exists():
                write_verified(verified_path(partial), verified)
            if known or provenance_path(path).exists():
                write_provenance(provenance_path(partial), known)
            for beside in _BESIDE:
                if beside(partial).exists():
                    beside(partial).replace(beside(path))


def read_dataset(paths: Iterable[Path]) -> Dataset:
    """The tasks of several files. Of what they say of one task, the first counts, and a verification of its present form before others.
    Raises ValueError for a malformed line, and for an id that two different tasks have.
    """
    tasks: dict[str, Task] = {}
    golds: dict[str, Gold] = {}
    verified: dict[str, Verification] = {}
    provenance: dict[str, TaskProvenance] = {}
    for path in paths:
        found_golds = read_gold(gold_path(path)) if gold_path(path).exists() else {}
        found_verified = read_verified(verified_path(path)) if verified_path(path).exists() else {}
        found_provenance = read_provenance(provenance_path(path)) if provenance_path(path).exists() else {}
        for task in read_tasks(path):
            if tasks.setdefault(task.id, task) != task:
                raise ValueError(f"{path}: id: another file has a different task with the id {task.id!r}")
            if task.id in found_golds:
                golds.setdefault(task.id, found_golds[task.id])
            if task.id in found_provenance:
                provenance.setdefault(task.id, found_provenance[task.id])
            if task.id in found_verified and not standing(verified, task):
                one = standing(found_verified, task) or verified.get(task.id, found_verified[task.id])
                verified[task.id] = one
    return Dataset(tuple(tasks.values()), golds, verified, provenance)


def without_duplicates(dataset: Dataset) -> tuple[list[Task], dict[str, list[tuple[str, str]]]]:
    """The first task of each that are the same; and by the reason the ids of the others, each with that of the task that it repeats."""
    kept: list[Task] = []
    repeated = defaultdict[str, list[tuple[str, str]]](list)
    seen: dict[str, dict[object, str]] = defaultdict(dict)
    for task in dataset.tasks:
        marks = _marks(task, dataset)
        told = next(((why, seen[why][mark]) for why, mark in marks.items() if mark in seen[why]), None)
        if told:
            repeated[told[0]].append((task.id, told[1]))
            continue
        kept.append(task)
        for why, mark in marks.items():
            seen[why][mark] = task.id
    return kept, dict(repeated)


def _marks(task: Task, dataset: Dataset) -> dict[str, object]:
    """What would be equal in a task that is the same, by the reason why it is."""
    marks: dict[str, object] = {"has the problem of": (task.repo, " ".join(task.problem.split()))}
    if gold := dataset.golds.get(task.id):
        sections = diff.sections(gold.patch.encode())
        change = tuple(
            tuple((sign, b"".join(line.split())) for sign, line in hunk.lines)
            for section in sections
            for hunk in section.hunks
        )
        if change:
            marks["has the fix of"] = change
        places = frozenset(
            (section.new or section.old, hunk.heading.strip())
            for section in sections
            for hunk in section.hunks
        )
        needing = _needing_fix(task, dataset)
        if needing and all(heading for _, heading in places):
            marks["has the functions and tests of"] = (task.repo, places, needing)
    return marks


def _needing_fix(task: Task, dataset: Dataset) -> frozenset[str]:
    """The tests that do not pass without the fix; none if the task was not calibrated."""
    known = standing(dataset.verified, task)
    calibration = unpack(known.calibration if known else task.calibration)
    return frozenset(calibration.needing_fix if calibration else ())


def rates_of(directories: Iterable[Path]) -> dict[str, float]:
    """The share of the kept rollouts with a reward that have reward 1, by task. Raises ValueError for a directory without any."""
    rewards = defaultdict[str, list[bool]](list)
    for directory in directories:
        found = [stored.head for store in stores_of(directory) for stored in store.heads()]
        if not any(head.reward is not None for head in found):
            raise ValueError(
                f"--rates: {directory} has no rollout with a reward; give an evaluation's directory"
            )
        for head in found:
            if head.reward is not None:
                rewards[head.task_id].append(head.reward == 1)
    return {task_id: fmean(values) for task_id, values in rewards.items()}


# -- join


def add_join_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="TASKS.jsonl")
    add("--out", type=Path, required=True, metavar="ALL.jsonl")
    _add_rates(parser)
    help_ = "leave out tasks that are solved less often; needs --rates"
    add("--min-rate", type=_share, default=0.0, metavar="R", help=help_)
    help_ = "leave out tasks that are solved more often; needs --rates"
    add("--max-rate", type=_share, default=1.0, metavar="R", help=help_)
    parser.set_defaults(run=_join)


def _add_rates(parser: argparse.ArgumentParser) -> None:
    help_ = "the directory of an evaluation, whose rollouts say how often a task is solved; may be repeated"
    parser.add_argument("--rates", type=Path, action="append", default=[], metavar="DIR", help=help_)


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share between 0 and 1")
    return number


def _join(options: argparse.Namespace) -> str:
    if (options.min_rate, options.max_rate) != (0, 1) and not options.rates:
        raise ValueError("--min-rate and --max-rate: give --rates, an evaluation of the tasks")
    dataset = read_dataset(options.paths)
    tasks, repeated = without_duplicates(dataset)
    lines = [
        f"-{len(found)}  {why} another task (such as {found[0][0]}: {found[0][1]})"
        for why, found in repeated.items()
    ]
    if options.rates:
        rates = rates_of(options.rates)
        reasons = {
            task.id: "was not played" if task.id not in rates
            else "is solved too seldom" if rates[task.id] < options.min_rate
            else "is solved too often" if rates[task.id] > options.max_rate
            else ""
            for task in tasks
        }  # fmt: skip
        by_reason = defaultdict[str, list[str]](list)
        for task_id, why in reasons.items():
            by_reason[why].append(task_id)
        tasks = [task for task in tasks if not reasons[task.id]]
        lines += [f"-{len(found)}  {why} (such as {found[0]})" for why, found in by_reason.items() if why]
    if not tasks:
        raise ValueError("; ".join(["no task is left, so nothing was written", *lines]))
    dataset.write(options.out, tasks)
    return "\n".join(
        [
            f"{len(dataset.tasks)} tasks in {len(options.paths)} files",
            *lines,
            f"{len(tasks)} tasks in {options.out}",
        ]
    )


# -- split


def add_split_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="TASKS.jsonl")
    help_ = "number of tasks to train on; default: all that are not held out"
    add("--train", type=_positive, metavar="N", help=help_)
    help_ = "number of tasks to hold out, or a share such as 0.1"
    add("--heldout", type=_amount, required=True, metavar="M", help=help_)
    help_ = (
        "hold out single tasks, whole repositories until that number is reached, or the newest; default: task"
    )
    add("--by", choices=("task", "repository", "time"), default="task", help=help_)
    add("--seed", type=int, default=0, help="tasks are chosen by their ids and this number")
    add("--out", type=Path, metavar="DIR", help="where to write both; default: beside TASKS.jsonl")
    parser.set_defaults(run=_split)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _amount(text: str) -> float:
    """A whole number of at least 1, or a share between 0 and 1."""
    number = float(text)
    if not number > 0 or (number >= 1 and not number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tasks nor a share of them")
    return number


def _split(options: argparse.Namespace) -> str:
    dataset = read_dataset([options.path])
    order = _orders(dataset, options.seed)[options.by](dataset.tasks)
    train, held = divided(
        dataset.tasks, order, options.train, options.heldout, whole=options.by == "repository"
    )
    out = options.out or options.path.parent
    written = {
        out / f"{options.path.stem}.{name}.jsonl": part
        for name, part in (("train", train), ("heldout", held))
    }
    if without := [task.id for task in (*train, *held) if task.id not in dataset.golds]:
        raise ValueError(f"{gold_path(options.path)}: no solution of {', '.join(without[:_NUM_EXAMPLES])}")
    for file, part in written.items():
        dataset.write(file, part)
    return "\n".join(f"{len(part)} tasks in {file}" for file, part in written.items())


def _orders(dataset: Dataset, seed: int) -> Mapping[str, Callable[[Sequence[Task]], list[Task]]]:
    """The orders in which tasks are held out, by the name of the option --by. They depend on ids and seed, not on the order of a file."""

    def rank(text: str) -> str:
        return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()

    def by_time(tasks: Sequence[Task]) -> list[Task]:
        if without := [task.id for task in tasks if task.id not in dataset.provenance]:
            raise ValueError(
                f"--by time: no provenance says when {without[0]} was made; split by task or repository"
            )
        when = {task.id: dataset.provenance[task.id].authored for task in tasks}
        return sorted(tasks, key=lambda task: (_instant(when[task.id], task.id), task.id), reverse=True)

    return {
        "task": lambda tasks: sorted(tasks, key=lambda task: rank(task.id)),
        "repository": lambda tasks: sorted(tasks, key=lambda task: (rank(task.repo), rank(task.id))),
        "time": by_time,
    }


def _instant(text: str, task_id: str) -> float:
    """The Unix seconds of a time in ISO 8601. Raises ValueError naming the task of the provenance."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"--by time: the provenance of {task_id} has no date: authored: {error}") from error


def divided(
    tasks: Sequence[Task],
    order: Sequence[Task],
    num_train: int | None,
    heldout: float,
    *,
    whole: bool = False,
) -> tuple[list[Task], list[Task]]:
    """Two lists of `tasks`, each in their order: the first of `order` are held out, `heldout` of them, a share if below 1; `num_train` of
    the next are trained. If `whole`, all tasks of a repository are on one side, and as many more are held out. Raises ValueError if there
    are not enough, or either would be empty.
    """
    num_heldout = round(heldout * len(tasks)) if heldout < 1 else int(heldout)
    while whole and 0 < num_heldout < len(order) and order[num_heldout].repo == order[num_heldout - 1].repo:
        num_heldout += 1
    num_train = len(tasks) - num_heldout if num_train is None else num_train
    if num_train < 1 or num_heldout < 1 or num_train + num_heldout > len(tasks):
        raise ValueError(
            f"{len(tasks)} tasks cannot be divided into {num_train} to train on and {num_heldout} held out"
            f"{', whole repositories' if whole else ''}"
        )
    ids = [task.id for task in order]
    held, trained = set(ids[:num_heldout]), set(ids[num_heldout : num_heldout + num_train])
    return [task for task in tasks if task.id in trained], [task for task in tasks if task.id in held]


# -- report


@dataclass(frozen=True, slots=True)
class Described:
    """What the report says of one task."""

    repository: str
    language: str
    kind: str  # "history", kinds of planted bugs, or the source that the id begins with
    year: str
    num_words: int
    num_lines: int  # added and removed by the known fix
    num_files: int
    num_needing_fix: int  # tests
    control: str
    weakness: float | None
    rate: float | None


def add_report_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", type=Path, nargs="+", metavar="TASKS.jsonl")
    parser.add_argument("--out", type=Path, metavar="PICTURE.png", help="draw the distributions, too")
    _add_rates(parser)
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> str:
    dataset = read_dataset(options.paths)
    if not dataset.tasks:
        raise ValueError(f"no tasks in {', '.join(map(str, options.paths))}")
    rates = rates_of(options.rates) if options.rates else {}
    described = [_described(task, dataset, rates) for task in dataset.tasks]
    if options.out:
        draw(described, options.out)
    return "\n".join(report_lines(described, without_duplicates(dataset)[1]))


def _described(task: Task, dataset: Dataset, rates: Mapping[str, float]) -> Described:
    gold, known = dataset.golds.get(task.id), standing(dataset.verified, task)
    origin = dataset.provenance.get(task.id)
    sections = diff.sections(gold.patch.encode()) if gold else []
    paths = [
        PurePosixPath((section.new or section.old or b"").decode("utf-8", "replace")) for section in sections
    ]
    languages = Counter(_LANGUAGES[path.suffix] for path in paths if path.suffix in _LANGUAGES)
    return Described(
        repository=task.repo or "-",
        language=languages.most_common(1)[0][0] if languages else "-",
        kind=(", ".join(origin.bugs) or "history") if origin else task.id.partition(":")[0],
        year=origin.authored[:4] if origin else "-",
        num_words=len(task.problem.split()),
        num_lines=sum(
            sign != b" " for section in sections for hunk in section.hunks for sign, _ in hunk.lines
        ),
        num_files=len(sections),
        num_needing_fix=known.num_needing_fix if known else 0,
        control=known.control if known else "not verified",
        weakness=known.weakness if known else None,
        rate=rates.get(task.id),
    )


def report_lines(described: Sequence[Described], repeated: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """The report as text: a table with a row for each repository, and how often each kind, language, year and control occurs."""
    num_repeated = sum(map(len, repeated.values()))
    yield f"{len(described)} tasks of {len({one.repository for one in described})} repositories, {num_repeated} of them repeat another"
    yield ""
    rows: list[tuple[str, ...]] = [
        ("repository", "tasks", "lines", "files", "tests", "words", "weakness", "solved")
    ]
    by_repository = defaultdict[str, list[Described]](list)
    for one in described:
        by_repository[one.repository].append(one)
    for repository, ones in [*sorted(by_repository.items()), ("all", list(described))]:
        numbers = ([one.num_lines for one in ones], [one.num_files for one in ones],
                   [one.num_needing_fix for one in ones], [one.num_words for one in ones])  # fmt: skip
        shares = ([one.weakness for one in ones], [one.rate for one in ones])
        rows.append((repository, str(len(ones)), *map(_spread, numbers), *map(_mean, shares)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
    yield ""
    for title in ("language", "kind", "year", "control"):
        counts = Counter(getattr(one, title) for one in described)
        yield f"{title:<10}" + ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _spread(values: Sequence[int]) -> str:
    return f"{median(values):g} ({min(values)} to {max(values)})"


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f} (n = {len(known)})" if known else "-"


def draw(described: Sequence[Described], picture: Path) -> None:
    """Draws the distributions of the tasks into a PNG picture."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # its types are incomplete
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 6.5), dpi=110)
    panels = list(axes.flat)
    for panel, (title, values) in zip(panels, (
        ("lines of the known fix", [one.num_lines for one in described]),
        ("tests that need the fix", [one.num_needing_fix for one in described]),
        ("words of the problem", [one.num_words for one in described]),
        ("weakness (share of wrong patches)", [one.weakness for one in described]),
        ("solved (share of episodes)", [one.rate for one in described]),
    ), strict=False):  # fmt: skip
        _histogram(panel, title, [value for value in values if value is not None])
    for panel, title in zip(panels[5:], ("kind", "repository", "year"), strict=True):
        counts = Counter(getattr(one, title) for one in described).most_common(8)[::-1]
        counts = sorted(counts, reverse=True) if title == "year" else counts
        panel.barh([name[-28:] for name, _ in counts], [count for _, count in counts], color="#1f4e79")
        panel.set_title(title, fontsize=8)
    for panel in panels:
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{len(described)} tasks", x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)


def _histogram(panel: Any, title: str, values: Sequence[float]) -> None:
    panel.set_title(title, fontsize=8)
    if not values:
        panel.text(0.5, 0.5, "not measured", ha="center", va="center", transform=panel.transAxes)
        return
    if "share" in title:
        panel.hist(values, bins=[number / 10 for number in range(11)], color="#1f4e79")
    else:
        width = max(1, -(-int(max(values)) // 20))
        panel.hist(values, bins=[number * width - 0.5 for number in range(22)], color="#1f4e79")
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.set_ylabel("tasks", fontsize=8)
