"""Searches the files of a task's image for the answer, and decides how to treat each leak.

Files that can be removed are recorded with the verification, and removed from every agent's container. Other leaks make the task unusable:
code that is installed may be needed, and an agent without it would work in another environment than the grader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.request import Limits
from pipeline.task import Task
from pipeline.taskfile import Gold, Verification
from workers.leaks.answers import search_image
from workers.leaks.search import EVAL_SCRIPT, FoundLeak, SearchReport
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import Broken, tried, unqueued_claim

MOST_PATHS = 200  # number of paths that a request carries
NAMED_AT_MOST = 3  # number of leaks in a sentence
_FIX = "leave it out in the Dockerfile, or install what belongs to base_commit"


@dataclass(frozen=True, slots=True)
class ImageLeaks:
    """Searches images as agents would get them."""

    sandboxes: Sandboxes
    limits: Limits
    image_fix: str  # what to do about an image that is not on this host

    async def looked_for(self, done: Verification, task: Task, gold: Gold) -> Verification:
        """`done`, with the leaks of the answer in its image."""
        first = await self._search(replace(task, leaking_paths=()), gold)
        if isinstance(first, Broken):
            return _refused(done, first.why)
        kept = [one for one in _answers(first) if not one.paths]
        if kept:
            whys = "; ".join(dict.fromkeys(one.why for one in kept))
            return _refused(
                done, f"the image holds the answer: {_named(kept)}, not removed because {whys}: {_FIX}"
            )
        paths = tuple(sorted({path for one in _answers(first) for path in one.paths}))
        if len(paths) > MOST_PATHS:
            return _refused(
                done, f"{len(paths)} files of the image hold the answer, such as {_few(paths)}: {_FIX}"
            )
        if paths:
            again = await self._search(replace(task, leaking_paths=paths), gold)
            if isinstance(again, Broken):
                return _refused(done, again.why)
            if left := _answers(again):
                return _refused(
                    done, f"the image holds the answer, and cannot be cleaned of it: {_named(left)}"
                )
            removed = f"agents' containers are without what holds the answer in the image: {_few(paths)}"
            done = replace(done, leaking_paths=paths, warning=_joined(done.warning, removed))
        if first.skipped:
            skipped = f"not searched for the answer: {_few(first.skipped)}"
            done = replace(done, warning=_joined(done.warning, skipped))
        return done

    async def _search(self, task: Task, gold: Gold) -> SearchReport | Broken:
        async def search() -> SearchReport:
            claim = unqueued_claim(task, command="verify", limits=self.limits)
            async with self.sandboxes.open(claim, role="agent") as sandbox:
                return await search_image(sandbox, replace(task, workdir=sandbox.workdir), gold)

        return await tried(search, task, image_fix=self.image_fix)


def _refused(done: Verification, why: str) -> Verification:
    return replace(done, ok=False, reason=f"leaks: {why}")


def _answers(report: SearchReport) -> list[FoundLeak]:
    """The leaks that contain the answer: a name alone does not."""
    return [one for one in report.found if one.kind != EVAL_SCRIPT]


def _named(found: Sequence[FoundLeak]) -> str:
    return _few([f"{one.where} ({one.kind})" for one in found])


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
