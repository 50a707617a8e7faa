"""The verbs of `python -m workers.images`, their output and their progress display."""

import argparse
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text

from pipeline.errors import describe_error
from pipeline.message import json_line
from pipeline.screen import visible_line
from pipeline.taskfile import read_tasks
from workers.display import Display, open_display
from workers.images.api import ImageApi, ImageError, in_parallel
from workers.images.eviction import Entry, OurImage, Shelf, evict, our_images, taken_bytes
from workers.images.names import parse_name, show_bytes
from workers.images.pulling import Builder, BuildPlan, ImageResult, Puller, PullPlan, read_build_directories
from workers.settings import ImageSettings, docker_host, image_settings


@dataclass(frozen=True, slots=True)
class Listed:
    """One name. `managed`: Swerve pulled or built it, so eviction may remove it."""

    image: str
    present: bool
    managed: bool = False
    in_use: bool = False  # a container was made of it, or an episode holds it
    size_bytes: int = 0  # size of all its layers, shared or not
    digest: str = ""  # digest of its manifest; "" if it was built here
    last_used_at: float = 0.0  # Unix seconds; 0: no worker has used it


def list_ours(ours: Sequence[OurImage], shelf: Shelf) -> list[Listed]:
    """Every name that Swerve manages, least recently used first."""
    entries = shelf.entries()
    return [_ours(name, image, entries.get(name)) for image in ours for name in image.names or (image.id,)]


def list_named(names: Sequence[str], ours: Sequence[OurImage], api: ImageApi, shelf: Shelf) -> list[Listed]:
    """Each of `names` in order, whether Swerve manages it or not."""
    by_name = {name: image for image in ours for name in image.names}
    entries, uses, used_ids = shelf.entries(), shelf.uses(), api.used_ids()

    def listed(name: str) -> Listed:
        if name in by_name:
            return _ours(name, by_name[name], entries.get(name))
        found = api.find(name)
        if found is None:
            return Listed(name, present=False, last_used_at=uses.get(name, 0.0))
        digest = next((digest.partition("@")[2] for digest in found.digests), "")
        used = found.id in used_ids
        return Listed(name, True, False, used, found.size_bytes, digest, uses.get(name, 0.0))

    return [listed(name) for name in names]


def _ours(name: str, image: OurImage, entry: Entry | None) -> Listed:
    digest = entry.digest if entry else ""
    return Listed(name, True, True, image.in_use, image.size_bytes, digest, image.used_at)


def table(rows: Sequence[Listed], ours: Sequence[OurImage]) -> Iterator[str]:
    """The lines to print, ending with a summary."""
    for row in rows:
        state = ("ours" if row.managed else "there") if row.present else "missing"
        size = show_bytes(row.size_bytes) if row.present else ""
        used = f"used {_age(time.time() - row.last_used_at)} ago" if row.last_used_at else "never used"
        digest = row.digest.removeprefix("sha256:")[:12]
        yield f"{state:<8}{size:>9}  {digest:<12}  {used:<14}  {'in use' if row.in_use else '':<6}  {row.image}"
    num_missing = sum(not row.present for row in rows)
    yield f"{len(rows)} images, {num_missing} missing; all of Swerve's take {show_bytes(taken_bytes(ours))}"


def _age(seconds: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


class Displayed:
    """An ImageObserver that shows progress."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def began(self, image: str) -> None:
        self._display.begin(image)

    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None:
        note = f"{show_bytes(done_bytes)} of {show_bytes(total_bytes)}"
        self._display.advance(image, note, done=done_bytes, total=total_bytes)

    def remark(self, image: str, text: str) -> None:
        self._display.remark(image, text)

    def ended(self, result: ImageResult) -> None:
        self._display.finish(result.image, [Text(str(result))], ok=result.state != "failed")


INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit status."""
    verbs = {"pull": _pull, "build": _build, "ls": _ls, "evict": _evict}
    stopping = threading.Event()
    try:
        settings = image_settings()
        return verbs[arguments.verb](arguments, settings, stopping)
    except (ValueError, OSError) as error:
        print(describe_error(error), file=sys.stderr)
        return 2
    except ImageError as error:
        print(describe_error(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        stopping.set()
        print("interrupted; the same command continues where this one stopped", file=sys.stderr)
        return INTERRUPTED


def named_images(sources: Iterable[str]) -> list[str]:
    """Images of task files and of lists (@FILE), each once, in order, as a Docker host lists them.
    Raises ValueError that names the file, and the line or task whose image has a malformed name.
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
    api, shelf = _host(settings)
    plan = PullPlan(
        platform=arguments.platform or api.platform,
        proxies=settings.proxies if arguments.proxy is None else tuple(arguments.proxy),
        retries=arguments.retries,
        budget_bytes=arguments.budget_bytes or settings.budget_bytes,
        keep=frozenset(images),
    )
    with _display(len(images), arguments) as display:
        puller = Puller(api, shelf, plan, Displayed(display), stopping)
        results = in_parallel(puller.pull, images, jobs=arguments.jobs)
    return _report(results, arguments)


def _build(arguments: argparse.Namespace, settings: ImageSettings, stopping: threading.Event) -> int:
    only = None if arguments.only is None else named_images(arguments.only)
    sources = read_build_directories(arguments.directory, only=only)[: arguments.first]
    api, shelf = _host(settings)
    plan = BuildPlan(
        logs=arguments.logs or settings.state_dir / "build-logs",
        build_args=dict(arguments.build_arg),
        network=arguments.network,
        force=arguments.force,
    )
    with _display(len(sources), arguments) as display:
        builder = Builder(api, shelf, plan, Displayed(display))
        results = in_parallel(builder.build, sources, jobs=arguments.jobs)
    return _report(results, arguments)


def _display(num_images: int, arguments: argparse.Namespace) -> Display:
    """A display on standard error, so that standard output contains only the results."""
    return open_display(sys.stderr, items="images", num_items=num_images, plain=arguments.json)


def _report(results: Sequence[ImageResult], arguments: argparse.Namespace) -> int:
    """Print the results, failures last. Failures also go to the file of --failures, which is empty if there are none."""
    failed = [result for result in results if result.state == "failed"]
    if arguments.failures is not None:
        lines = [f"{result.image}\t{visible_line(result.reason)}\n" for result in failed]
        arguments.failures.write_text("".join(lines))
    if arguments.json:
        for result in results:
            print(json_line(asdict(result)))
        return 1 if failed else 0
    tally = {
        state: sum(result.state == state for result in results) for state in ("pulled", "built", "present")
    }
    parts = [f"{number} {state}" for state, number in tally.items() if number]
    print(", ".join([*parts, f"{len(failed)} failed"]))
    for result in failed:
        print(visible_line(str(result)))
    return 1 if failed else 0


def _ls(arguments: argparse.Namespace, settings: ImageSettings, _: threading.Event) -> int:
    names = named_images(arguments.tasks)
    api, shelf = _host(settings)
    ours = our_images(api, shelf)
    rows = list_named(names, ours, api, shelf) if arguments.tasks else list_ours(ours, shelf)
    lines = (json_line(asdict(row)) for row in rows) if arguments.json else table(rows, ours)
    print(*map(visible_line, lines), sep="\n")
    return 0 if all(row.present for row in rows) else 1


def _evict(arguments: argparse.Namespace, settings: ImageSettings, _: threading.Event) -> int:
    keep = named_images(arguments.keep)
    api, shelf = _host(settings)
    found = evict(api, shelf, arguments.budget_bytes, keep=keep, dry_run=arguments.dry_run)
    if arguments.json:
        evicted = [name for image in found.evicted for name in image.names or (image.id,)]
        facts = {"before_bytes": found.before_bytes, "after_bytes": found.after_bytes, "within": found.within}
        print(json_line({"evicted": evicted, "dry_run": arguments.dry_run, **facts}))
        return 0 if found.within else 1
    for image in found.evicted:
        names = visible_line(", ".join(image.names) or image.id)
        print(f"{'would evict' if arguments.dry_run else 'evicted'}  {names}")
    print(f"{show_bytes(found.before_bytes)} before, {show_bytes(found.after_bytes)} after")
    if not found.within:
        print(
            f"over the budget of {show_bytes(found.budget_bytes)}: all other images are in use or are to be kept"
        )
    return 0 if found.within else 1


def _host(settings: ImageSettings) -> tuple[ImageApi, Shelf]:
    host = docker_host()
    try:
        api = ImageApi(host)
    except ImageError as error:
        raise ImageError(f"{error}: start Docker, or set DOCKER_HOST") from error
    return api, Shelf(settings.state_dir, api.id)
