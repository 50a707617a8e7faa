"""Who gets trained: what was offered to training against what a step used, by length, repository, difficulty and outcome."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from infra.web.journal_files import JsonRow, RunJournal
from infra.web.rollout_row import RolloutRow
from infra.web.tasks import mean_reward, repository_of

TRAINED = "trained"
_DIFFICULTIES = ((0.0, "never solved"), (0.25, "rarely"), (0.75, "sometimes"), (0.999, "often"))
_UNKNOWN = "not known"


def represented(journal: RunJournal) -> JsonRow:
    """Of the training episodes that are settled."""
    episodes = [one for one in journal.episodes.rows if one.purpose == "train"]
    of_task: dict[str, list[RolloutRow]] = defaultdict(list)
    for one in episodes:
        of_task[one.task_id].append(one)
    difficulties = {task_id: difficulty(mean_reward(found)) for task_id, found in of_task.items()}
    kinds: dict[str, Callable[[RolloutRow], str]] = {
        "length": lambda one: length_bucket(one.sampled_tokens),
        "repository": lambda one: repository_of(one.task_id),
        "difficulty": lambda one: difficulties[one.task_id],
        "outcome": lambda one: one.outcome or "withdrawn",
    }
    return {
        "num_offered": len(episodes),
        "num_trained": sum(one.fate == TRAINED for one in episodes),
        "by": {name: _cells(episodes, bucket_of) for name, bucket_of in kinds.items()},
        "reasons": Counter(one.fate for one in episodes if one.fate != TRAINED),
    }


def length_bucket(sampled_tokens: int) -> str:
    """Powers of two, so that short and long rollouts are told apart alike."""
    if sampled_tokens < 1:
        return "0"
    first = 1 << (sampled_tokens.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


def difficulty(success: float | None) -> str:
    """A word for the mean reward of a task over the whole run."""
    if success is None:
        return _UNKNOWN
    return next((word for most, word in _DIFFICULTIES if success <= most), "always")


def _cells(episodes: Sequence[RolloutRow], bucket_of: Callable[[RolloutRow], str]) -> list[JsonRow]:
    of_bucket: dict[str, list[RolloutRow]] = defaultdict(list)
    for one in episodes:
        of_bucket[bucket_of(one)].append(one)
    num_trained = sum(one.fate == TRAINED for one in episodes)
    return [
        _cell(bucket, of_bucket[bucket], num_offered=len(episodes), num_trained=num_trained)
        for bucket in sorted(of_bucket, key=_order)
    ]


def _cell(bucket: str, episodes: Sequence[RolloutRow], *, num_offered: int, num_trained: int) -> JsonRow:
    trained = sum(one.fate == TRAINED for one in episodes)
    ratio = (trained / num_trained) / (len(episodes) / num_offered) if num_trained else None
    return {
        "bucket": bucket,
        "offered": len(episodes),
        "trained": trained,
        "ratio": ratio,
        "reasons": Counter(one.fate for one in episodes if one.fate != TRAINED),
    }


def _order(bucket: str) -> tuple[int, str]:
    """Lengths and difficulties from least to most, all else by name."""
    words = [word for _, word in _DIFFICULTIES] + ["always", _UNKNOWN]
    if bucket in words:
        return words.index(bucket), ""
    first = bucket.partition("-")[0]
    return (int(first), "") if first.isascii() and first.isdigit() else (0, bucket)
