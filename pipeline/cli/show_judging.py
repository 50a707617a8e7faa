"""How `show` prints judging: the scores and votes beside each turn of a rollout, and a judge request by itself."""

from collections.abc import Iterator

from pipeline.cli.finding import FoundJudging
from pipeline.cli.ink import Ink, age, clock, count, indented, shortened
from pipeline.cli.listing import where
from pipeline.cli.show_failure import failure_block
from pipeline.judge import JudgedStep, Judgement, JudgeRequest, Unscored, Vote
from pipeline.visible import visible

WHY_UNSCORED: dict[Unscored, str] = {
    "format_error": "its reply held no command",
    "submission": "it ended the episode",
    "no_valid_vote": "every vote abstained or failed",
    "abstained": "the judge abstained",
    "too_long": "it alone exceeds the prompt",
}


def text(found: FoundJudging, ink: Ink, *, full: bool) -> str:
    """A judge request for a person to read: what was asked, what each vote said of each turn, or why it failed."""
    blocks = [_header(found, ink)]
    if found.unreadable:
        blocks.append(ink.bad(f"its stored form cannot be read: {visible(found.unreadable)}"))
    for step in found.result.steps if found.result is not None else ():
        rows = [f"{ink.bold(f'turn {step.turn + 1}')}  {score_line(step, ink)}"]
        blocks.append("\n".join([*rows, *vote_rows(step, ink, full=full)]))
    blocks += [failure_block(failure, ink, full=full) for failure in found.failures]
    return "\n\n".join(blocks)


def score_line(step: JudgedStep, ink: Ink) -> str:
    """The score of a turn with the values of its votes, or why it has none."""
    votes = " ".join(_value(vote.value) for vote in step.votes)
    cast = f"  ({count(len(step.votes), 'vote')}: {votes})" if step.votes else ""
    if step.score is not None:
        shade = ink.good if step.score > 0 else ink.bad if step.score < 0 else str
        return f"score {shade(f'{step.score:+.2f}')}{cast}"
    why = WHY_UNSCORED[step.unscored] if step.unscored else "the judge abstained"
    return ink.faint(f"no score: {why}{cast}")


def vote_rows(step: JudgedStep, ink: Ink, *, full: bool) -> Iterator[str]:
    """Each vote with what the judge wrote."""
    for number, vote in enumerate(step.votes, 1):
        took = f", {vote.generate_s:.1f} s" if vote.generate_s else ""
        yield f"  vote {number}: {_word(vote)}  {ink.faint(f'seed {vote.seed}{took}')}"
        if vote.text:
            yield indented(indented(shortened(visible(vote.text), full=full)))


def summary(found: FoundJudging) -> str:
    """Where the request is, or what was scored, on one line."""
    judgement = found.result
    if judgement is None or judgement.failed is not None:
        return _state(found)
    mean = f", mean {sum(judgement.scores.values()) / len(judgement.scores):+.2f}" if judgement.scores else ""
    scored = f"{len(judgement.scores)} of {count(len(judgement.steps), 'turn')} scored{mean}"
    return f"{scored}, by {visible(judgement.judge) or 'a judge'}"


def _header(found: FoundJudging, ink: Ink) -> str:
    rows = [("state", _state(found))]
    if found.request is not None:
        rows += _request_rows(found.request)
    if found.result is not None:
        rows += _result_rows(found.result)
        rows.append(("scores", summary(found)))
    if found.source:
        rows.append(("source", visible(found.source)))
    title = ink.bold(f"judge request {found.request_id}")
    return "\n".join([title, *(f"  {name:<9}{value}" for name, value in rows)])


def _state(found: FoundJudging) -> str:
    lease, judgement = found.lease, found.result
    if lease is not None:
        return f"claimed by {visible(lease.worker)}, attempt {lease.attempt}: {where(lease, 0)}"
    if judgement is not None and judgement.failed is not None:
        failed = judgement.failed
        return f"{found.state}, failed at {failed.boundary}: {visible(failed.message)}"
    return found.state


def _request_rows(request: JudgeRequest) -> list[tuple[str, str]]:
    judge = request.judge
    if judge.method == "votes":
        votes = f"{count(judge.num_votes, 'vote')} a turn at temperature {judge.temperature:g}"
        asked = f"{visible(judge.name)}, {votes}" if judge.name else votes
    else:
        asked = f"{judge.method} {visible(judge.name)}".strip()
    return [
        (
            "rollout",
            f"{request.rollout_id}  ({request.task}, group {request.group_id}, run {request.run_id})",
        ),
        ("judge", asked),
        ("enqueued", clock(request.enqueued_at)),
    ]


def _result_rows(judgement: Judgement) -> list[tuple[str, str]]:
    claim = judgement.claim
    return [
        (
            "run",
            f"attempt {claim.attempt} by {visible(claim.worker)}, "
            f"waited {age(claim.claimed_at - claim.request.enqueued_at)}, "
            f"took {age(judgement.finished_at - claim.claimed_at)}, until {clock(judgement.finished_at)}",
        )
    ]


def _word(vote: Vote) -> str:
    if vote.value is not None:
        return _value(vote.value)
    return f"failed: {visible(vote.error)}" if vote.error else "abstains"


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:+g}"
