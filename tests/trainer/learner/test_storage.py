"""What four processes move to their hosts and keep there: exports, snapshots, and checkpoints written beside the next steps."""

from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from benchmarks.small_models import EXPERTS, write_model
from tests.trainer.forking import run_ranks
from tests.trainer.learner.storage_ranks import Counted, Layout
from tests.trainer.learner.tiny import config, largest_difference, read_export
from trainer.learner.export import to_hugging_face
from trainer.learner.hf import INDEX_FILE
from trainer.learner.megatron import Learner

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, pytest.mark.timeout(1200)]  # four processes on all cores

LAYOUTS = {
    "data": {},
    "tensor x data, distributed optimizer": {"tensor_parallel": 2, "distributed_optimizer": True},
    "tensor x pipeline": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "experts x data": {"expert_parallel": 2, "distributed_optimizer": True},
    "data, MLPs only": {"train_only": (".mlp.",)},
}
REPLICAS = {
    "data": 4,
    "tensor x data, distributed optimizer": 2,
    "tensor x pipeline": 1,
    "data, MLPs only": 4,
}


@pytest.fixture(scope="module")
def models(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    experts = write_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERTS)
    return {name: experts if "experts" in name else qwen3 for name in LAYOUTS}


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes left behind."""
    results = tmp_path_factory.mktemp("four")
    layouts = [
        Layout(name=name, config=config(snapshots_kept=1, **changes), model_directory=str(models[name]))
        for name, changes in LAYOUTS.items()
    ]
    (results / "plan.json").write_bytes(msgspec.json.encode(layouts))
    run_ranks(
        4, "tests.trainer.learner.storage_ranks", str(results / "plan.json"), str(results), logs=results
    )
    return results


@pytest.fixture(scope="module")
def ranks(results: Path) -> list[Counted]:
    return [
        msgspec.json.decode((results / f"rank-{rank}.json").read_bytes(), type=Counted) for rank in range(4)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_export_moves_each_byte_to_one_host_once(
    name: str, results: Path, ranks: list[Counted], models: dict[str, Path]
) -> None:
    exported = read_export(results / name)
    assert exported.keys() == read_export(models[name]).keys()
    sizes = [tensor.nbytes for tensor in exported.values()]
    moved = [rank.exported[name] for rank in ranks]
    assert sum(moved) == sum(sizes)
    assert max(moved) <= sum(sizes) / 4 + 3 * max(sizes), "a parameter becomes three tensors at most"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_index_names_every_file_and_tensor_of_an_export(name: str, results: Path) -> None:
    index = msgspec.json.decode((results / name / INDEX_FILE).read_bytes())
    files = {}
    for path in (results / name).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == files
    assert len(set(files.values())) == 4
    sizes = [tensor.nbytes for tensor in read_export(results / name).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_past_weights_answer_as_they_did_and_the_present_ones_stay(name: str, ranks: list[Counted]) -> None:
    for rank in ranks:
        assert (rank.past[name], rank.present[name]) == (0, 0)


@pytest.mark.parametrize("name", REPLICAS)
def test_a_snapshot_is_kept_once_for_all_replicas(name: str, ranks: list[Counted]) -> None:
    kept, held = ([getattr(rank, what)[name] for rank in ranks] for what in ("snapshots", "parameters"))
    assert sum(kept) == sum(held) / REPLICAS[name]
    assert max(kept) <= 2 * min(kept)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumed_from_a_checkpoint_written_beside_its_steps_goes_on_bit_for_bit(
    name: str, ranks: list[Counted]
) -> None:
    assert [rank.resumed[name] for rank in ranks] == [True] * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_four_processes_holds_what_they_exported(
    name: str, results: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    options = msgspec.structs.replace(
        config(**LAYOUTS[name]), tensor_parallel=1, pipeline_parallel=1, expert_parallel=1
    )
    learner = Learner(options, model_directory=models[name])
    assert learner.restore(results / f"{name}-checkpoint") == b"four"
    learner.export(tmp_path / "alone")
    assert largest_difference(read_export(tmp_path / "alone"), read_export(results / name)) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_four_processes_becomes_the_directory_that_they_exported(
    name: str, results: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    to_hugging_face(
        results / f"{name}-checkpoint", tmp_path / "converted", config(), model_directory=models[name]
    )
    assert largest_difference(read_export(tmp_path / "converted"), read_export(results / name)) == 0
