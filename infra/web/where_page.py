"""Where the time of a run went, as `swerve where` says it; what engines did is left out where it takes reading many rollouts.

It reads the whole journal, so the answer for a run that goes on is kept for some time: reading it anew takes at most a twentieth of the
time.
"""

import threading
import time
from dataclasses import dataclass, field

from msgspec import structs

from infra.web.run_journal import JsonRow, sizes
from infra.web.runs import OpenRun
from pipeline.journal.reading import JOURNAL, MalformedJournal
from pipeline.where.findings import where

MAX_ROLLOUT_BYTES = 64 * 1024**2  # compressed; more take seconds to read
KEPT_S, KEPT_FACTOR = 5.0, 20.0
"""The shortest time for which an answer is kept, and the multiple of the time that it took."""


@dataclass(slots=True)
class _Kept:
    page: JsonRow
    sizes: object
    until: float  # monotonic seconds


@dataclass(slots=True)
class WherePages:
    """The answers about runs, by id. Threads may call it; one at a time reads."""

    _kept: dict[str, _Kept] = field(default_factory=dict[str, _Kept])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, run: OpenRun) -> JsonRow:
        """The accounts and the advice; `unreadable` says why there are none, and `is_outdated` that the journal has changed since."""
        with self._lock:
            now, kept = sizes(run.directory / JOURNAL), self._kept.get(run.id)
            if kept is not None and (kept.sizes == now or time.monotonic() < kept.until):
                return kept.page | {"is_outdated": kept.sizes != now}
            began_at = time.monotonic()
            page = _page(run) | {"is_outdated": False}
            took_s = time.monotonic() - began_at
            self._kept[run.id] = _Kept(page, now, began_at + max(KEPT_S, KEPT_FACTOR * took_s))
            return page


def _page(run: OpenRun) -> JsonRow:
    try:
        found = where(run.directory, max_rollout_bytes=MAX_ROLLOUT_BYTES)
    except (MalformedJournal, OSError) as error:
        return {"unreadable": str(error), "at": time.time()}
    return structs.asdict(found) | {"unreadable": "", "at": time.time()}
