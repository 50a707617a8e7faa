"""Success by task and by weight version: which tasks teach, and which do not."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from infra.web.run_journal import JsonRow, RolloutRow, RunJournal
from pipeline.representation import mean_reward
from pipeline.taskfile import TaskFacts

MAX_BUCKETS = 8
GRADER_FAILED = "failed:grader"
Bucket = tuple[int, int]
"""The first and the last version of a bucket."""


def tasks(journal: RunJournal, facts: Mapping[str, TaskFacts]) -> JsonRow:
    """Every task that has a settled episode, training tasks and held-out tasks separately. `facts` are from their verification."""
    episodes = journal.episodes.rows
    buckets = version_buckets([one.version_first for one in episodes if one.version_first is not None])
    reasons = {row.task_id: row.reason for row in journal.quarantines.rows}
    return {
        "buckets": [{"from": first, "to": last} for first, last in buckets],
        "tasks": _by_task((one for one in episodes if one.purpose == "train"), buckets, reasons, facts),
        "heldout": _by_task((one for one in episodes if one.purpose == "eval"), buckets, reasons, facts),
    }


def version_buckets(versions: Sequence[int]) -> list[Bucket]:
    """Buckets of equal width that hold all versions, MAX_BUCKETS at most."""
    if not versions:
        return []
    first, last = min(versions), max(versions)
    width = -(-(last - first + 1) // MAX_BUCKETS)
    return [(start, min(start + width - 1, last)) for start in range(first, last + 1, width)]


def _variance(rewards: Sequence[float]) -> float | None:
    """The variance of all rewards of a task. It is not finite if the rewards are too large; `statistics` would then raise an error."""
    if not rewards:
        return None
    mean = sum(rewards) / len(rewards)
    return sum((one - mean) * (one - mean) for one in rewards) / len(rewards)


def _by_task(
    episodes: Iterable[RolloutRow],
    buckets: Sequence[Bucket],
    reasons: Mapping[str, str],
    facts: Mapping[str, TaskFacts],
) -> list[JsonRow]:
    of_task: dict[str, list[RolloutRow]] = defaultdict(list)
    for one in episodes:
        of_task[one.task_id].append(one)
    return [
        {
            "task_id": task_id,
            **_played(of_task[task_id]),
            **_lesson(of_task[task_id]),
            **_trust(of_task[task_id]),
            "by_version": _by_version(of_task[task_id], buckets),
            "quarantined": reasons.get(task_id, ""),
            "verification": facts.get(task_id),
        }
        for task_id in sorted(of_task)
    ]


def _played(episodes: Sequence[RolloutRow]) -> JsonRow:
    rewards = [one.reward for one in episodes if one.reward is not None]
    played = [one for one in episodes if one.num_turns]
    return {
        "num_episodes": len(episodes),
        "success": mean_reward(episodes),
        "variance": _variance(rewards),
        "fates": Counter(one.fate for one in episodes),
        "outcomes": Counter(one.outcome or "withdrawn" for one in episodes),
        "mean_turns": statistics.fmean(one.num_turns for one in played) if played else None,
        "mean_sampled_tokens": statistics.fmean(one.sampled_tokens for one in played) if played else None,
        "last_at": max(one.at for one in episodes),
    }


def _lesson(episodes: Sequence[RolloutRow]) -> JsonRow:
    """Whether the task teaches, and the cost. Only a group whose rewards differ has advantages other than 0."""
    of_group: dict[str, set[float]] = defaultdict(set)
    for one in episodes:
        of_group[one.group_id] |= set() if one.reward is None else {one.reward}
    with_signal = {group for group, rewards in of_group.items() if len(rewards) > 1}
    rewards = set[float]().union(*of_group.values())
    match sorted(rewards):
        case _ if with_signal:
            lesson = "teaches"
        case []:
            lesson = "no_reward"
        case [0.0]:
            lesson = "never_solved"
        case [1.0]:
            lesson = "always_solved"
        case _:
            lesson = "same_in_groups"
    return {
        "lesson": lesson,
        "groups": len(of_group),
        "groups_with_signal": len(with_signal),
        "sampled_tokens": sum(one.sampled_tokens for one in episodes),
        "sampled_tokens_with_signal": sum(
            one.sampled_tokens for one in episodes if one.group_id in with_signal
        ),
    }


def _trust(episodes: Sequence[RolloutRow]) -> JsonRow:
    """The run's own evidence about the task's grader."""
    verdicts: dict[str, list[float]] = defaultdict(list)
    for one in episodes:
        if one.patch and one.reward is not None:
            verdicts[one.patch].append(one.reward)
    again = [rewards for rewards in verdicts.values() if len(rewards) > 1]
    return {
        "controls": Counter(one.control for one in episodes if one.control),
        "patches_judged_again": len(again),
        "patches_judged_differently": sum(len(set(rewards)) > 1 for rewards in again),
        "grader_failures": sum(one.outcome == GRADER_FAILED for one in episodes),
    }


def _by_version(episodes: Sequence[RolloutRow], buckets: Sequence[Bucket]) -> list[JsonRow]:
    found: list[JsonRow] = []
    for first, last in buckets:
        of_bucket = [one for one in episodes if _is_within(one.version_first, first, last)]
        row: JsonRow = {"from": first, "to": last, "num_episodes": len(of_bucket)}
        found.append(row | {"success": mean_reward(of_bucket)})
    return found


def _is_within(version: int | None, first: int, last: int) -> bool:
    return version is not None and first <= version <= last
