"""How what was found reads on a terminal.

Policies and commands wrote much of it, so control characters are made visible.
"""

import re
import time
from collections.abc import Sequence
from functools import lru_cache

from pipeline.census import Claimed, RunCensus
from pipeline.cli.finding import Fleet, Found, Line, count, where
from pipeline.deadletters import AttemptFailure
from pipeline.message import unpack_float32s
from pipeline.request import RolloutRequest
from pipeline.trajectory import Exhausted, Failed, Submitted, Trajectory, Turn, outcome_tag

_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_OPENING_FENCE = re.compile(r"```\w*\s*$")
MOST_WORKERS = 40  # named in `status`; those that lack something first
_HEAD_LINES, _TAIL_LINES = 12, 6  # of a long output, unless shown in full


class Ink:
    """Colours, if the reader is a terminal."""

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def faint(self, text: str) -> str:
        return self._paint("2", text)

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("31", text)

    def doubtful(self, text: str) -> str:
        return self._paint("33", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured and text else text


def visible(text: str) -> str:
    """The text with pictures of its control characters: it cannot move the cursor or set the title."""
    return text if text.isprintable() else text.translate(_CONTROL)


def age(seconds: float) -> str:
    """ "42 s", "12 min", "3.5 h", "4 d"."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def status(fleet: Fleet, complaints: Sequence[str], ink: Ink) -> str:
    """The whole fleet: runs, then workers with their claims, then what is wrong."""
    now = time.time()
    idle = [run for run in fleet.runs if _is_past(run)]
    blocks = [_run_block(run, ink) for run in fleet.runs if run not in idle]
    if idle:
        names = ", ".join(run.run_id for run in idle[-5:])
        blocks.append(ink.faint(f"{count(len(idle), 'earlier run')} with nothing open: {names}"))
    claims = [claim for run in fleet.runs for claim in run.claimed]
    blocks.append(_workers_block(fleet, claims, now, ink))
    if complaints:
        blocks.append("\n".join(ink.bad(f"unwell: {visible(complaint)}") for complaint in complaints))
    else:
        blocks.append(ink.good("well"))
    return "\n\n".join(blocks)


def _is_past(run: RunCensus) -> bool:
    return not (
        (run.status and not run.status.ended)
        or run.queued
        or run.claimed
        or run.unread
        or run.unacknowledged
        or run.dead
        or run.malformed
    )


def _run_block(run: RunCensus, ink: Ink) -> str:
    doing = run.status
    rows = [("trainer", ink.doubtful("silent: no trainer has reported for a while"))]
    if doing is not None:
        progress = f"step {doing.step}" + (f" of {doing.num_steps}" if doing.num_steps else "")
        rows = [("trainer", f"{progress}, {doing.phase}" + (f": {doing.detail}" if doing.detail else ""))]
        if doing.admission:
            rows.append(("admission", doing.admission))
        if doing.quarantined:
            tasks = f"{count(len(doing.quarantined), 'task')}: {', '.join(doing.quarantined)}"
            rows.append(("quarantine", ink.doubtful(tasks)))
    rows += [
        ("weights", _weights(run, ink)),
        ("requests", _requests(run, ink)),
        ("answers", _answers(run)),
        ("lag", _lag(run)),
    ]
    if run.outcomes:
        outcomes = sorted(run.outcomes.items(), key=lambda pair: -pair[1])
        rows.append(("outcomes", ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes)))
    if run.malformed:
        rows.append(("unreadable", ink.bad(count(run.malformed, "answer"))))
    return "\n".join(
        [
            f"run {ink.bold(run.run_id)}",
            *(f"  {name:<11}{visible(value) if name == 'trainer' else value}" for name, value in rows),
        ]
    )


def _requests(run: RunCensus, ink: Ink) -> str:
    waiting = f" ({run.waiting_out:,} waiting out a back-off)" if run.waiting_out else ""
    since = "" if run.oldest_claim_at is None else f" (oldest {age(time.time() - run.oldest_claim_at)})"
    return f"{run.queued:,} queued{waiting}, {len(run.claimed):,} claimed{since}, {_dead(run, ink)}"


def _answers(run: RunCensus) -> str:
    held = f", {run.unacknowledged_bytes / 1e6:,.1f} MB of bodies" if run.unacknowledged_bytes else ""
    rate = f", {run.finished_per_min:.1f} a minute"
    return f"{run.unread:,} unread, {run.unacknowledged:,} unacknowledged{held}{rate}"


def _dead(run: RunCensus, ink: Ink) -> str:
    return ink.bad(f"{run.dead:,} dead") if run.dead else "0 dead"


def _weights(run: RunCensus, ink: Ink) -> str:
    if run.learned is None:
        return "none published yet"
    learned = f"v{run.learned.version} learned (step {run.learned.step})"
    if run.served is None:
        return f"{learned}, not yet confirmed by any engine"
    engines = count(len(run.served.engines), "engine")
    behind = run.served.version < run.learned.version
    served = f"v{run.served.version} served by {engines}"
    if run.served.quarantined:
        served += ", " + ink.doubtful(f"quarantined: {', '.join(run.served.quarantined)}")
    return f"{learned}, {ink.doubtful(served) if behind else served}"


def _lag(run: RunCensus) -> str:
    if not run.lags:
        return "nothing has arrived since the newest version"
    ordered = sorted(run.lags)
    over = count(len(ordered), "arrival")
    return f"median {ordered[len(ordered) // 2]}, max {ordered[-1]} versions, over {over}"


def _workers_block(fleet: Fleet, claims: Sequence[Claimed], now: float, ink: Ink) -> str:
    live = {worker.name for worker in fleet.workers}
    held: dict[str, list[Claimed]] = {}
    for claim in claims:
        held.setdefault(claim.lease.worker, []).append(claim)
    slots = sum(worker.slots for worker in fleet.workers)
    busy = sum(len(held.get(name, ())) for name in live)
    rows = [f"{count(len(live), 'worker')}, {busy} of {count(slots, 'slot')} busy"]
    if claims:
        oldest = min(claims, key=lambda claim: claim.lease.claimed_at)
        rows[0] += f", oldest claim {age(now - oldest.lease.claimed_at)}: {oldest.request_id}"
    told = sorted(fleet.workers, key=lambda worker: not (worker.paused or worker.set_aside))[:MOST_WORKERS]
    for worker in sorted(told, key=lambda worker: worker.name):
        record = f"{worker.finished:,} finished, {worker.failed:,} failed, up {age(now - worker.started_at)}"
        mine = held.get(worker.name, [])
        rows.append(f"  {ink.bold(worker.name)}  {len(mine)} of {worker.slots} busy, {ink.faint(record)}")
        if worker.paused:
            rows.append(f"    {ink.doubtful(f'paused: {visible(worker.paused)}')}")
        if worker.set_aside:
            rows.append(f"    {ink.doubtful(f'set aside: {visible(worker.set_aside)}')}")
        rows += _claim_rows(mine, now, ink)
    if len(told) < len(live):
        rows.append(ink.faint(f"  and {len(live) - len(told):,} more"))
    for name in sorted(fleet.silent.keys() | held.keys() - live)[:MOST_WORKERS]:
        silence = f"silent for {age(now - fleet.silent[name])}" if name in fleet.silent else "never heard"
        rows += [f"  {ink.bold(name)}  {ink.doubtful(silence)}", *_claim_rows(held.get(name, []), now, ink)]
    return "\n".join(rows)


def _claim_rows(mine: Sequence[Claimed], now: float, ink: Ink) -> list[str]:
    rows: list[str] = []
    for claim in sorted(mine, key=lambda claim: claim.lease.claimed_at):
        again = f"  attempt {claim.lease.attempt}" if claim.lease.attempt > 1 else ""
        rows.append(
            f"    {where(claim.lease, claim.max_turns):<16}{age(now - claim.lease.claimed_at):>8}"
            f"  {claim.task_id}  {ink.faint(claim.request_id)}{ink.doubtful(again)}"
        )
    return rows


def listing(lines: Sequence[Line], ink: Ink) -> str:
    """A table, a request a line."""
    if not lines:
        return "nothing to list"
    return "\n".join(row(line, ink) for line in lines)


def row(line: Line, ink: Ink) -> str:
    """One request on one line, as `ls` and `tail` print it."""
    reward = "" if line.reward is None else f"  reward {line.reward:g}"
    shade = {"dead": ink.bad, "claimed": ink.bold}.get(line.state, str)
    attempt = f"  attempt {line.attempt}" if line.attempt > 1 else ""
    when = _time_of_day(int(line.at))
    detail = visible(line.detail.replace("\n", " "))[:120]
    return (
        f"{when}  {shade(f'{line.state:<8}')}  {line.request_id}  {line.task_id}  "
        f"{line.purpose:<5}  {detail}{_reward(reward, line.reward, ink)}{attempt}"
    ).rstrip()


@lru_cache
def _time_of_day(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _reward(text: str, reward: float | None, ink: Ink) -> str:
    return ink.good(text) if reward else ink.faint(text)


def found(found: Found, ink: Ink, *, full: bool) -> str:
    """One request for a person to read: who asked what, each turn, the patch, or why it failed."""
    blocks = [_header(found, ink)]
    if found.unreadable:
        blocks.append(ink.bad(f"its stored form cannot be read: {visible(found.unreadable)}"))
    if found.trajectory is not None:
        blocks += [
            _turn_block(number, turn, ink, full=full) for number, turn in enumerate(found.trajectory.turns, 1)
        ]
        blocks.append(_ending(found.trajectory, ink, full=full))
    blocks += [failure_block(failure, ink, full=full) for failure in found.failures]
    return "\n\n".join(blocks)


def _header(found: Found, ink: Ink) -> str:
    rows = [("state", found.state)]
    if found.lease is not None and found.request is not None:
        lease = found.lease
        rows[0] = (
            "state",
            f"claimed by {lease.worker}, attempt {lease.attempt}: {where(lease, found.request.limits.turns)}",
        )
    if found.request is not None:
        rows += _request_rows(found.request)
    if found.trajectory is not None:
        rows += _answer_rows(found.trajectory)
    return "\n".join(
        [ink.bold(f"request {found.request_id}"), *(f"  {name:<9}{value}" for name, value in rows)]
    )


def _request_rows(request: RolloutRequest) -> list[tuple[str, str]]:
    member = f"member {request.member + 1} of {request.group_size} of group {request.group_id}"
    drawn = (
        "greedily"
        if request.sampling.temperature == 0
        else f"at temperature {request.sampling.temperature:g}"
    )
    return [
        ("task", f"{request.task.id}  ({request.task.image})"),
        ("purpose", f"{request.purpose}, {member}, run {request.run_id}"),
        (
            "asked",
            f"{_clock(request.enqueued_at)} under v{request.version_at_enqueue}, sampling {drawn}",
        ),
    ]


def _answer_rows(trajectory: Trajectory) -> list[tuple[str, str]]:
    claim, request = trajectory.claim, trajectory.claim.request
    versions = [span.version for turn in trajectory.turns for span in turn.versions]
    sampled = sum(len(turn.sampled) // 4 for turn in trajectory.turns)
    turns = count(len(trajectory.turns), "turn")
    rows = [
        (
            "played",
            f"attempt {claim.attempt} by {claim.worker}, "
            f"waited {age(claim.claimed_at - request.enqueued_at)}, "
            f"took {age(trajectory.finished_at - claim.claimed_at)}, until {_clock(trajectory.finished_at)}",
        ),
        ("outcome", f"{outcome_tag(trajectory.outcome)}, {turns}, {sampled:,} sampled tokens"),
        ("reward", _verdict(trajectory)),
    ]
    if versions:
        spread = (
            f"v{min(versions)}" if min(versions) == max(versions) else f"v{min(versions)} to v{max(versions)}"
        )
        rows.append(("weights", spread))
    return rows


def _verdict(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    if reward is None:
        return "none: it was not graded"
    tallies = [
        f"{tally.passed} of {tally.total} {name}"
        for name, tally in (("fail-to-pass", reward.fail_to_pass), ("pass-to-pass", reward.pass_to_pass))
        if tally is not None
    ]
    decided = ", ".join([visible(reward.decided_by), *tallies])
    return f"{reward.value:g} ({decided}; graded in {reward.grade_s:.1f} s)"


def _turn_block(number: int, turn: Turn, ink: Ink, *, full: bool) -> str:
    rows = [f"{ink.bold(f'turn {number}')}  {ink.faint(_tokens(turn))}"]
    thought = _thought(turn)
    if thought:
        rows.append(_indented(visible(thought)))
    if turn.command is None:
        rows.append(ink.doubtful("  no single command could be read from this"))
    else:
        rows.append(_indented(ink.bold(f"$ {visible(turn.command)}")))
    if turn.observation is not None:
        seen = turn.observation
        code = "killed at its deadline" if seen.exit_code is None else f"exit {seen.exit_code}"
        cut = f", {seen.dropped_chars:,} characters cut" if seen.dropped_chars else ""
        ending = f"  [{code}, {seen.wall_s:.1f} s{cut}]"
        rows += [
            _indented(_shortened(visible(seen.output), full=full)),
            ink.faint(ending) if seen.exit_code == 0 else ink.doubtful(ending),
        ]
    return "\n".join(line for line in rows if line)


def _tokens(turn: Turn) -> str:
    logprobs = unpack_float32s(turn.logprobs)
    mean = f", mean log-prob {sum(logprobs) / len(logprobs):.3f}" if logprobs else ""
    spans = " ".join(f"v{span.version}[{span.start}:{span.end}]" for span in turn.versions)
    seen = turn.kept_tokens + len(turn.fed) // 4
    ended = "" if turn.stop == "stop" else f", cut off by {turn.stop}"
    return (
        f"{seen:,} tokens in, {len(turn.sampled) // 4:,} out{ended}{mean}, {spans}, {turn.generate_s:.1f} s"
    )


def _thought(turn: Turn) -> str:
    """What the policy said before its command."""
    if not turn.command:  # a block may be empty
        return turn.text.strip()
    before, _, _ = turn.text.partition(turn.command)
    return _OPENING_FENCE.sub("", before).strip()


def _ending(trajectory: Trajectory, ink: Ink, *, full: bool) -> str:
    match trajectory.outcome:
        case Submitted(patch=patch) | Exhausted(patch=patch):
            if not patch:
                return ink.faint("no patch")
            text = visible(patch.decode(errors="replace")).rstrip("\n")
            coloured = [_patch_line(line, ink) for line in text.split("\n")]
            return "\n".join([ink.bold(f"patch, {len(patch):,} bytes"), *coloured])
        case Failed(boundary=boundary, message=message):
            return ink.bad(f"failed at {boundary}: {visible(message)}")


def _patch_line(line: str, ink: Ink) -> str:
    if line.startswith("+") and not line.startswith("+++"):
        return ink.good(line)
    if line.startswith("-") and not line.startswith("---"):
        return ink.bad(line)
    return line


def failure_block(failure: AttemptFailure, ink: Ink, *, full: bool) -> str:
    """The evidence of one try."""
    again = "another try might help" if failure.transient else "no other try would help"
    where_and_when = (
        f"{failure.boundary}, {_clock(failure.failed_at)}, {visible(failure.worker) or 'no worker'}"
    )
    title = f"attempt {failure.attempt} failed at {where_and_when}"
    rows = [ink.bad(title), _indented(f"{visible(failure.message)} ({again})")]
    if failure.detail:
        rows.append(_indented(_shortened(visible(failure.detail), full=full)))
    return "\n".join(rows)


def _shortened(text: str, *, full: bool) -> str:
    lines = text.rstrip("\n").split("\n")
    if full or len(lines) <= _HEAD_LINES + _TAIL_LINES + 1:
        return "\n".join(lines)
    hidden = len(lines) - _HEAD_LINES - _TAIL_LINES
    return "\n".join([*lines[:_HEAD_LINES], f"... {hidden} lines more, with --full", *lines[-_TAIL_LINES:]])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n")) if text else ""


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
