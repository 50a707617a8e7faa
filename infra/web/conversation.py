"""One rollout, to be read like a conversation: what was shown, thought and run, the verdict, each token, and its life."""

from collections.abc import Mapping
from typing import Any

import msgspec

from infra.web.journal_files import JsonRow
from infra.web.rollout_row import RolloutRow
from pipeline.cli import show_json
from pipeline.cli.explain import Life
from pipeline.cli.finding import FoundRollout
from pipeline.judge import JudgedStep, Judgement
from pipeline.message import MalformedMessage, unpack_float32s, unpack_int32s
from pipeline.rollout_store.trained import REASONS, TrainedTokens, TrainedTurn, unpack_halves
from pipeline.trajectory import Failed, Turn

_FAULTY = (MalformedMessage, ValueError)


def conversation(
    found: FoundRollout,
    row: RolloutRow | None,
    *,
    judgement: Judgement | None,
    life: Life | None,
    group: list[RolloutRow],
    token_texts: Mapping[int, str] | None,
    trained: TrainedTokens | None,
) -> JsonRow:
    """Everything that is known of a rollout. `life` is None if there is no journal; `token_texts` if the tokenizer is not known;
    `trained` if no step trained the rollout, or the run does not keep what steps do with tokens.
    """
    trajectory, request = found.result, found.request
    steps = {step.turn: step for step in judgement.steps} if judgement else {}
    is_trained = row is not None and row.fate == "trained"
    by_turn = {one.turn: one for one in trained.turns} if trained else {}
    turns = () if trajectory is None else trajectory.turns
    shown = {
        "request_id": found.request_id,
        "task_id": request.task.id if request else (row.task_id if row else ""),
        "group_id": request.group_id if request else (row.group_id if row else ""),
        "state": found.state,
        "source": found.source or "redis",
        "head": row,
        "unreadable": found.unreadable,
        "problem": request.task.problem if request else "",
        "started_at": trajectory.started_at if trajectory else None,
        "finished_at": trajectory.finished_at if trajectory else None,
        "worker": trajectory.claim.worker if trajectory else "",
        "attempt": trajectory.claim.attempt if trajectory else 0,
        "outcome": _outcome(found),
        "patch": _patch(found),
        "reward": _complete(trajectory.reward) if trajectory else None,
        "turns": [
            {
                **_turn(index, turn, steps.get(index), token_texts, is_trained=is_trained),
                "trained": _trained_turn(by_turn[index], turn) if index in by_turn else None,
            }
            for index, turn in enumerate(turns)
        ],
        "trained": {"step": trained.step, "version": trained.version} if trained else None,
        "judge": judgement.judge if judgement else "",
        "failures": [_complete(failure) for failure in found.failures],
        "life": life.moments if life else (),
        "verdict": life.verdict if life else "",
        "judging": life.judging if life else "",
        "group": [_member(one) for one in group],
    }
    return show_json.plain(shown)


def tokens_of(turn: Turn, token_texts: Mapping[int, str] | None, *, is_trained: bool) -> list[JsonRow]:
    """The sampled tokens. A log-prob or version that the turn does not have is None."""
    ids, logprobs = unpack_int32s(turn.sampled), unpack_float32s(turn.logprobs)
    versions: list[int | None] = [None] * len(ids)
    for span in turn.versions:
        first, last = max(0, span.start), min(len(ids), span.end)
        versions[first:last] = [span.version] * max(0, last - first)
    return [
        {
            "id": token,
            "logprob": logprobs[place] if place < len(logprobs) else None,
            "version": versions[place],
            "trained": is_trained,
            "text": token_texts.get(token) if token_texts is not None else None,
        }
        for place, token in enumerate(ids)
    ]


def _turn(
    index: int,
    turn: Turn,
    judged: JudgedStep | None,
    token_texts: Mapping[int, str] | None,
    *,
    is_trained: bool,
) -> JsonRow:
    said = turn.said
    try:
        tokens, num_fed = tokens_of(turn, token_texts, is_trained=is_trained), len(unpack_int32s(turn.fed))
    except _FAULTY:  # arrays of a length that they cannot have: the words can still be read
        tokens, num_fed = [], 0
    return {
        "index": index,
        "told": [_complete(message) for message in turn.told],
        "thought": said.reasoning,
        "text": said.content,
        "tool_calls": [_complete(call) for call in said.tool_calls],
        "raw": turn.text,
        "stop": turn.stop,
        "finish_reason": turn.finish_reason,
        "engine": turn.engine,
        "generate_s": turn.generate_s,
        "cut": _complete(turn.cut),
        "actions": [_complete(action) for action in turn.actions],
        "kept_tokens": turn.kept_tokens,
        "num_fed": num_fed,
        "num_sampled": len(tokens),
        "versions": [_complete(span) for span in turn.versions],
        "tokens": tokens,
        "judged": _complete(judged),
    }


def _trained_turn(trained: TrainedTurn, turn: Turn) -> JsonRow | None:
    """What the step did with each token of the turn; None if the record is not of these tokens."""
    try:
        columns = {
            "logprobs": [*unpack_float32s(trained.logprobs)],
            "advantages": [*unpack_float32s(trained.advantages)],
            "weights": [*unpack_halves(trained.weights)],
            "reasons": [REASONS[code] for code in trained.reasons],
        }
    except (*_FAULTY, IndexError):  # of another release
        return None
    num_sampled = len(turn.sampled) // 4
    return columns if all(len(column) == num_sampled for column in columns.values()) else None


def _outcome(found: FoundRollout) -> JsonRow | None:
    outcome = found.result.outcome if found.result else None
    if outcome is None:
        return None
    shown = _complete(outcome)
    shown.pop("patch", None)
    return {"kind": type(outcome).__name__.lower(), **shown}


def _patch(found: FoundRollout) -> str:
    outcome = found.result.outcome if found.result else None
    return "" if outcome is None or isinstance(outcome, Failed) else outcome.patch.decode(errors="replace")


def _member(row: RolloutRow) -> JsonRow:
    names = ("request_id", "member", "reward", "outcome", "fate")
    return {name: getattr(row, name) for name in names}


def _complete(value: Any) -> Any:
    """A message with all its fields: on the wire, fields with their defaults are left out."""
    match value:
        case msgspec.Struct():
            return {name: _complete(getattr(value, name)) for name in value.__struct_fields__}
        case tuple():
            return [_complete(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value
