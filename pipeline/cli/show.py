"""How `show` prints one request: what was enqueued, each turn, the patch, the verdict, or why it failed."""

import re
from collections.abc import Iterator, Sequence

from pipeline.cli.finding import FoundJudging, FoundRollout
from pipeline.cli.ink import Ink, age, clock, count, indented, shortened
from pipeline.cli.listing import where
from pipeline.cli.show_failure import failure_block
from pipeline.cli.show_judging import score_line, summary, vote_rows
from pipeline.judge import Judgement
from pipeline.message import unpack_float32s
from pipeline.request import RolloutRequest
from pipeline.trajectory import Cut, Exhausted, Failed, Observation, Submitted, Trajectory, Turn, outcome_tag
from pipeline.visible import visible

LOG_LINES = 20  # of the log of grading, unless shown in full
_OPENING_FENCE = re.compile(r"```\w*\s*$")


def text(found: FoundRollout, judging: FoundJudging | None, ink: Ink, *, full: bool) -> str:
    """One request for a person to read: what was enqueued, each turn with its score, the patch and its verdict, or why it
    failed.
    """
    blocks = [_header(found, judging, ink)]
    if found.unreadable:
        blocks.append(ink.bad(f"its stored form cannot be read: {visible(found.unreadable)}"))
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
    """Each turn; of a judged rollout with its score, and in full with what each vote said."""
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
        rows.append(("judging", f"{summary(judging)}  ({judging.request_id})"))
    if found.source:
        rows.append(("source", f"{visible(found.source)}, without what may quote hidden tests"))
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
    decided = ", ".join([visible(reward.decided_by), *tallies])
    return f"{reward.value:g} ({decided}; graded in {reward.grade_s:.1f} s)"


def _problem_block(request: RolloutRequest, ink: Ink, *, full: bool) -> str:
    problem = shortened(visible(request.task.problem.strip("\n")), full=full)
    return f"{ink.bold('issue')}\n{indented(problem)}"


def _log_block(log: str, ink: Ink, *, full: bool) -> str:
    """The end of the grader's log; without `full` only the last lines of it."""
    lines = visible(log).strip("\n").split("\n")
    hidden = 0 if full else max(0, len(lines) - LOG_LINES)
    before = [f"... {hidden} lines before, with --full"] if hidden else []
    return f"{ink.bold('end of the log of grading')}\n" + indented("\n".join([*before, *lines[hidden:]]))


def _turn_block(number: int, turn: Turn, ink: Ink, *, full: bool) -> str:
    rows = [f"{ink.bold(f'turn {number}')}  {ink.faint(_tokens(turn))}"]
    if turn.cut is not None:
        rows.insert(0, ink.doubtful(f"context cut: {visible(_cut_words(turn.cut, turn.repeated_tokens))}"))
    thought = _thought(turn)
    if thought:
        rows.append(indented(visible(thought)))
    if not turn.actions:
        rows.append(ink.doubtful("  no command could be read from this"))
    for action in turn.actions:
        rows.append(indented(ink.bold(f"$ {visible(action.command)}")))
        if action.observation is not None:
            rows += _observation_rows(action.observation, ink, full=full)
    return "\n".join(line for line in rows if line)


def _cut_words(cut: Cut, repeated_tokens: int) -> str:
    """What the policy no longer sees from this turn on."""
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
        indented(shortened(visible(seen.output), full=full)),
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
    """What the policy said before its command."""
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
