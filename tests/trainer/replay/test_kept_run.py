"""The batch of a step, put together again from its row and the kept rollouts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pipeline.journal.rows import StartRow
from pipeline.judge import Judge, Judgement, judgement_head
from pipeline.message import pack_int32s
from pipeline.request import Claim
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.trajectory import Reward, Trajectory, head_of
from tests.pipeline.judging import judge_request, taught
from tests.trainer.judge.journals import judgement
from tests.trainer.processes import recipe as recipe
from tests.trainer.records.test_journal import step as step_row
from tests.trainer.trajectories import behind, joined, trajectory, turn
from trainer.batching.batch import Batch
from trainer.batching.collate import Overlong, make_batch
from trainer.batching.credit import logprobs_of
from trainer.batching.samples import samples_of
from trainer.recipe import CreditRecipe, OverlongRecipe, load_recipe, to_toml
from trainer.records import run_directory
from trainer.records.journal_writer import Journal
from trainer.records.rollout_writer import RolloutWriter
from trainer.replay import KeptRun
from trainer.rollouts.groups import Group, Member, MemberJudgement

VOCAB_SIZE = 512


def rollout(number: int, reward: float, *, version: int) -> Trajectory:
    """Member `number` of a group of four, whose context was cut before its last turn."""
    turns = (
        turn([1, 2], [3, 4 + number], kept=0, version=version),
        turn([5], [6], kept=4, version=version),
        turn([9], [7], kept=2, version=version),
    )
    made = trajectory(*turns)
    request = replace(made.claim.request, id=f"r{number}", member=number, group_size=4)
    return replace(
        made,
        claim=replace(made.claim, request=request),
        reward=Reward(value=reward, resolved=reward == 1, decided_by="test"),
    )


def group_of(rollouts: list[Trajectory]) -> Group:
    members = {
        number: Member(head_of(one, 0), samples_of(one, vocab_size=VOCAB_SIZE, max_tokens=512), entries=[])
        for number, one in enumerate(rollouts)
    }
    return Group(0, 4, 0, "t", members)


def keep(
    run: Path, recipe: Path, rollouts: list[Trajectory], batch: Batch, judgements: Sequence[Judgement] = ()
) -> None:
    run_directory.create(run, "run", to_toml(load_recipe(recipe)))
    writer = RolloutWriter(run / DIRECTORY, max_bytes=2**30)
    for one in rollouts:
        writer.add_trajectory(one)
    for one in judgements:
        writer.add_judgement(judgement_head(one, 0), one)
    writer.close()
    with Journal(run / "journal") as journal:
        row = replace(
            step_row(1), request_ids=batch.request_ids, baseline_ids=batch.baseline_ids, version=batch.lag_max
        )
        journal.append(row)


def test_a_withheld_member_counts_in_the_baseline_of_the_replay_too(recipe: Path, tmp_path: Path) -> None:
    rollouts = [rollout(n, reward, version=n) for n, reward in enumerate((1.0, 0.0, 1.0, 0.0))]
    batch, fates = make_batch(
        [group_of(rollouts)],
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=2,
    )
    assert fates["r0"] == "late"
    assert batch.baseline_ids == ("r0",)
    keep(tmp_path / "run", recipe, rollouts, batch)
    again = KeptRun(tmp_path / "run").batch(1, "leave_one_out", CreditRecipe())
    assert again.request_ids == batch.request_ids
    for one, other in zip(again.samples, batch.samples, strict=True):
        for name in ("tokens_T", "trained_T", "behaviour_logprobs_T", "advantages_T", "versions_T"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    means = KeptRun(tmp_path / "run").batch(1, "group_mean", CreditRecipe())
    assert means.samples[0].advantages_T.tolist() != batch.samples[0].advantages_T.tolist()


def test_a_replay_gives_credit_by_the_scores_that_the_step_had_and_by_no_later_ones(
    recipe: Path, tmp_path: Path
) -> None:
    rollouts = [rollout(n, reward, version=3) for n, reward in enumerate((1.0, 0.0, 0.0))]
    credit = CreditRecipe(method="outcome_then_steps")
    group = group_of(rollouts)
    group.members[0].judgement = joined({0: 1.0, 1: -1.0, 2: 0.5})
    group.members[1].judgement = joined({0: -0.5, 1: None, 2: 1.0})
    batch, _ = make_batch(
        [group],
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind="leave_one_out",
        credit=credit,
        withhold_beyond=None,
    )
    assert batch.credit.process_size > 0
    keep(tmp_path / "run", recipe, rollouts, batch)
    with Journal(tmp_path / "run" / "journal") as journal:
        journal.append(judgement("r0", 1.0, -1.0, 0.5))
        journal.append(judgement("r1", -0.5, None, 1.0))
        journal.append(judgement("r2", 1.0, 1.0, 1.0, fate="late"))
    again = KeptRun(tmp_path / "run").batch(1, "leave_one_out", credit)
    pairs = zip(again.samples, batch.samples, strict=True)
    assert all(one.advantages_T.tobytes() == other.advantages_T.tobytes() for one, other in pairs)
    assert again.credit == batch.credit


def test_a_replay_has_the_log_probs_that_the_teacher_gave_and_makes_the_same_batch(
    recipe: Path, tmp_path: Path
) -> None:
    rollouts = [rollout(n, 0.0, version=3) for n in range(3)]
    recipe.write_text(
        recipe.read_text() + '[judge]\nmethod = "teacher"\ntokenizer = "t"\nrequired = true\n'
        '[credit]\nmethod = "distill"\ncoefficient = 0.5\n'
    )
    credit = load_recipe(recipe).credit
    group = group_of(rollouts)
    request = replace(judge_request(), judge=Judge(method="teacher"))
    given = {
        number: taught(
            Claim(request=replace(request, rollout_id=f"r{number}"), attempt=1, worker="w", claimed_at=1.0),
            rollouts[number].turns,
            logprob=-0.3 - number,
        )
        for number in range(2)
    }
    for number, one in given.items():
        group.members[number].judgement = MemberJudgement("joined", logprobs=logprobs_of(one))
    batch, fates = make_batch(
        [group],
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind="leave_one_out",
        credit=credit,
        withhold_beyond=None,
    )
    assert fates == {"r0": "trained", "r1": "trained", "r2": "unjudged"}
    keep(tmp_path / "run", recipe, rollouts, batch, [*given.values()])
    with Journal(tmp_path / "run" / "journal") as journal:
        for name in ("r0", "r1"):
            journal.append(judgement(name, None, None, None))
        journal.append(judgement("r2", fate="failed"))
    again = KeptRun(tmp_path / "run").batch(1, "leave_one_out", credit)
    assert again.request_ids == batch.request_ids == ("r0", "r1")
    pairs = zip(again.samples, batch.samples, strict=True)
    assert all(one.advantages_T.tobytes() == other.advantages_T.tobytes() for one, other in pairs)
    assert any(sample.advantages_T.any() for sample in again.samples)
    assert again.credit == batch.credit


def test_a_replay_shapes_rewards_by_length_as_the_run_did(recipe: Path, tmp_path: Path) -> None:
    rollouts = [rollout(n, reward, version=3) for n, reward in enumerate((1.0, 0.0, 0.0))]
    rollouts[1] = replace(rollouts[1], turns=rollouts[1].turns[:1])
    overlong = OverlongRecipe(penalty=0.5, buffer_tokens=load_recipe(recipe).rollout.limits.context_tokens)
    batch, _ = make_batch(
        [group_of(rollouts)],
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind="leave_one_out",
        overlong=Overlong(overlong, lambda group_id: overlong.buffer_tokens),
        withhold_beyond=None,
    )
    recipe.write_text(
        recipe.read_text() + f"\n[overlong]\npenalty = 0.5\nbuffer_tokens = {overlong.buffer_tokens}\n"
    )
    keep(tmp_path / "run", recipe, rollouts, batch)
    again = KeptRun(tmp_path / "run").batch(1, "leave_one_out", CreditRecipe())
    pairs = zip(again.samples, batch.samples, strict=True)
    assert all(one.advantages_T.tobytes() == other.advantages_T.tobytes() for one, other in pairs)
    assert 0 < batch.samples[0].advantages_T.max() < 1, "the longer ones lost more"


def test_a_rollout_that_is_not_what_was_sampled_is_not_replayed(recipe: Path, tmp_path: Path) -> None:
    rollouts = [rollout(n, float(n), version=3) for n in range(2)]
    batch, _ = make_batch(
        [group_of(rollouts)],
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=None,
    )
    first, *rest = rollouts[1].turns
    altered = replace(rollouts[1], turns=(replace(first, sampled=pack_int32s([3, 9])), *rest))
    keep(tmp_path / "run", recipe, [rollouts[0], altered], batch)
    with pytest.raises(ValueError, match="turn 0 is not what the engine sampled"):
        KeptRun(tmp_path / "run").batch(1, "leave_one_out", CreditRecipe())


def test_a_replay_takes_as_many_threads_as_the_run_and_refuses_steps_that_had_different_ones(
    recipe: Path, tmp_path: Path
) -> None:
    run_directory.create(tmp_path / "run", "run", to_toml(load_recipe(recipe)))
    with Journal(tmp_path / "run" / "journal") as journal:
        for step in range(1, 7):
            journal.append(step_row(step))
            if step in (2, 4):
                journal.append(StartRow(step=step, seconds={}, num_threads=2 if step == 2 else 6))
    kept = KeptRun(tmp_path / "run")
    assert kept.num_threads(range(1, 3)) == 0, "a process that recorded none"
    assert (kept.num_threads(range(3, 5)), kept.num_threads(range(5, 7))) == (2, 6)
    with pytest.raises(ValueError, match="took step 3 on 2 threads and step 5 on 6, and a replay has one"):
        kept.num_threads(range(3, 7))
