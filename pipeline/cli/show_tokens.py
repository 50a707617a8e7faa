"""What a step did with the tokens of a rollout, as `show` prints it: a line for each turn."""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.cli import journal
from pipeline.cli.ink import Ink, count
from pipeline.message import MalformedMessage, unpack_float32s
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.trained import REASONS, TrainedTokens, TrainedTurn, unpack_halves
from pipeline.trajectory import Turn


def find(run_dirs: Collection[Path], request_id: str) -> TrainedTokens | None:
    """None if no store has it, or another step than the journal's wrote it: a resume took that step back."""
    for run_dir in run_dirs:
        found = RolloutStore(run_dir / DIRECTORY).trained(request_id)
        if found is not None and found.step == _step_of(run_dir, request_id):
            return found
    return None


def text(trained: TrainedTokens, turns: Sequence[Turn], ink: Ink) -> str:
    title = f"what step {trained.step} did with its tokens, from weights v{trained.version}"
    return "\n".join([ink.bold(title), *_lines(trained, turns)])


def plain(trained: TrainedTokens) -> dict[str, Any]:
    """As `--json` prints it."""
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


def _lines(trained: TrainedTokens, turns: Sequence[Turn]) -> Iterator[str]:
    for one in trained.turns:
        if one.reasons and one.turn < len(turns):
            with contextlib.suppress(MalformedMessage, IndexError):  # of another release
                yield _line(one, turns[one.turn])


def _line(trained: TrainedTurn, turn: Turn) -> str:
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


def _step_of(run_dir: Path, request_id: str) -> int | None:
    try:
        return journal.step_of(journal.directory_in(run_dir), request_id)
    except LookupError:
        return None
