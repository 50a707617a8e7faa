"""`explain`: the events of one request in order, and why it was or was not trained; for a judge request, whether it was used.

The events come from Redis, or, when Redis has forgotten them or is gone, from the rollout in the run's directory; what became of
a trajectory and of its judgement comes from the trainer's journal. The events of judging are part of the rollout's story.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from pipeline.cli import finding, journal, moments, stored
from pipeline.cli.finding import Found, FoundJudging, FoundRollout
from pipeline.cli.ink import Ink, age
from pipeline.cli.journal import FATES, JUDGEMENT_FATES
from pipeline.cli.listing import State
from pipeline.cli.moments import Moment
from pipeline.judge import judge_request_id, judged_rollout_id
from pipeline.kinds import JUDGE, ROLLOUT
from pipeline.visible import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`verdict` says in a sentence whether the request was trained and why, or what it waits for; `judging` says the same of the
    request that judges it, and is empty if there is none.
    """

    request_id: str
    run_id: str
    state: State | None  # None: Redis has forgotten it
    moments: tuple[Moment, ...]
    verdict: str
    judging: str = ""


async def life(redis: Redis, request_id: str, run_dir: Path | None) -> Life:
    """Raises LookupError if neither Redis nor a directory knows the request."""
    rollout_id = judged_rollout_id(request_id)
    if rollout_id is not None:
        return await _judge_life(redis, request_id, rollout_id, run_dir)
    found: FoundRollout | None = None
    with contextlib.suppress(LookupError):
        found = await finding.find_rollout(redis, request_id)
    run_id = found.request.run_id if found and found.request else ""
    events = await moments.of_request(redis, run_id, request_id, ROLLOUT)
    if found is None and not events:
        return _past_life(request_id, await stored.directories(redis, run_dir), journal_of=run_dir)
    judging = await finding.judging_of(redis, request_id)
    judged = await moments.of_request(redis, run_id, judge_request_id(request_id), JUDGE)
    where = journal.directory_in(run_dir) if run_dir else await journal.known(redis, run_id)
    return _life(request_id, run_id, found, events, where, judging=judging, judged=judged)


async def _judge_life(redis: Redis, request_id: str, rollout_id: str, run_dir: Path | None) -> Life:
    """Of a judge request."""
    found: FoundJudging | None = None
    with contextlib.suppress(LookupError):
        found = await finding.find_judging(redis, request_id)
    run_id = found.request.run_id if found and found.request else ""
    events = await moments.of_request(redis, run_id, request_id, JUDGE)
    where = journal.directory_in(run_dir) if run_dir else await journal.known(redis, run_id)
    return _life_of_judging(request_id, rollout_id, run_id, found, events, where)


def stored_life(request_id: str, run_dir: Path) -> Life:
    """The same from the run's directory alone."""
    rollout_id = judged_rollout_id(request_id)
    if rollout_id is not None:
        where = journal.directory_in(run_dir)
        return _life_of_judging(request_id, rollout_id, stored.run_id_of(run_dir), None, (), where)
    return _past_life(request_id, [run_dir], journal_of=run_dir)


def _past_life(request_id: str, run_dirs: Sequence[Path], *, journal_of: Path | None) -> Life:
    """Of a rollout that Redis does not know."""
    found: FoundRollout | None = None
    with contextlib.suppress(LookupError):
        found = stored.find(run_dirs, request_id)
    directory = Path(found.source) if found else journal_of
    where = journal.directory_in(directory) if directory else None
    events = list(moments.of_stored(found)) if found else []
    head = found.head if found else None
    return _life(request_id, head.run_id if head else "", found, events, where)


def _life(
    request_id: str,
    run_id: str,
    found: FoundRollout | None,
    events: Sequence[Moment],
    where: Path | None,
    *,
    judging: FoundJudging | None = None,
    judged: Sequence[Moment] = (),
) -> Life:
    """`where` is the journal's directory; `judging` and `judged` are what Redis knows of the request that judges the rollout."""
    told = list(journal.of_rollout(where, request_id)) if where else []
    told_of_judging = list(journal.of_judging(where, request_id)) if where else []
    own = sorted([*events, *told], key=lambda moment: moment.at)
    if not own and found is None:
        raise _unknown(request_id)
    is_judged = bool(judging or judged or told_of_judging)
    return Life(
        request_id=request_id,
        run_id=run_id,
        state=found.state if found else None,
        moments=tuple(sorted([*own, *judged, *told_of_judging], key=lambda moment: moment.at)),
        verdict=_verdict(found, own, told, where),
        judging=_judging_verdict(judging, judged, told_of_judging, where) if is_judged else "",
    )


def _life_of_judging(
    request_id: str,
    rollout_id: str,
    run_id: str,
    found: FoundJudging | None,
    events: Sequence[Moment],
    where: Path | None,
) -> Life:
    told = list(journal.of_judging(where, rollout_id)) if where else []
    if not (found or events or told):
        raise _unknown(request_id)
    return Life(
        request_id=request_id,
        run_id=run_id,
        state=found.state if found else None,
        moments=tuple(sorted([*events, *told], key=lambda moment: moment.at)),
        verdict=_judging_verdict(found, events, told, where),
    )


def _unknown(request_id: str) -> LookupError:
    return LookupError(
        f"nothing is known of request {request_id}; with --run-dir the run's directory is searched too"
    )


def _verdict(
    found: FoundRollout | None, own: Sequence[Moment], told: Sequence[Moment], where: Path | None
) -> str:
    if told:
        last = told[-1] if all(moment.what != "trained" for moment in told) else told[0]
        return f"trained in {last.detail}" if last.what == "trained" else FATES.get(last.what, last.what)
    match found.state if found else None:
        case "dead":
            return f"not trained: {_death(found)}"
        case "answered":
            return _answered(found, own, where)
        case "queued" | "claimed" | "lost":
            return _not_yet(found, "worker")
        case _:
            return FATES["withdrawn"]


def _judging_verdict(
    found: FoundJudging | None, own: Sequence[Moment], told: Sequence[Moment], where: Path | None
) -> str:
    if told:
        return f"{JUDGEMENT_FATES.get(told[-1].what, told[-1].what)}; {told[-1].detail}"
    match found.state if found else None:
        case "dead":
            return f"not judged: {_death(found)}"
        case "answered":
            return _answered(found, own, where)
        case "queued" | "claimed" | "lost":
            return _not_yet(found, "judge")
        case _:
            return "not judged: the request was withdrawn"


def _not_yet(found: Found[Any, Any] | None, worker: str) -> str:
    """Of a request that has no result."""
    assert found is not None
    if found.state == "claimed":
        return f"not yet: a {worker} has claimed it"
    if found.state == "lost":
        return "not yet: Redis lost its place in the queue; the trainer will re-enqueue it"
    if found.failures:
        return f"not yet: it waits for try {len(found.failures) + 1}"
    return f"not yet: it waits for a {worker}"


def _death(found: Found[Any, Any] | None) -> str:
    last = found.failures[-1] if found and found.failures else None
    return f"dead-lettered, {last.kind}: {last.message}" if last else "dead-lettered"


def _answered(found: Found[Any, Any] | None, own: Sequence[Moment], where: Path | None) -> str:
    """Of a request whose fate is in no journal that we have."""
    if own and own[-1].what == "acknowledged":
        return "settled by the trainer; its journal, with --run-dir, says how"
    read = bool(found and found.source) or any(moment.what == "read" for moment in own)
    whose = "the journal does not have it yet" if where else "with --run-dir the journal may say more"
    return f"answered, {'read' if read else 'not yet read'} by the trainer; {whose}"


def text(life: Life, ink: Ink) -> str:
    """For a person: one event on each line, with the time since the one before."""
    rows = [ink.bold(f"request {life.request_id}") + (f"  run {life.run_id}" if life.run_id else "")]
    # Its own events by name alone; those of judging, within the story of a rollout, after the kind.
    is_rollout = judged_rollout_id(life.request_id) is None
    names = [
        f"{moment.kind} {moment.what}" if is_rollout and moment.kind == JUDGE.name else moment.what
        for moment in life.moments
    ]
    width = max(13, *(len(name) + 1 for name in names))
    before = life.moments[0].at if life.moments else 0.0
    for moment, name in zip(life.moments, names, strict=True):
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.at))
        whose = f"attempt {moment.attempt}" if moment.attempt else ""
        what = f"{name:<{width}}"
        what = ink.bad(what) if moment.what in ("failed", "dead-lettered") else what
        parts = [whose, visible(moment.worker), visible(moment.detail.replace("\n", " "))[:200]]
        rest = "  ".join(part for part in parts if part)
        rows.append(f"  {clock}  {'+' + age(moment.at - before):>8}  {what} {rest}".rstrip())
        before = moment.at
    rows.append(visible(life.verdict))
    if life.judging:
        rows.append(f"judging: {visible(life.judging)}")
    return "\n".join(rows)
