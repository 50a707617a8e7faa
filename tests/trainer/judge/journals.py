"""Journals of judged runs."""

from pipeline.journal.rows import EpisodeRow, JudgedTurn, JudgementFate, JudgementRow


def episode(
    rollout_id: str,
    reward: float | None,
    *,
    group: int = 0,
    version: int = 0,
    num_turns: int = 2,
    finished_at: float = 1.0,
) -> EpisodeRow:
    return EpisodeRow(
        request_id=rollout_id,
        group_id=f"g{group}",
        task_id="task",
        purpose="train",
        member=0,
        group_size=1,
        fate="trained",
        cursor=group,
        outcome="submitted",
        reward=reward,
        num_turns=num_turns,
        version_first=version,
        finished_at=finished_at,
    )


def judgement(
    rollout_id: str,
    *scores: float | None,
    group: int = 0,
    version: int = 0,
    fate: JudgementFate = "joined",
    votes: tuple[float | None, ...] = (),
    waited_s: float = 2.0,
    error: str = "",
) -> JudgementRow:
    return JudgementRow(
        rollout_id=rollout_id,
        group_id=f"g{group}",
        task_id="task",
        cursor=group,
        fate=fate,
        turns=tuple(
            JudgedTurn(turn, score, votes, "no_valid_vote" if score is None else None)
            for turn, score in enumerate(scores)
        ),
        version_first=version,
        num_turns=len(scores),
        judge="rule:commands" if scores else "",
        error=error,
        waited_s=waited_s,
        at=1.0,
    )


def judged_run(
    rollouts: list[tuple[float, float]], *, versions: int = 1
) -> tuple[list[JudgementRow], list[EpisodeRow]]:
    """Of (score, reward), two turns each, in groups of two, over so many weight versions."""
    judgements: list[JudgementRow] = []
    episodes: list[EpisodeRow] = []
    for number, (score, reward) in enumerate(rollouts):
        group, version = number // 2, number * versions // len(rollouts)
        judgements.append(judgement(f"r{number}", score, score, group=group, version=version))
        episodes.append(
            episode(f"r{number}", reward, group=group, version=version, finished_at=float(number))
        )
    return judgements, episodes
