"""Each sink shows the same numbers under the same names, read back through its own reader; none of them can hold up a run."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wandb
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.journal.rows import EpisodeRow, Row
from tests.trainer.records.test_console import JUDGED, row
from tests.trainer.records.test_sinks import evaluation
from trainer.recipe import MlflowRecipe, Recipe, SinksRecipe, WandbRecipe, load_recipe
from trainer.records.points import MetricsFile
from trainer.records.sinks import METRICS_FILE, InBackground, RunFacts, open_sinks

# MLflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

ROWS: tuple[Row, ...] = (
    evaluation("heldout_before", 0.25, greedy=False, step=0),
    replace(row(1, 0.5), judging=JUDGED, at=1_800_000_001.0),
    replace(row(2, 0.625), at=1_800_000_002.0),
    evaluation("heldout_after", 0.75, greedy=True, step=2),
)
EVERYWHERE = SinksRecipe(
    wandb=WandbRecipe(project="swerve", mode="offline"), mlflow=MlflowRecipe(experiment="swerve")
)
Numbers = dict[tuple[str, int], float]  # by name and step


class Silent:
    def show(self, row: Row) -> None: ...


def recipe(sinks: SinksRecipe) -> Recipe:
    return replace(load_recipe(Path("trainer/recipes/demo.toml")), sinks=sinks)


def show(directory: Path, rows: tuple[Row, ...], sinks: SinksRecipe, resumed_at: int | None = None) -> None:
    with open_sinks(RunFacts("run-1", directory, recipe(sinks), resumed_at), Silent()) as opened:
        for one in rows:
            for sink in opened:
                sink.show(one)
    wandb.teardown()  # its service may lose a run that begins in the same second as one of the same name, of another process


def in_file(directory: Path) -> Numbers:
    lines = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    return {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("step", "at")
    }


def in_tensorboard(directory: Path) -> Numbers:
    shown = EventAccumulator(str(directory / "board"))
    shown.Reload()
    return {
        (name, point.step): point.value for name in shown.Tags()["scalars"] for point in shown.Scalars(name)
    }


def in_mlflow(directory: Path) -> Numbers:
    from mlflow.tracking import MlflowClient

    from trainer.records.sinks import default_uri

    client = MlflowClient(tracking_uri=default_uri(directory))
    experiment = client.get_experiment_by_name("swerve")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        (name, point.step): point.value
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    }


def wandb_records(directory: Path) -> Iterator[Any]:
    """The records of offline runs, by W&B's own message type. The files are logs in LevelDB's format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    block = 32 * 1024
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        data, place, parts = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            left = block - place % block
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, place)
            parts += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, parts = Record.FromString(parts), b""
                yield record


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    return [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(directory)
        if record.WhichOneof("record_type") == "history"
    ]


def in_wandb(directory: Path) -> Numbers:
    return {
        (name, line["step"]): value
        for line in wandb_history(directory)
        for name, value in line.items()
        if "/" in name
    }


@pytest.mark.slow
def test_each_sink_shows_the_same_numbers_under_the_same_names(tmp_path: Path) -> None:
    show(tmp_path, ROWS, EVERYWHERE)
    expected = in_file(tmp_path)
    assert expected["train/reward_mean", 2] == 0.625
    assert expected["heldout/sampled/success", 0] == 0.25
    assert expected["heldout/greedy/success", 2] == 0.75
    assert {name for name, _ in expected} >= {"judge/score_mean", "train/loss", "train/wall_s"}
    assert in_mlflow(tmp_path) == expected
    assert in_wandb(tmp_path) == expected
    assert in_tensorboard(tmp_path) == pytest.approx(expected), "TensorBoard holds float32"


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_place_everywhere(tmp_path: Path) -> None:
    show(tmp_path, ROWS[:3], EVERYWHERE)
    again = replace(row(2, 0.875), at=1_800_000_009.0)
    show(tmp_path, (again, replace(row(3, 1.0), at=1_800_000_010.0)), EVERYWHERE, resumed_at=2)
    for numbers in (in_file(tmp_path), in_mlflow(tmp_path), in_wandb(tmp_path), in_tensorboard(tmp_path)):
        rewards = {step: value for (name, step), value in numbers.items() if name == "train/reward_mean"}
        assert rewards == {1: 0.5, 2: 0.875, 3: 1.0}
    ids = {
        record.run.run_id for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "run"
    }
    assert ids == {"run-1"}


@pytest.mark.slow
def test_wandb_has_a_table_of_the_rollouts_without_their_text(tmp_path: Path) -> None:
    episode = EpisodeRow(
        request_id="r-1",
        group_id="g00000001",
        task_id="task-1",
        purpose="train",
        member=0,
        group_size=4,
        fate="trained",
        reward=1.0,
        outcome="submitted",
    )
    show(tmp_path, (episode, ROWS[1]), SinksRecipe(wandb=EVERYWHERE.wandb))
    (found,) = [line for line in wandb_history(tmp_path) if "rollouts.path" in line]
    (run,) = tmp_path.glob("wandb/offline-run-*")
    table = json.loads((run / "files" / found["rollouts.path"]).read_text())
    (line,) = [dict(zip(table["columns"], data, strict=True)) for data in table["data"]]
    assert (line["request_id"], line["fate"], line["reward"]) == ("r-1", "trained", 1.0)


def test_a_line_that_a_crash_cut_short_is_gone_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"at":1.0}\n{"step":2,"at":2.0}\n{"step":3,')
    with MetricsFile(path, resumed_at=2) as metrics:
        metrics.show(row(2, 0.5))
    assert [msgspec.json.decode(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2]


def test_a_sink_that_fails_says_so_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def show(self, row: Row) -> None:
            raise ConnectionError("no server")

        def close(self) -> None: ...

    with InBackground("Board of others", Broken) as sink:
        for _ in range(20):
            sink.show(ROWS[1])
    assert [record.getMessage() for record in caplog.records] == [
        "Board of others shows nothing more of this run: ConnectionError: no server"
    ]


def test_a_recipe_may_turn_every_sink_off(tmp_path: Path) -> None:
    show(tmp_path, ROWS, SinksRecipe(tensorboard=False, jsonl=False))
    assert os.listdir(tmp_path) == []
