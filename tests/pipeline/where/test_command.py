"""`python -m pipeline.where`: from the directory of a run to tables and JSON."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.journal.rows import DeliveryRow, EnginePause, RankUse, Row
from pipeline.request import Claim
from pipeline.rollout_store.reading import DIRECTORY
from pipeline.where import __main__ as command
from tests.pipeline import samples
from tests.pipeline.where.made import end, episode, fleet, start, step
from trainer.records.journal_writer import Journal
from trainer.records.rollout_writer import RolloutWriter
from trainer.report import __main__ as report


def write(run_dir: Path, *rows: Row) -> None:
    with Journal(run_dir / "journal") as journal:
        for row in rows:
            journal.append(row)


def test_the_tables_of_a_run_sum_up_to_the_wall_of_each_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pause = EnginePause(engine="http://one", began_at=130.0, ended_at=132.0)
    write(
        tmp_path,
        start(110.0, other=10.0),
        fleet(span_s=60.0, running=3, closed_by="lag", at=120.0),
        step(1, 200.0, "a", began_at=170.0, wait_s=50.0, forward_s=30.0, checkpoint_s=10.0),
        episode("a"),
        DeliveryRow(
            version=1,
            step=1,
            engines=("http://one",),
            quarantined=(),
            update_s=3.0,
            at=133.0,
            pauses=(pause,),
        ),
        end(220.0, evaluation=20.0),
    )
    assert command.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for role, wall_s in (("trainer", 120.0), ("slots", 240.0), ("engines", 120.0)):
        assert found[role]["wall_s"] == wall_s == sum(found[role]["parts_s"].values())
        assert found[role]["unknown"] == [] or role == "engines"
    assert found["engines"]["parts_s"]["paused for weights"] == 2.0
    assert found["rollouts"]["num_rollouts"] == 1
    assert found["advice"][0]["setting"] == "--slots"
    assert command.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "waiting for groups" in text
    assert "1. --slots, at most" in text
    assert "rollouts.keep" in text, "what is not known is said"


def test_the_report_of_a_run_says_the_same_of_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last evaluation came after the last step, whose rows alone say 0 % of it."""
    write(
        tmp_path,
        start(110.0, other=10.0),
        step(1, 200.0, "a", began_at=170.0, wait_s=50.0, forward_s=30.0, checkpoint_s=10.0),
        episode("a"),
        end(220.0, evaluation=20.0),
    )
    assert command.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["trainer"]
    report.main([str(tmp_path)])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("time ")]
    assert line.split(maxsplit=1)[1].startswith(f"{found['wall_s']:.1f} s: ")
    said = dict(part.rsplit(" ", 1) for part in line.split(": ")[1].split(", "))
    assert said == {name: f"{s / found['wall_s']:.1%}" for name, s in found["parts_s"].items() if s}
    assert said["evaluation"] == "16.7%"


def test_kept_rollouts_say_what_engines_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, start(110.0, other=10.0), step(1, 200.0, wait_s=90.0))
    turn = samples.turn(asked_at=150.0, generate_s=10.0, engine_wait_s=4.0, engine="http://one")
    claim = Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=149.0)
    writer = RolloutWriter(tmp_path / DIRECTORY, max_bytes=2**20)
    writer.add_trajectory(samples.trajectory(claim, turns=(turn,)))
    writer.close()
    assert command.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["engines"]
    assert found["parts_s"]["generating for training"] == 6.0
    assert (found["wall_s"], found["unknown"]) == (100.0, [])


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main([str(tmp_path)])
    assert refused.value.code == 2
    assert "give the directory of a run" in capsys.readouterr().err


def test_gpus_of_ranks_are_summed_over_steps_the_least_busy_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(rank: int, training: float, waiting: float) -> RankUse:
        samples = {"training": 2, "waiting": 1}
        return RankUse(rank=rank, num_samples=samples, busy={"training": training, "waiting": waiting})

    write(
        tmp_path,
        start(110.0),
        replace(step(1, 200.0, "a"), gpu_use=(use(0, 2.0, 0.0), use(1, 1.0, 0.0))),
        replace(step(2, 300.0, "b"), gpu_use=(use(0, 1.0, 0.5), use(1, 0.5, 0.0))),
    )
    command.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines() if line.startswith("  rank")] == [
        ["rank", "1", "37.5%", "0.0%", "6"],
        ["rank", "0", "75.0%", "25.0%", "6"],
    ]

