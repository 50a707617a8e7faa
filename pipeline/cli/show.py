"""The output of `show` about one request, as text and as JSON: what was enqueued, each turn, the patch, the verdict, the reason of a
failure, the judge's votes, and what a step did with its tokens.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, cast

import msgspec

from pipeline.cli.finding import FoundJudging, FoundRollout
from pipeline.cli.listing import where
from pipeline.deadletters import AttemptFailure
from pipeline.judge import JudgedStep, Judgement, JudgeRequest, Unscored, Vote
from pipeline.message import MalformedMessage, unpack_float32s, unpack_int32s
from pipeline.request import RolloutRequest
from pipeline.rollout_store.record import REASONS, TrainedTokens, TrainedTurn, unpack_halves
from pipeline.screen import Ink, age, clock, count, indented, lines, one_line, shortened
from pipeline.trajectory import (
    FIRST_IN_CONTEXT,
    Cut,
    Exhausted,
    Failed,
    Observation,
    Submitted,
    Trajectory,
    Turn,
    outcome_tag,
)

LOG_LINES = 20  # lines shown of the log of grading, unless shown in full
_OPENING_FENCE = re.compile(r"```\w*\s*$")


def rollout_text(found: FoundRollout, judging: FoundJudging | None, ink: Ink, *, full: bool) -> str:
    """The text about one request: what was enqueued, each turn with its score, the patch and its verdict, or why it failed."""
    blocks = [_header(found, judging, ink)]
    if found.unreadable:
        blocks.append(one_line(ink.bad(f"its stored form cannot be read: {found.unreadable}")))
    if found.request is not None:
        blocks.append(_problem_block(found.request, ink, full=full))
    if found.result is not None:
        blocks += _turn_blocks(found.result.turns, judging.result if judging else None, ink, full=full)
        blocks.append(_ending(found.result, ink))
        if found.result.reward is not None and found.result.reward.log_tail:
            blocks.append(_log_block(found.result.reward.log_tail, ink, full=full))
    blocks += [failure_block(failure, ink, full=full) for failure in found.failures]
    return "\n\n".join(blocks)


def _turn_blocks(
    turns: Sequence[Turn], judgement: Judgement | None, ink: Ink, *, full: bool
) -> Iterator[str]:
    """Each turn; for a judged rollout with its score, and in full with the text of each vote."""
    steps = {step.turn: step for step in judgement.steps} if judgement is not None else {}
    for number, turn in enumerate(turns):
        rows = [_turn_block(number + 1, turn, ink, full=full)]
        step = steps.get(number)
        if step is not None:
            rows.append(f"  {score_line(step, ink)}")
            rows += vote_rows(step, ink, full=True) if full else ()
        yield "\n".join(rows)


def _header(found: FoundRollout, judging: FoundJudging | None, ink: Ink) -> str:
    rows = [("state", found.state)]
    if found.lease is not None and found.request is not None:
        lease = found.lease
        rows[0] = (
            "state",
            f"claimed by {lease.worker}, attempt {lease.attempt}: {where(lease, found.request.limits.turns)}",
        )
    if found.request is not None:
        rows += _request_rows(found.request)
    if found.result is not None:
        rows += _answer_rows(found.result)
    elif found.head is not None:
        head = found.head
        rows += [("task", head.task_id), ("outcome", f"{head.outcome}, {clock(head.finished_at)}")]
        rows.append(("text", "none: Redis no longer had it, or nobody could read the request"))
    if judging is not None:
        rows.append(("judging", f"{judging_summary(judging)}  ({judging.request_id})"))
    if found.source:
        rows.append(("source", f"{found.source}, without what may quote hidden tests"))
    return lines([ink.bold(f"request {found.request_id}"), *(f"  {name:<9}{value}" for name, value in rows)])


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
            "enqueued",
            f"{clock(request.enqueued_at)} under v{request.version_at_enqueue}, sampling {drawn}",
        ),
    ]


def _answer_rows(trajectory: Trajectory) -> list[tuple[str, str]]:
    claim, request = trajectory.claim, trajectory.claim.request
    versions = [span.version for turn in trajectory.turns for span in turn.versions]
    sampled = sum(len(turn.sampled) // 4 for turn in trajectory.turns)
    turns = count(len(trajectory.turns), "turn")
    rows = [
        (
            "run",
            f"attempt {claim.attempt} by {claim.worker}, "
            f"waited {age(claim.claimed_at - request.enqueued_at)}, "
            f"took {age(trajectory.finished_at - claim.claimed_at)}, until {clock(trajectory.finished_at)}",
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
    if reward.control:
        tallies.append(f"control: {reward.control}, {reward.num_controlled} tests")
    decided = ", ".join([reward.decided_by, *tallies])
    return f"{reward.value:g} ({decided}; graded in {reward.grade_s:.1f} s)"


def _problem_block(request: RolloutRequest, ink: Ink, *, full: bool) -> str:
    problem = shortened(request.task.problem.strip("\n"), full=full)
    return f"{ink.bold('issue')}\n{indented(problem)}"


def _log_block(log: str, ink: Ink, *, full: bool) -> str:
    """The end of the grader's log; without `full`, only its last lines."""
    said = log.strip("\n").split("\n")
    hidden = 0 if full else max(0, len(said) - LOG_LINES)
    before = [f"... {hidden} lines before, with --full"] if hidden else []
    return f"{ink.bold('end of the log of grading')}\n" + indented("\n".join([*before, *said[hidden:]]))


def _turn_block(number: int, turn: Turn, ink: Ink, *, full: bool) -> str:
    rows = [f"{ink.bold(f'turn {number}')}  {ink.faint(_place(number, turn) + _tokens(turn))}"]
    if turn.cut is not None:
        rows.insert(0, ink.doubtful(f"context cut: {_cut_words(turn.cut, turn.repeated_tokens)}"))
    thought = _thought(turn)
    if thought:
        rows.append(indented(thought))
    if not turn.actions:
        rows.append(ink.doubtful("  no command could be read from this"))
    for action in turn.actions:
        rows.append(indented(ink.bold(f"$ {action.command}")))
        if action.observation is not None:
            rows += _observation_rows(action.observation, ink, full=full)
    return "\n".join(line for line in rows if line)


def _place(number: int, turn: Turn) -> str:
    """Names the turn before an agent program's turn, unless that is the turn with the number before. Turns are counted from 1."""
    rows = [one_line(f"in {turn.thread}")] if turn.thread else []
    if turn.after == FIRST_IN_CONTEXT and number > 1:
        rows.append("begins a conversation")
    elif turn.after is not None and turn.after != number - 2:
        rows.append(f"follows turn {turn.after + 1}")
    rows += ["an aside, not trained"] if turn.aside else []
    return "".join(f"{row}, " for row in rows)


def _cut_words(cut: Cut, repeated_tokens: int) -> str:
    """The parts of the context that the policy no longer sees from this turn on."""
    taken = [
        (cut.forgot_reply, "the last reply was taken out"),
        (cut.num_omitted, f"{count(cut.num_omitted, 'turn')} omitted in all"),
        (cut.num_thoughts, f"the thoughts of {count(cut.num_thoughts, 'reply', 'replies')} taken out"),
        (cut.dropped_chars, f"{count(cut.dropped_chars, 'character')} of the newest messages left out"),
        (repeated_tokens, f"{count(repeated_tokens, 'token')} computed again"),
    ]
    return ", ".join(words for is_so, words in taken if is_so)


def _observation_rows(seen: Observation, ink: Ink, *, full: bool) -> list[str]:
    code = "killed at its deadline" if seen.exit_code is None else f"exit {seen.exit_code}"
    cut = f", {seen.dropped_chars:,} characters cut" if seen.dropped_chars else ""
    ending = f"  [{code}, {seen.wall_s:.1f} s{cut}]"
    return [
        indented(shortened(seen.output, full=full)),
        ink.faint(ending) if seen.exit_code == 0 else ink.doubtful(ending),
    ]


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
    """The policy's text before its command."""
    command = turn.actions[0].command if turn.actions else ""
    if not command:  # a block may be empty
        return turn.text.strip()
    before, _, _ = turn.text.partition(command)
    return _OPENING_FENCE.sub("", before).strip()


def _ending(trajectory: Trajectory, ink: Ink) -> str:
    match trajectory.outcome:
        case Submitted(patch=patch) | Exhausted(patch=patch):
            if not patch:
                return ink.faint("no patch")
            rollout_text = patch.decode(errors="replace").rstrip("\n")
            coloured = [indented(_patch_line(line, ink)) for line in rollout_text.split("\n")]
            why = trajectory.outcome.from_tree if isinstance(trajectory.outcome, Submitted) else ""
            heading = f"patch, {len(patch):,} bytes" + (f", from the tree, because {why}" if why else "")
            return "\n".join([ink.bold(heading), *coloured])
        case Failed(boundary=boundary, message=message):
            return one_line(ink.bad(f"failed at {boundary}: {message}"))


def _patch_line(line: str, ink: Ink) -> str:
    if line.startswith("+") and not line.startswith("+++"):
        return ink.good(line)
    if line.startswith("-") and not line.startswith("---"):
        return ink.bad(line)
    return line


WHY_UNSCORED: dict[Unscored, str] = {
    "format_error": "its reply held no command",
    "submission": "it ended the episode",
    "no_valid_vote": "every vote abstained or failed",
    "abstained": "the judge abstained",
    "too_long": "it alone exceeds the prompt",
    "aside": "it is an aside, which is not trained",
}


def judging_text(found: FoundJudging, ink: Ink, *, full: bool) -> str:
    """The text about a judge request: what was asked, the votes on each turn, or why it failed."""
    blocks = [_judging_header(found, ink)]
    if found.unreadable:
        blocks.append(one_line(ink.bad(f"its stored form cannot be read: {found.unreadable}")))
    for step in found.result.steps if found.result is not None else ():
        rows = [f"{ink.bold(f'turn {step.turn + 1}')}  {score_line(step, ink)}"]
        blocks.append("\n".join([*rows, *vote_rows(step, ink, full=full)]))
    blocks += [failure_block(failure, ink, full=full) for failure in found.failures]
    return "\n\n".join(blocks)


def score_line(step: JudgedStep, ink: Ink) -> str:
    """The score of a turn with the values of its votes, or what a teacher said of its tokens, or why it has no score."""
    if logprobs := _floats(step.logprobs):
        return f"the teacher's log-probs of {count(len(logprobs), 'token')}, {fmean(logprobs):+.3f} nats on average"
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
        yield one_line(f"  vote {number}: {_word(vote)}  {ink.faint(f'seed {vote.seed}{took}')}")
        if vote.text:
            yield indented(indented(shortened(vote.text, full=full)))


def judging_summary(found: FoundJudging) -> str:
    """One line with the state of the request, or its scores or log-probs."""
    judgement = found.result
    if judgement is None or judgement.failed is not None:
        return _state(found)
    by = f"by {judgement.judge or 'a judge'}"
    if judgement.num_logprobs:
        return f"log-probs of {count(judgement.num_logprobs, 'token')}, {by}"
    mean = f", mean {sum(judgement.scores.values()) / len(judgement.scores):+.2f}" if judgement.scores else ""
    scored = f"{len(judgement.scores)} of {count(len(judgement.steps), 'turn')} scored{mean}"
    return f"{scored}, {by}"


def _judging_header(found: FoundJudging, ink: Ink) -> str:
    rows = [("state", _state(found))]
    if found.request is not None:
        rows += _judge_request_rows(found.request)
    if found.result is not None:
        rows += _result_rows(found.result)
        rows.append(("scores", judging_summary(found)))
    if found.source:
        rows.append(("source", found.source))
    title = ink.bold(f"judge request {found.request_id}")
    return lines([title, *(f"  {name:<9}{value}" for name, value in rows)])


def _state(found: FoundJudging) -> str:
    lease, judgement = found.lease, found.result
    if lease is not None:
        return f"claimed by {lease.worker}, attempt {lease.attempt}: {where(lease, 0)}"
    if judgement is not None and judgement.failed is not None:
        failed = judgement.failed
        return f"{found.state}, failed at {failed.boundary}: {failed.message}"
    return found.state


def _judge_request_rows(request: JudgeRequest) -> list[tuple[str, str]]:
    judge = request.judge
    if judge.method == "votes":
        votes = f"{count(judge.num_votes, 'vote')} a turn at temperature {judge.temperature:g}"
        asked = f"{judge.name}, {votes}" if judge.name else votes
    else:
        asked = f"{judge.method} {judge.name}".strip()
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
            f"attempt {claim.attempt} by {claim.worker}, "
            f"waited {age(claim.claimed_at - claim.request.enqueued_at)}, "
            f"took {age(judgement.finished_at - claim.claimed_at)}, until {clock(judgement.finished_at)}",
        )
    ]


def _word(vote: Vote) -> str:
    if vote.value is not None:
        return _value(vote.value)
    return f"failed: {vote.error}" if vote.error else "abstains"


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:+g}"


def tokens_text(trained: TrainedTokens, turns: Sequence[Turn], ink: Ink) -> str:
    title = f"what step {trained.step} did with its tokens, from weights v{trained.version}"
    return "\n".join([ink.bold(title), *_token_lines(trained, turns)])


def tokens_json(trained: TrainedTokens) -> dict[str, Any]:
    """The data that `--json` prints about a step's work on a rollout."""
    return {
        "step": trained.step,
        "version": trained.version,
        "turns": [
            {
                "turn": turn.turn,
                "logprobs": list(unpack_float32s(turn.logprobs)),
                "advantages": list(unpack_float32s(turn.advantages)),
                "weights": list(unpack_halves(turn.weights)),
                "reasons": [REASONS[code] for code in turn.reasons],
            }
            for turn in trained.turns
        ],
    }


def _token_lines(trained: TrainedTokens, turns: Sequence[Turn]) -> Iterator[str]:
    for one in trained.turns:
        if one.reasons and one.turn < len(turns):
            with contextlib.suppress(MalformedMessage, IndexError):  # the record may be from another release
                yield _token_line(one, turns[one.turn])


def _token_line(trained: TrainedTurn, turn: Turn) -> str:
    learner, engine = unpack_float32s(trained.logprobs), unpack_float32s(turn.logprobs)
    off = Counter(REASONS[code].replace("_", " ") for code in trained.reasons if code)
    parts = [
        count(len(trained.reasons), "token"),
        f"mean advantage {fmean(unpack_float32s(trained.advantages)):+.3f}",
        f"log-prob {fmean(learner):.3f} (engine {fmean(engine):.3f})" if engine else "",
        f"weight {fmean(unpack_halves(trained.weights)):.3f}",
        *(f"{number} without a gradient: {reason}" for reason, number in off.most_common()),
    ]
    return f"  turn {trained.turn + 1}  {', '.join(filter(None, parts))}"


def failure_block(failure: AttemptFailure, ink: Ink, *, full: bool) -> str:
    """The evidence of one try."""
    again = "another try might help" if failure.transient else "no other try would help"
    where_and_when = f"{failure.boundary}, {clock(failure.failed_at)}, {failure.worker or 'no worker'}"
    title = f"attempt {failure.attempt} failed at {where_and_when}"
    rows = [one_line(ink.bad(title)), indented(f"{failure.message} ({again})")]
    if failure.detail:
        rows.append(indented(shortened(failure.detail, full=full)))
    return "\n".join(rows)


def rollout_json(found: FoundRollout) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(found, builtin_types=(bytes,))
    shown["trajectory"] = shown.pop("result")
    for turn in (shown["trajectory"] or {"turns": ()})["turns"]:
        turn["fed"], turn["sampled"] = list(unpack_int32s(turn["fed"])), list(unpack_int32s(turn["sampled"]))
        turn["logprobs"] = list(unpack_float32s(turn["logprobs"]))
    return _as_text(shown)


def judging_json(found: FoundJudging) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(found, builtin_types=(bytes,))
    shown["judgement"] = shown.pop("result")
    for step in (shown["judgement"] or {"steps": ()})["steps"]:
        if packed := step.get("logprobs"):
            step["logprobs"] = _floats(packed)
    return _as_text(shown)


def _floats(packed: bytes) -> list[float]:
    """The packed float32 numbers; none if another release has packed something else."""
    return [] if len(packed) % 4 else list(unpack_float32s(packed))


def plain(value: object) -> Any:
    """A message as data that JSON can represent."""
    return _as_text(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _as_text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {name: _as_text(inner) for name, inner in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_as_text(inner) for inner in cast(Iterable[Any], value)]
        case _:
            return value
