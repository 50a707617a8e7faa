"""A run of supervised fine-tuning as a process, without Redis: what it trains, measures, writes and says, and what a kill costs."""

import hashlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.web.runs import OpenRun, summary
from pipeline.journal.reading import identity, launches, read
from pipeline.journal.rows import (
    EndRow,
    HeldoutLossRow,
    ImitationStepRow,
    PublicationRow,
    SkippedBatchRow,
)
from pipeline.tokenizer import read_bundle
from pipeline.where import __main__ as where
from tests.trainer.forking import Forked, fork, run_ranks
from tests.trainer.imitation.test_rows import ANSWER, write
from tests.trainer.learner.tiny import read_export
from trainer import curve, run
from trainer.compare.evaluations import rewards_of
from trainer.imitation.rows import ImitationData, ImitationRow, RowCounts, RowTokens
from trainer.learner.families.registry import read_architecture
from trainer.report.imitation import imitation_table, summarize_imitation

RECIPE = """
kind = "sft"
name = "taught"
model = "{model}"
num_steps = 6
[data]
train = ["train.jsonl"]
heldout = ["heldout.jsonl"]
[batch]
rows_per_step = 3
[learner]
lr = 3e-3
dtype = "fp32"
micro_batch_tokens = 512
[evaluation]
every_steps = 3
[checkpoint]
every_steps = 2
"""
NO_REDIS = "redis://127.0.0.1:1"


def row(number: int, **fields: Any) -> dict[str, Any]:
    question = {"role": "user", "content": f"which number follows {number}?"}
    return {
        "messages": [question, ANSWER | {"content": f"{number + 1} follows {number}, I am sure"}]
    } | fields


def write_recipe(directory: Path, model: Path) -> Path:
    """A recipe and its rows: five to train on, four held out."""
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "train.jsonl", *map(row, range(5)))
    write(directory / "heldout.jsonl", *map(row, range(10, 14)))
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(model=model))
    return path


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    return write_recipe(tmp_path, tiny_model)


def begun(recipe: Path, name: str, *words: str, module: str = "trainer.run", **variables: str) -> Forked:
    log = recipe.with_name(f"{name}.log")
    place = ("--run-dir", str(recipe.with_name(name)))
    return fork(
        module,
        str(recipe),
        *place,
        *words,
        log=log,
        SWERVE_REDIS_URL=NO_REDIS,
        OMP_NUM_THREADS="1",
        **variables,
    )


def done(recipe: Path, name: str, *words: str, status: int = 0, **given: str) -> str:
    """The output of a run that has ended."""
    process, log = begun(recipe, name, *words, **given), recipe.with_name(f"{name}.log")
    assert process.wait() == status, log.read_text()
    return log.read_text()


def steps(run_dir: Path) -> list[ImitationStepRow]:
    return list(read(run_dir / "journal", ImitationStepRow))


def digests(weights: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights.glob("*.safetensors")
    }


@dataclass(frozen=True)
class Finished:
    run_dir: Path
    model: Path
    output: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Finished:
    """A run that was never interrupted."""
    recipe = write_recipe(tmp_path_factory.mktemp("taught"), tiny_model)
    output = done(recipe, "whole", "--run-id", "whole")
    return Finished(recipe.with_name("whole"), tiny_model, output)


# Quick: fine-tuning lowers the loss of rows that it does not see, without Redis.
def test_a_run_lowers_the_loss_on_rows_that_it_was_not_trained_on(finished: Finished) -> None:
    assert [(row.step, len(row.rows), row.num_samples) for row in steps(finished.run_dir)] == [
        (step, 3, 3) for step in range(1, 7)
    ]
    measured = list(read(finished.run_dir / "journal", HeldoutLossRow))
    assert [(row.name, row.step) for row in measured] == [("before", 0), ("step_3", 3), ("after", 6)]
    assert measured[0].loss > measured[1].loss > measured[2].loss
    assert measured[2].likeliest_share > measured[0].likeliest_share
    for row in measured:
        assert row.loss == pytest.approx(sum(row.row_losses) / sum(row.row_tokens))
        assert row.loss_estimate.low < row.loss < row.loss_estimate.high
        assert row.share_estimate.value == pytest.approx(row.likeliest_share)
    (end,) = read(finished.run_dir / "journal", EndRow)
    assert (end.reason, end.step, end.detail) == ("finished", 6, "finished all 6 steps")


def test_the_parts_of_a_steps_time_sum_up_to_the_wall(finished: Finished) -> None:
    for one in steps(finished.run_dir):
        parts = (
            one.forward_s,
            one.backward_s,
            one.optimizer_s,
            one.checkpoint_s,
            one.evaluation_s,
            one.other_s,
        )
        assert one.wall_s == pytest.approx(sum(parts))
        assert min(one.forward_s, one.backward_s, one.optimizer_s) > 0


def test_the_weights_at_the_end_are_a_model_that_the_next_recipe_can_name(finished: Finished) -> None:
    weights = finished.run_dir / "weights/v000006"
    assert (
        f'the weights are in {weights}; the next recipe names them as model = "{weights}"' in finished.output
    )
    assert read_architecture(weights) == read_architecture(finished.model)
    assert read_bundle(weights) == read_bundle(finished.model)
    assert digests(weights) != digests(finished.model)
    (published,) = read(finished.run_dir / "journal", PublicationRow)
    assert (published.version, published.step) == (6, 6)


def test_the_console_has_a_line_for_each_step_and_measurement_and_ends_with_the_report(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    said = finished.output
    for step in range(1, 7):
        assert f"step {step}/6  epoch {(step * 3 - 1) // 5 + 1}  loss " in said
    for name in ("before", "step 3", "after"):
        assert f"held out, {name}: " in said
    table = imitation_table(summarize_imitation(finished.run_dir), finished.run_dir)
    assert said.rstrip().endswith(table.rstrip())
    assert "6 steps of supervised fine-tuning, finished all 6 steps" in table
    assert "loss, nats a token" in table
    assert "18 rows" in table
    from trainer.report.__main__ import main

    assert main([str(finished.run_dir)]) == 0
    assert capsys.readouterr().out.rstrip() == table.rstrip()
    assert main(["--json", str(finished.run_dir)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["state"], summary["steps"]) == ("finished", 6)
    assert summary["loss"]["change"]["high"] < 0


def test_commands_about_rollouts_say_that_the_run_has_none(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, missing in ((where, "steps"), (curve, "episodes")):
        with pytest.raises(SystemExit):
            command.main([str(finished.run_dir)])
        said = f"is of supervised fine-tuning, which has no {missing}.jsonl: `python -m trainer.report`"
        assert said in capsys.readouterr().err


def test_the_list_of_runs_has_the_step_of_the_run(finished: Finished) -> None:
    line = summary("whole", OpenRun("whole", finished.run_dir, 0.0), None, is_live=None)
    assert (line["step"], line["num_steps"], line["ended"]) == (6, 6, "finished all 6 steps")


def test_sinks_show_the_loss_of_steps_and_of_held_out_rows(finished: Finished) -> None:
    lines = [json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "heldout/likeliest_share" in line] == [0, 3, 6]
    assert identity(finished.run_dir).kind == "sft"


# Quick: a run that is killed and resumed ends with the weights of one that was not, bit for bit.
def test_a_run_that_is_killed_between_steps_resumes_bit_for_bit(recipe: Path, finished: Finished) -> None:
    killed, run_dir = "tests.trainer.imitation.mortal", recipe.with_name("killed")
    done(recipe, "killed", module=killed, status=-signal.SIGKILL, DIES_AFTER_STEP="5")
    assert not (run_dir / "weights").exists()
    said = done(recipe, "killed", "--resume")
    assert "resumed from step-0000000" in said
    assert digests(run_dir / "weights/v000006") == digests(finished.run_dir / "weights/v000006")
    assert [(row.step, row.rows, row.loss) for row in steps(run_dir)] == [
        (row.step, row.rows, row.loss) for row in steps(finished.run_dir)
    ]
    names = [row.name for row in read(run_dir / "journal", HeldoutLossRow)]
    assert names == ["before", "step_3", "after"]
    first, second = launches(run_dir)
    assert first.command + " --resume" == second.command
    assert first.set == second.set
    assert any(key.startswith("learner.lr: ") for key in first.set)
    assert "resumed from step-0000000" in (run_dir / "logs" / "trainer.log").read_text()


@pytest.mark.slow
def test_a_run_that_was_complete_is_not_trained_again_and_may_be_given_more_steps(
    recipe: Path, finished: Finished
) -> None:
    done(recipe, "short", "--set", "num_steps=4")
    before = digests(recipe.with_name("short") / "weights/v000004")
    said = done(recipe, "short", "--resume", "--set", "num_steps=4")
    assert said.count("the weights are in ") == 2
    assert digests(recipe.with_name("short") / "weights/v000004") == before
    said = done(recipe, "short", "--resume")
    assert "changed since the run began: num_steps: 4 -> 6" in said
    assert launches(recipe.with_name("short"))[-1].changed == ("num_steps: 4 -> 6",)
    assert digests(recipe.with_name("short") / "weights/v000006") == digests(
        finished.run_dir / "weights/v000006"
    )


@pytest.mark.slow
def test_a_signal_ends_a_run_in_good_order_and_a_resume_goes_on(recipe: Path) -> None:
    process, run_dir = begun(recipe, "stopped", "--set", "num_steps=100000"), recipe.with_name("stopped")
    while not steps(run_dir):
        assert process.poll() is None, recipe.with_name("stopped.log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    output = recipe.with_name("stopped.log").read_text()
    last = steps(run_dir)[-1].step
    assert f"stopped by a signal at step {last} of 100000" in output
    assert "stopped: stopped" not in output
    assert summarize_imitation(run_dir).state == "stopped"
    said = done(recipe, "stopped", "--resume", "--set", f"num_steps={last + 2}")
    assert f"resumed from step-{last:08d}" in said
    assert [row.step for row in steps(run_dir)] == list(range(1, last + 3))


@pytest.mark.slow
def test_two_ranks_train_what_one_does(recipe: Path, finished: Finished) -> None:
    run_dir = recipe.with_name("ranks")
    run_ranks(2, "trainer.run", str(recipe), "--run-dir", str(run_dir), logs=recipe.parent)
    ours, theirs = (read_export(one / "weights/v000006") for one in (run_dir, finished.run_dir))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.numpy(), theirs[name].numpy(), atol=1e-5)
    first, second = (
        [row.loss for row in read(one / "journal", HeldoutLossRow)] for one in (run_dir, finished.run_dir)
    )
    assert first == pytest.approx(second, abs=1e-4)


@pytest.mark.slow
def test_a_batch_that_is_not_finite_is_skipped_and_a_second_one_ends_the_run(recipe: Path) -> None:
    words = ("--set", "learner.lr=1e30", "--set", "evaluation.every_steps=0", "--set", "learner.clip_grad=0")
    said = done(recipe, "burst", *words, status=1)
    assert "of a batch of 3 rows is not finite: skipped it, the weights are unchanged" in said
    assert "and so was the batch before it" in said
    skipped = list(read(recipe.with_name("burst") / "journal", SkippedBatchRow))
    assert len(skipped) == 2
    assert all("train.jsonl, line " in place for row in skipped for place in row.request_ids)
    assert summarize_imitation(recipe.with_name("burst")).state == "error"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> Callable[..., int]:
    """`trainer.run RECIPE --run-dir DIR/run WORDS` in this process; returns its exit status."""
    monkeypatch.setenv("SWERVE_REDIS_URL", NO_REDIS)

    def call(*words: str) -> int:
        given = [str(recipe), "--run-dir", str(recipe.with_name("run")), *words]
        monkeypatch.setattr("sys.argv", ["trainer.run", *given])
        return run.main()

    return call


def test_a_dry_run_prints_the_recipe_and_counts_rows_tokens_and_steps(
    call: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--dry-run") == 0
    said = capsys.readouterr().out
    assert 'kind = "sft"' in said
    assert "warmup_steps = 0" in said, "defaults are written out"
    assert "plan: 6 steps x 3 rows: 3.60 epochs" in said
    assert "rows: 5 with " in said
    assert "0 rows as token ids, 5 rendered by the chat template" in said
    assert "held out: 4 rows with " in said
    assert "held-out rows are training rows" not in said
    assert not recipe.with_name("run").exists()


def test_held_out_rows_that_are_trained_too_are_counted(
    call: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(recipe.with_name("heldout.jsonl"), *map(row, range(3, 7)))
    assert call("--dry-run") == 0
    assert "; 2 of 4 held-out rows are training rows too, so their loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--dry-run", "--gpus", "8xH100-80"], 'which knows recipes of kind "rl" only'),
        (["--set", "alarms.window_steps=3"], "alarms is not a key of a recipe; there are kind, name, "),
        (["--set", "data.train=[]"], "data.train is empty; give one file of rows at least"),
        (["--set", "num_epochs=2"], "num_steps and num_epochs: both are given; give one of the two"),
        (["--set", "learner.loss.kind=grpo"], 'learner.loss.kind is "grpo"; it must be "sft"'),
        (["--set", "data.max_tokens=1000"], "set it to learner.micro_batch_tokens = 512 at most"),
        (["--set", "data.heldout=[]"], "evaluation.every_steps has no effect without data.heldout"),
        (
            ["--set", "evaluation={before=false,after=false}"],
            "data.heldout is never measured: set evaluation.before, evaluation.after or evaluation.every_steps",
        ),
        (["--resume"], "there is no such directory"),
    ],
)
def test_misuse_is_one_line_with_the_fix_and_leaves_nothing(
    words: list[str],
    complaint: str,
    call: Callable[..., int],
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert not recipe.with_name("run").exists()


def test_a_bad_row_is_refused_before_anything_is_written(
    call: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(recipe.with_name("train.jsonl"), row(1), {"messages": []})
    assert call() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.train: " in line
    assert "train.jsonl, line 2: messages is missing; give messages, or samples" in line
    assert not recipe.with_name("run").exists()


def test_a_run_cannot_be_resumed_with_another_kind_or_other_files(
    call: Callable[..., int], recipe: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--run-dir", str(finished.run_dir), "--resume")
    assert call(*place) == 2
    assert "a resumed run cannot change data.heldout: " in capsys.readouterr().err


def test_runs_without_episodes_cannot_be_compared(finished: Finished) -> None:
    with pytest.raises(
        ValueError, match="is of supervised fine-tuning, which plays no episodes: evaluate its weights"
    ):
        rewards_of(finished.run_dir, name="heldout_after", tasks="", greedy=False)


@pytest.mark.slow
def test_a_run_cannot_be_resumed_with_other_rows_in_the_same_files_or_with_fewer_steps(recipe: Path) -> None:
    done(recipe, "other", "--set", "num_steps=2")
    said = done(recipe, "other", "--resume", "--set", "num_steps=1", status=2)
    assert "num_steps makes 1 steps, and step-00000002 has taken 2: raise it" in said
    for name, numbers in (("heldout", range(11, 15)), ("train", range(1, 6))):
        path = recipe.with_name(f"{name}.jsonl")
        before = path.read_text()
        write(path, *map(row, numbers))
        said = done(recipe, "other", "--resume", "--set", "num_steps=4", status=2)
        assert "data: the rows are not those of step-00000002: restore the files and [chat], or start" in said
        path.write_text(before)


def test_the_digest_of_the_rows_depends_on_each_of_them_and_on_where_rows_end() -> None:
    one, other, third = (
        RowTokens(np.array([1, number], np.int32), np.array([False, True])) for number in (2, 3, 4)
    )

    def digest(train: list[tuple[RowTokens, ...]], heldout: list[tuple[RowTokens, ...]]) -> str:
        rows = ([ImitationRow("", samples) for samples in part] for part in (train, heldout))
        return ImitationData(*rows, RowCounts(), RowCounts()).digest

    made = [
        digest([(one,), (other,)], [(third,)]),
        digest([(one, other)], [(third,)]),
        digest([(one,), (other,)], [(one,)]),
        digest([(one,)], [(other,), (third,)]),
    ]
    assert len({*made}) == len(made)


def test_commands_for_reinforcement_learning_refuse_the_recipe(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.plan.__main__ import main

    monkeypatch.setattr("sys.argv", ["trainer.plan", str(recipe), "--gpus", "8xH100-80"])
    assert main() == 2
    assert 'kind is "sft", and this command is for recipes of kind "rl"' in capsys.readouterr().err
