"""Episodes → groups of members with samples, by the trainer's own functions, as if workers had published the episodes."""

from collections.abc import Mapping, Sequence

from benchmarks.scripted_fleet import task
from benchmarks.simulation.episodes import Episode
from pipeline.journal.rows import JudgedTurn
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.trajectory import Failed, Reward, Submitted, Trajectory, head_of
from trainer.batching.samples import samples_of
from trainer.rollouts.groups import Group, Member, MemberJudgement, group_id_of

MAX_TOKENS = 2048


def group(
    cursor: int,
    episodes: Sequence[Episode],
    rewards: Sequence[float | None],
    scores: Sequence[Mapping[int, float] | None],
    *,
    version: int,
    vocab_size: int,
) -> Group:
    """The closed group of episodes of one task; an episode without a reward failed, and has no samples.

    `scores` are a judge's, by turn; None: there was none.
    """
    made = Group(cursor, len(episodes), version, episodes[0].task.name)
    for number, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
        trajectory = _trajectory(cursor, number, len(episodes), episode, reward, version)
        samples = (
            () if reward is None else samples_of(trajectory, vocab_size=vocab_size, max_tokens=MAX_TOKENS)
        )
        head = head_of(trajectory, body_bytes=0)
        judgement = _judgement(scores[number])
        made.members[number] = Member(head, samples, entries=[], judgement=judgement)
    return made


def _judgement(scores: Mapping[int, float] | None) -> MemberJudgement | None:
    """One that arrived in time."""
    if scores is None:
        return None
    turns = (JudgedTurn(turn=turn, score=score) for turn, score in scores.items())
    return MemberJudgement(fate="joined", turns=tuple(turns), judge="oracle")


def _trajectory(
    cursor: int, number: int, size: int, episode: Episode, reward: float | None, version: int
) -> Trajectory:
    request = RolloutRequest(
        id=f"{group_id_of(cursor)}.{number}",
        run_id="simulation",
        purpose="train",
        task=task(episode.task.name),
        group_id=group_id_of(cursor),
        member=number,
        group_size=size,
        version_at_enqueue=version,
        sampling=Sampling(),
        limits=Limits(),
        agent_config="",
        tokenizer="",
        enqueued_at=0.0,
    )
    failed = Failed(boundary="sandbox", message="simulated", transient=True)
    graded = None if reward is None else Reward(value=reward, resolved=reward == 1, decided_by="simulation")
    return Trajectory(
        claim=Claim(request=request, attempt=1, worker="simulation", claimed_at=0.0),
        turns=tuple(episode.turns),
        outcome=failed if reward is None else Submitted(patch=b""),
        reward=graded,
        started_at=0.0,
        finished_at=0.0,
    )
