"""What each verb of the command line does, and what it prints."""

import argparse
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.taskfile import read_tasks
from workers.images.building import Builder, BuildPlan, read_recipes
from workers.images.display import line_of, watching
from workers.images.docker_images import ImageEngine
from workers.images.errors import ImageError
from workers.images.eviction import evict, our_images
from workers.images.listing import list_named, list_ours, table
from workers.images.names import parse_name
from workers.images.outcome import Outcome
from workers.images.parallel import in_parallel
from workers.images.pulling import Puller, PullPlan
from workers.images.shelf import Shelf
from workers.images.sizes import show_bytes
from workers.settings import ImageSettings, docker_host, image_settings

INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """The exit status."""
    verbs = {"pull": _pull, "build": _build, "ls": _ls, "evict": _evict}
    stopping = threading.Event()
    try:
        settings = image_settings()
        return verbs[arguments.verb](arguments, settings, stopping)
    except (ValueError, FileNotFoundError, IsADirectoryError) as error:
        print(error, file=sys.stderr)
        return 2
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        stopping.set()
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return INTERRUPTED


def named_images(sources: Iterable[str]) -> list[str]:
    """Images of task files and of lists (@FILE), each once, in order, as an engine lists them.

    Raises ValueError naming the file, and the line or task whose image has no proper name.
    """
    found: list[str] = []
    for source in sources:
        named = _listed(Path(source[1:])) if source.startswith("@") else _of_tasks(Path(source))
        for where, image in named:
            try:
                found.append(str(parse_name(image)))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return list(dict.fromkeys(found))


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield f"{path}:{number}", words[0]


def _of_tasks(path: Path) -> Iterator[tuple[str, str]]:
    for task in read_tasks(path):
        yield f"{path}: {task.id}: image", task.image


def _pull(arguments: argparse.Namespace, settings: ImageSettings, stopping: threading.Event) -> int:
    if not arguments.tasks and not arguments.image:
        raise ValueError("pull: give tasks.jsonl, @FILE or --image NAME")
    images = list(dict.fromkeys([*named_images(arguments.tasks), *arguments.image]))[: arguments.first]
    engine, shelf = _host(settings)
    plan = PullPlan(
        platform=arguments.platform or engine.platform,
        proxies=settings.proxies if arguments.proxy is None else tuple(arguments.proxy),
        retries=arguments.retries,
        budget_bytes=arguments.budget_bytes or settings.budget_bytes,
        keep=frozenset(images),
    )
    with watching(len(images), plain=arguments.json) as watch:
        puller = Puller(engine, shelf, plan, watch, stopping)
        outcomes = in_parallel(puller.pull, images, jobs=arguments.jobs)
    return _told(outcomes, arguments)


def _build(arguments: argparse.Namespace, settings: ImageSettings, stopping: threading.Event) -> int:
    only = None if arguments.only is None else named_images(arguments.only)
    recipes = read_recipes(arguments.directory, only=only)[: arguments.first]
    engine, shelf = _host(settings)
    plan = BuildPlan(
        logs=arguments.logs or settings.state_dir / "build-logs",
        build_args=dict(arguments.build_arg),
        network=arguments.network,
        force=arguments.force,
    )
    with watching(len(recipes), plain=arguments.json) as watch:
        outcomes = in_parallel(Builder(engine, shelf, plan, watch).build, recipes, jobs=arguments.jobs)
    return _told(outcomes, arguments)


def _told(outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> int:
    """Prints what came of it, the failures last; they also go to their file, which is empty if there are none."""
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if arguments.failures is not None:
        lines = [f"{outcome.image}\t{outcome.reason}\n" for outcome in failed]
        arguments.failures.write_text("".join(lines))
    if arguments.json:
        for outcome in outcomes:
            print(json.dumps(asdict(outcome)))
        return 1 if failed else 0
    tally = {
        state: sum(outcome.state == state for outcome in outcomes) for state in ("pulled", "built", "present")
    }
    parts = [f"{number} {state}" for state, number in tally.items() if number]
    print(", ".join([*parts, f"{len(failed)} failed"]))
    for outcome in failed:
        print(line_of(outcome))
    return 1 if failed else 0


def _ls(arguments: argparse.Namespace, settings: ImageSettings, _: threading.Event) -> int:
    names = named_images(arguments.tasks)
    engine, shelf = _host(settings)
    ours = our_images(engine, shelf)
    rows = list_named(names, ours, engine, shelf) if arguments.tasks else list_ours(ours, shelf)
    lines = (json.dumps(asdict(row)) for row in rows) if arguments.json else table(rows, ours)
    print(*lines, sep="\n")
    return 0 if all(row.present for row in rows) else 1


def _evict(arguments: argparse.Namespace, settings: ImageSettings, _: threading.Event) -> int:
    keep = named_images(arguments.keep)
    engine, shelf = _host(settings)
    found = evict(engine, shelf, arguments.budget_bytes, keep=keep, dry_run=arguments.dry_run)
    if arguments.json:
        evicted = [name for image in found.evicted for name in image.names or (image.id,)]
        facts = {"before_bytes": found.before_bytes, "after_bytes": found.after_bytes, "within": found.within}
        print(json.dumps({"evicted": evicted, "dry_run": arguments.dry_run, **facts}))
        return 0 if found.within else 1
    for image in found.evicted:
        print(f"{'would go' if arguments.dry_run else 'evicted'}  {', '.join(image.names) or image.id}")
    print(f"{show_bytes(found.before_bytes)} before, {show_bytes(found.after_bytes)} after")
    if not found.within:
        print(
            f"over the budget of {show_bytes(found.budget_bytes)}: all that is left is in use or to be kept"
        )
    return 0 if found.within else 1


def _host(settings: ImageSettings) -> tuple[ImageEngine, Shelf]:
    engine = ImageEngine(docker_host())
    return engine, Shelf(settings.state_dir, engine.id)
