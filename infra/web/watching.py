"""How everything is at the moment, in a form whose changes are cheap to notice."""

from collections.abc import Iterator, Mapping

from infra.web import events, journal_files
from infra.web.fleet import Statuses
from infra.web.runs import JOURNAL, OpenRun
from pipeline.rollout_store import segment
from pipeline.rollout_store.reading import DIRECTORY


def marks_of(runs: Mapping[str, OpenRun], statuses: Statuses) -> events.Marks:
    """Sizes of the files of each run, and when its trainer was last heard."""
    return dict(_marks_of(runs, statuses))


def _marks_of(runs: Mapping[str, OpenRun], statuses: Statuses) -> Iterator[tuple[tuple[str, str], object]]:
    for run in runs.values():
        for name, sizes in journal_files.sizes(run.directory / JOURNAL).items():
            yield (run.id, name), sizes
        yield (run.id, "rollouts"), _newest_segment(run)
        yield (run.id, "reading"), run.reading
    for run_id, (status, is_live) in statuses.items():
        yield (run_id, "status"), (None if status is None else status.updated_at, is_live)


def _newest_segment(run: OpenRun) -> object:
    """Only the newest segment of a store grows."""
    paths = segment.segments_in(run.directory / DIRECTORY)
    try:
        return (paths[-1].name, paths[-1].stat().st_size) if paths else None
    except OSError:
        return None
